"""Multi-head attention in 8 bits: all six products of it, forwards and backwards, are of int8 operands.

Queries, keys, values and their gradients are codes around zero. A softmax row is coded relative to its largest entry,
127, with a float32 weight for the row: p = code · weight, which adds up to 1 exactly and keeps flat rows as fine as
peaked ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from peer.errors import UsageError
from peer.train.eight_bit import attention_kernels, kernels
from peer.train.eight_bit.attention_kernels import Attended, Operands, joined, split
from peer.train.eight_bit.linear import Linear
from peer.train.eight_bit.ranges import ANY_GRID, RunningRange, grid_over, symmetric_grid_over
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape, draw_seed


class Attention(nn.Module):
    """Attention of every position to all that are no padding; parameters as in `text_layers.Attention`. A part of
    `TransformerBlock`, which adds up and normalises the output of `out_lin`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not share {width} numbers evenly")
        self.heads = heads
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (Linear(nn.Linear(width, width)) for _ in range(4))
        self.mixed = RunningRange()

    def mix(self, x: Quantized, tape: Tape) -> tuple[Quantized, Attended]:
        """Return the input of `out_lin` for `x: int8[b, n, d]`, of the same shape, and the tensors to keep."""
        linears = (self.q_lin, self.k_lin, self.v_lin)
        query, key, value = (each.coded(x, tape, symmetric_grid_over)[0] for each in linears)
        operands = Operands(query, key, value, self.heads, None if tape.padding is None else tape.padding[:, None])
        grid = self.mixed.grid() or grid_over(*attention_kernels.mix(operands, ANY_GRID)[1])
        codes, ends, kept = attention_kernels.mix(operands, grid)
        if tape.training:
            self.mixed.observe_(*ends)
        return Quantized(codes, grid.scale, grid.zero_point), kept

    @staticmethod
    def mix_back(gradient: Gradient, kept: Attended, tape: Tape) -> tuple[Gradient, Gradient, Gradient]:
        """Return the gradients of the outputs of q_lin, k_lin and v_lin, bfloat16[b · n, d], for that of `mix`'s
        output."""
        of_value = attention_kernels.gradient_of_value(gradient, kept, tape.draw_keys())
        of_scores = attention_kernels.gradient_of_scores(gradient, kept, tape.draw_keys())
        of_query, of_key = attention_kernels.gradients_of_query_and_key(of_scores, kept, tape.draw_keys())
        return of_query, of_key, of_value


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False
) -> torch.Tensor:
    """Return softmax(query · keyᵀ / √width) · value, as torch's function of that name, with all products in 8 bits.

    All are float[b, heads, n, width], and so is the result. `is_causal`: no position attends to a later one. Each call
    measures its own ranges, so nothing is kept from batch to batch, and the forward products are computed twice. The
    backward pass draws one 64-bit seed from torch's generator. Raises UsageError for other shapes.
    """
    if query.dim() != 4 or not query.shape == key.shape == value.shape:
        shapes = ", ".join(str([*part.shape]) for part in (query, key, value))
        raise UsageError(f"query, key and value need one shape [batch, heads, positions, width], not {shapes}")
    return _Attention.apply(query, key, value, is_causal)


class _Attention(torch.autograd.Function):
    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
        _, h, n, _ = query.shape
        hidden = torch.ones(1, n, n, dtype=torch.bool, device=query.device).triu_(1) if is_causal else None
        operands = Operands(_codes_of(query), _codes_of(key), _codes_of(value), h, hidden)
        grid = grid_over(*attention_kernels.mix(operands, ANY_GRID)[1])
        codes, _, ctx.kept = attention_kernels.mix(operands, grid)
        if any(ctx.needs_input_grad):
            ctx.tape = Tape(recording=True, training=True, seed=draw_seed())
        return split(Quantized(codes, grid.scale, grid.zero_point).dequantize(), operands.shape).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = Gradient(*kernels.to_bfloat16(joined(gradient.to(torch.float32))))
        parts = Attention.mix_back(rows, ctx.kept, ctx.tape)
        return *(split(part.data, ctx.kept.shape).to(gradient.dtype) for part in parts), None


def _codes_of(x: torch.Tensor) -> Quantized:
    """Return [b, h, n, w] as codes around zero, int8[b, n, h · w]."""
    rows = joined(x.detach().to(torch.float32))
    grid = symmetric_grid_over(*kernels.extremes(rows))
    codes, _ = kernels.quantize(rows, grid)
    return Quantized(codes.view(x.shape[0], x.shape[2], -1), grid.scale, 0)
