"""Multi-head attention in 8 bits: all six products of it, forwards and backwards, are of int8 operands.

Queries, keys, values and their gradients are codes around zero. A softmax row is coded relative to its largest entry,
127, with a float32 weight for the row: p = code · weight, which adds up to 1 exactly and keeps flat rows as fine as
peaked ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from peer.train.eight_bit import kernels, row_kernels
from peer.train.eight_bit.linear import Linear
from peer.train.eight_bit.products import batched_int8_product
from peer.train.eight_bit.ranges import RunningRange, grid_over, symmetric_grid_over
from peer.train.eight_bit.scratch import scratch
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape


@dataclass(frozen=True, slots=True)
class Attended:
    """What the backward pass needs."""

    query: Quantized
    key: Quantized
    value: Quantized
    """Each int8[b, h, n, d / h]."""
    probabilities: torch.Tensor
    """int8[b, h, n, n]."""
    weights: torch.Tensor
    """float32[b · h · n]."""


class Attention(nn.Module):
    """Attention of every position to all that are no padding; parameters as in `text_layers.Attention`. A part of
    `TransformerBlock`, which adds up and normalises what `out_lin` returns."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not share {width} numbers evenly")
        self.heads = heads
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (Linear(width, width) for _ in range(4))
        self.mixed = RunningRange()

    def mix(self, x: Quantized, tape: Tape) -> tuple[Quantized, Attended]:
        """Return what enters `out_lin` for `x: int8[b, n, d]`, of the same shape, and what to keep."""
        b, n, d = x.data.shape
        query, key, value = (self._heads(linear, x, tape) for linear in (self.q_lin, self.k_lin, self.v_lin))
        scores = scratch("scores", (b, self.heads, n, n), torch.int32, x.data.device)
        batched_int8_product(query.data, key.data.transpose(2, 3), scores)
        factor = query.scale * key.scale / math.sqrt(d // self.heads)
        probabilities, weights = row_kernels.softmax(scores, factor, tape.padding)
        sums = scratch("accumulator", tuple(query.data.shape), torch.int32, x.data.device)
        batched_int8_product(probabilities, value.data, sums)
        scales = (weights * value.scale).view(b, self.heads, n, 1)
        mixed = (sums.to(torch.float32).mul_(scales)).transpose(1, 2).reshape(b, n, d)
        grid = self.mixed.grid() or grid_over(*kernels.extremes(mixed))
        codes, ends = kernels.quantize(mixed, grid)
        if tape.training:
            self.mixed.observe_(*ends)
        kept = Attended(query, key, value, probabilities, weights)
        return Quantized(codes, grid.scale, grid.zero_point), kept

    def mix_back(self, gradient: Gradient, kept: Attended, tape: Tape) -> tuple[Gradient, Gradient, Gradient]:
        """Return the gradients of what q_lin, k_lin and v_lin returned, bfloat16[b · n, d], for that of what `mix`
        returned."""
        query, key, value, probabilities = kept.query, kept.key, kept.value, kept.probabilities
        b, h, n, width = query.data.shape
        by_head = gradient.data.view(b, n, h, width).transpose(1, 2).contiguous().view(-1, width)
        weighted, largest = row_kernels.scale_rows(by_head, kept.weights)
        codes, scale = kernels.quantize_gradient(weighted, largest, tape.draw_keys())
        of_value = self._back(probabilities.transpose(2, 3), codes.view(b, h, n, width), scale)
        codes, scale = kernels.quantize_gradient(by_head, gradient.largest, tape.draw_keys())
        scores = scratch("scores", (b, h, n, n), torch.int32, codes.device)
        batched_int8_product(codes.view(b, h, n, width), value.data.transpose(2, 3), scores)
        of_scores, largest = row_kernels.softmax_backward(scores, scale * value.scale, probabilities, kept.weights)
        codes, scale = kernels.quantize_gradient(of_scores, largest, tape.draw_keys())
        scale /= math.sqrt(width)
        of_query = self._back(codes, key.data, scale * key.scale)
        of_key = self._back(codes.transpose(2, 3), query.data, scale * query.scale)
        return of_query, of_key, of_value

    def _heads(self, linear: Linear, x: Quantized, tape: Tape) -> Quantized:
        """Return x W + b in codes around zero, a matrix for each head."""
        b, n, d = x.data.shape
        codes, grid, _ = linear.codes(x, tape, RunningRange.symmetric_grid, symmetric_grid_over, relu=False)
        split = codes.view(b, n, self.heads, d // self.heads).transpose(1, 2).contiguous()
        return Quantized(split, grid.scale, 0)

    def _back(self, a: torch.Tensor, b: torch.Tensor, factor: float) -> Gradient:
        """Return a · b · factor for each head, as rows of all heads."""
        batch, heads, n, width = b.shape
        sums = scratch("accumulator", (batch, heads, n, width), torch.int32, a.device)
        batched_int8_product(a, b, sums)
        data, largest = kernels.finish_backward(sums, factor, None, 0)
        return Gradient(data.transpose(1, 2).reshape(batch * n, heads * width), largest)
