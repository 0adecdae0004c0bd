"""The six products of attention, and the steps after their sums.

On processors that multiply bytes in one instruction these are native kernels that take a head at a time out of the
tensors as they lie (`peer/native/eight_bit_attention.h`). Elsewhere each head is copied to a matrix of its own, and
products of torch are followed by the functions of `kernels` and `row_kernels`: with the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from peer.native import CData, ffi
from peer.train.eight_bit import kernels, linear_kernels, row_kernels
from peer.train.eight_bit.kernels import pointer
from peer.train.eight_bit.products import batched_int8_product, check_terms
from peer.train.eight_bit.ranges import Grid
from peer.train.eight_bit.scratch import scratch
from peer.train.eight_bit.tensors import Gradient, Quantized

if TYPE_CHECKING:
    from peer.native._kernels import Kernels

Keys = tuple[int, int]
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Operands:
    """Those of softmax(queries · keys / √width) · values, for each head."""

    query: Quantized
    key: Quantized
    value: Quantized
    """Each int8[b, n, d] around zero, of which a head is d / h columns."""
    heads: int
    hidden: torch.Tensor | None
    """Mask of the positions that get probability 0, if any do: bool[b or 1, n or 1, n], 1 where it is the same for all
    samples or all queries."""

    @property
    def shape(self) -> Shape:
        """b, h, n, d / h."""
        b, n, d = self.query.data.shape
        return b, self.heads, n, d // self.heads

    @property
    def factor(self) -> float:
        """Score contributed by one step of queries times one step of keys."""
        return self.query.scale * self.key.scale / math.sqrt(self.shape[3])


@dataclass(frozen=True, slots=True)
class Attended:
    """Tensors for the backward pass."""

    query: Quantized
    key: Quantized
    value: Quantized
    """Each int8[b, n, d] around zero."""
    probabilities: torch.Tensor
    """int8[b, h, n, n]."""
    weights: torch.Tensor
    """float32[b · h · n]."""

    @property
    def shape(self) -> Shape:
        """b, h, n, d / h."""
        b, h, n, _ = self.probabilities.shape
        return b, h, n, self.query.data.shape[2] // h


def mix(x: Operands, grid: Grid) -> tuple[torch.Tensor, tuple[float, float], Attended]:
    """Return codes int8[b, n, d] of the mixed values, their extremes, and the tensors to keep."""
    b, h, n, _ = x.shape
    if native := _native(x):
        codes, ends = torch.empty(x.query.data.shape, dtype=torch.int8), ffi.new("float[2]")
        probabilities, weights = torch.empty((b, h, n, n), dtype=torch.int8), torch.empty(b * h * n)
        kept = Attended(x.query, x.key, x.value, probabilities, weights)
        masks, rows = (1, 1) if x.hidden is None else x.hidden.shape[:2]
        native.eb_attention_mix(
            _heads(native, kept), x.factor, pointer(x.hidden), rows * n if masks > 1 else 0, n // rows,
            x.value.scale, grid.inverse, grid.zero_point, pointer(codes), ends,
        )  # fmt: skip
        return codes, (ends[0], ends[1]), kept
    scores = _product(split(x.query.data, x.shape), split(x.key.data, x.shape).transpose(2, 3), "scores")
    probabilities, weights = row_kernels.softmax(scores, x.factor, x.hidden)
    sums = _product(probabilities, split(x.value.data, x.shape))
    mixed = sums.to(torch.float32).mul_((weights * x.value.scale).view(b, h, n, 1))
    mixed = joined(mixed).view(x.query.data.shape)
    return *kernels.quantize(mixed, grid), Attended(x.query, x.key, x.value, probabilities, weights)


def gradient_of_value(gradient: Gradient, kept: Attended, keys: Keys) -> Gradient:
    """Return the gradient of the values, bfloat16[b · n, d], for that of the mixed values, of the same shape."""
    if native := linear_kernels.multiplies_bytes(gradient.data):
        out = torch.empty_like(gradient.data)
        largest = native.eb_attention_of_value(_heads(native, kept), pointer(gradient.data), *keys, pointer(out))
        return Gradient(out, largest)
    by_head = split(gradient.data, kept.shape)
    weighted, largest = row_kernels.scale_rows(by_head.view(-1, by_head.shape[3]), kept.weights)
    codes, scale = kernels.quantize_gradient(weighted, largest, keys)
    return _finished(_product(kept.probabilities.transpose(2, 3), codes.view(by_head.shape)), scale)


def gradient_of_scores(gradient: Gradient, kept: Attended, keys: Keys) -> Gradient:
    """Return the gradient of the softmax's argument, bfloat16[b, h, n, n], for the mixed values', bfloat16[b · n, d].

    It may lie in scratch memory: good until the next product.
    """
    probabilities, weights, value = kept.probabilities, kept.weights, kept.value
    if native := linear_kernels.multiplies_bytes(gradient.data):
        # That of the other products is free meanwhile: native kernels of attention have no sums in it.
        out = scratch("accumulator", tuple(probabilities.shape), torch.bfloat16, gradient.data.device)
        largest = native.eb_attention_of_scores(
            _heads(native, kept), pointer(gradient.data), gradient.largest, *keys, value.scale, pointer(out)
        )
        return Gradient(out, largest)
    codes, scale = kernels.quantize_gradient(split(gradient.data, kept.shape), gradient.largest, keys)
    scores = _product(codes, split(value.data, kept.shape).transpose(2, 3), "scores")
    return Gradient(*row_kernels.softmax_backward(scores, scale * value.scale, probabilities, weights))


def gradients_of_query_and_key(of_scores: Gradient, kept: Attended, keys: Keys) -> tuple[Gradient, Gradient]:
    """Return the gradients of queries and keys, each bfloat16[b · n, d], for that of the softmax's argument,
    bfloat16[b, h, n, n]."""
    query, key = kept.query, kept.key
    b, h, n, width = kept.shape
    scale = of_scores.largest / 127.0 / math.sqrt(width)
    if native := linear_kernels.multiplies_bytes(of_scores.data):
        of_query, of_key = (torch.empty((b * n, h * width), dtype=torch.bfloat16) for _ in range(2))
        largest = ffi.new("float[2]")
        native.eb_attention_of_query_and_key(
            _heads(native, kept), pointer(of_scores.data), of_scores.largest, *keys, scale * key.scale,
            scale * query.scale, pointer(of_query), pointer(of_key), largest,
        )  # fmt: skip
        return Gradient(of_query, largest[0]), Gradient(of_key, largest[1])
    codes, _ = kernels.quantize_gradient(of_scores.data, of_scores.largest, keys)
    return (
        _finished(_product(codes, split(key.data, kept.shape)), scale * key.scale),
        _finished(_product(codes.transpose(2, 3), split(query.data, kept.shape)), scale * query.scale),
    )


def _native(x: Operands) -> Kernels | None:
    """Return the native kernels, if they are fast and can read the operands."""
    check_terms(max(x.shape[2:]))
    return linear_kernels.multiplies_bytes(x.query.data)


def _heads(native: Kernels, kept: Attended) -> CData:
    """Return an AttentionHeads."""
    b, h, n, width = kept.shape
    return ffi.new(
        "AttentionHeads *",
        {
            "batch": b, "heads": h, "n": n, "width": width,
            "query": pointer(kept.query.data), "key": pointer(kept.key.data),
            "value": pointer(kept.value.data), "probabilities": pointer(kept.probabilities),
            "weights": pointer(kept.weights), "room": kernels.room(native.eb_attention_room(n, width)),
        },
    )  # fmt: skip


def split(x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return [b, n, d] or [b · n, d] as [b, h, n, d / h], the shape that is given."""
    b, h, n, width = shape
    return x.view(b, n, h, width).transpose(1, 2).contiguous()


def joined(x: torch.Tensor) -> torch.Tensor:
    """Return [b, h, n, d / h] as [b · n, d]."""
    b, h, n, width = x.shape
    return x.transpose(1, 2).reshape(b * n, h * width)


def _product(a: torch.Tensor, b: torch.Tensor, name: str = "accumulator") -> torch.Tensor:
    """Return a · b for each head in scratch memory of this name, int32[b, h, m, n]."""
    return batched_int8_product(a, b, scratch(name, (*a.shape[:3], b.shape[3]), torch.int32, a.device))


def _finished(sums: torch.Tensor, factor: float) -> Gradient:
    """Return the gradient sums · factor, bfloat16[b · n, d]."""
    data, largest = kernels.finish_backward(sums, factor, None, 0)
    return Gradient(joined(data), largest)
