"""Steps around the products: quantizing, dequantizing, masking, and adding up.

Each function runs a native kernel (`peer/native/eight_bit.h`) where these were built and the tensors lie on the CPU,
and torch operators elsewhere, with the same bits: both use single exactly rounded operations in the same order. Only
`column_sums` may differ in the last bit, where float64 cannot hold a sum exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from peer.native import CData, ffi, lib
from peer.train.eight_bit.ranges import Grid, inverse_step
from peer.train.eight_bit.scratch import scratch

if TYPE_CHECKING:
    from peer.native._kernels import Kernels

_CPU = torch.device("cpu")


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """Return the least and the greatest of `values: float32[...]`, both NaN if one is."""
    if native := native_for(values):
        ends = ffi.new("float[2]", (math.inf, -math.inf))
        native.eb_extremes(pointer(values), values.numel(), ends)
        return ends[0], ends[1]
    low, high = torch.aminmax(values)
    return low.item(), high.item()


def root_mean_square(values: torch.Tensor) -> float:
    """Return that of all `values: float32[...]` that are not 0, of which sparse data has few; 0.0 where there is none.

    Rounded, so that the order in which torch adds up does not matter.
    """
    if native := native_for(values):
        root = math.sqrt(native.eb_mean_square(pointer(values), values.numel()))
    else:
        norm = torch.linalg.vector_norm(values, dtype=torch.float64).item()
        root = norm / math.sqrt(max(int(torch.count_nonzero(values)), 1))
    mantissa, exponent = math.frexp(root)
    return math.ldexp(round(mantissa, 9), exponent)


def quantize(values: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, tuple[float, float]]:
    """Return the int8 codes of `values: float32[...]`, rounded to nearest (ties to even) and cut to the grid, and the
    extremes of the values."""
    codes = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    if native := native_for(values):
        ends = ffi.new("float[2]", (math.inf, -math.inf))
        native.eb_quantize(pointer(values), values.numel(), grid.inverse, grid.zero_point, pointer(codes), ends)
        return codes, (ends[0], ends[1])
    codes.copy_(codes_of(values, grid))
    return codes, extremes(values)


def quantize_weights(weight: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes of `weight: float32[n, ...]` around zero, and their sums over each row int32[n]. `largest` is
    the largest magnitude of the weight.

    The codes lie in scratch memory: good until the next weights are quantized.
    """
    rows, columns = weight.shape[0], weight[0].numel()
    inverse = inverse_step(largest)
    codes = scratch("weights", (rows, columns), torch.int8, weight.device)
    sums = torch.empty(rows, dtype=torch.int32, device=weight.device)
    if native := native_for(weight):
        native.eb_quantize_weights(pointer(weight), rows, columns, inverse, pointer(codes), pointer(sums))
    else:
        codes.copy_(cut(torch.round(weight.reshape(rows, columns) * inverse), -127))
        sums.copy_(codes.sum(dim=1, dtype=torch.int32))
    return codes.view(weight.shape), sums


def finish_forward(
    accumulator: torch.Tensor,
    offset: torch.Tensor | None,
    factor: float,
    bias: torch.Tensor | None,
    grid: Grid,
    *,
    relu: bool,
) -> tuple[torch.Tensor, tuple[float, float]]:
    """Return codes of y = (accumulator − offset) · factor + bias, at least 0 with `relu`, and the extremes of y.

    `accumulator: int32[m, n]`; `offset: int32[n]` and `bias: float32[n]` belong to the columns.
    """
    codes = torch.empty(accumulator.shape, dtype=torch.int8, device=accumulator.device)
    rows, columns = accumulator.shape
    if native := native_for(accumulator):
        ends = ffi.new("float[2]", (math.inf, -math.inf))
        native.eb_finish_forward(
            pointer(accumulator), rows, columns, pointer(offset), factor, pointer(bias), relu, grid.inverse,
            grid.zero_point, 0, pointer(codes), ffi.NULL, ends,
        )  # fmt: skip
        return codes, (ends[0], ends[1])
    y = _finished(accumulator, offset, factor, bias, relu)
    codes.copy_(codes_of(y, grid))
    return codes, extremes(y)


def finish_forward_floats(
    accumulator: torch.Tensor, offset: torch.Tensor | None, factor: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return y = (accumulator − offset) · factor + bias, float32[m, n]."""
    rows, columns = accumulator.shape
    if native := native_for(accumulator):
        y = torch.empty(accumulator.shape, dtype=torch.float32)
        given = pointer(accumulator), rows, columns, pointer(offset), factor, pointer(bias)
        native.eb_finish_forward(*given, False, 1.0, 0, 0, ffi.NULL, pointer(y), ffi.NULL)
        return y
    return _finished(accumulator, offset, factor, bias, False)


def finish_backward(
    accumulator: torch.Tensor, factor: float, mask: torch.Tensor | None, masked: int
) -> tuple[torch.Tensor, float]:
    """Return accumulator · factor as bfloat16, 0 where `mask`, 8-bit codes of the same size, equals `masked`; and its
    largest magnitude."""
    gradient = torch.empty(accumulator.shape, dtype=torch.bfloat16, device=accumulator.device)
    if native := native_for(accumulator):
        largest = native.eb_finish_backward(
            pointer(accumulator), accumulator.numel(), factor, pointer(mask), masked, pointer(gradient)
        )
        return gradient, largest
    gradient.copy_(accumulator.to(torch.float32) * factor)
    return gradient, mask_gradient_(gradient, mask, masked)


def mask_gradient_(gradient: torch.Tensor, mask: torch.Tensor | None, masked: int) -> float:
    """Set a bfloat16 gradient to 0 where `mask` equals `masked`, and return its largest magnitude."""
    if native := native_for(gradient):
        return native.eb_mask_gradient(pointer(gradient), gradient.numel(), pointer(mask), masked)
    if mask is not None:
        gradient.masked_fill_((mask == masked).view(gradient.shape), 0)
    return gradient.abs().amax().item()


def to_bfloat16(values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return `values: float32[...]` in bfloat16, and the largest magnitude."""
    rounded = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    if native := native_for(values):
        largest = native.eb_to_bfloat16(pointer(values), values.numel(), pointer(rounded))
        return rounded, largest
    rounded.copy_(values)
    return rounded, rounded.abs().amax().item()


def quantize_gradient(gradient: torch.Tensor, largest: float, keys: tuple[int, int]) -> tuple[torch.Tensor, float]:
    """Return int8 codes of a bfloat16 gradient by stochastic rounding, and their scale.

    The codes lie in scratch memory: good until the next gradient is quantized.
    """
    inverse = inverse_step(largest)
    codes = scratch("gradient", tuple(gradient.shape), torch.int8, gradient.device)
    if native := native_for(gradient):
        native.eb_quantize_gradient(pointer(gradient), gradient.numel(), inverse, *keys, pointer(codes))
    else:
        uniforms = draws(gradient.numel(), keys, gradient.device).view(gradient.shape)
        codes.copy_(cut(torch.floor(gradient.to(torch.float32) * inverse + uniforms), -127))
    return codes, largest / 127.0


def codes_to_bfloat16(codes: torch.Tensor, zero_point: int) -> torch.Tensor:
    """Return int8 codes − zero_point in bfloat16, which holds them exactly.

    The result lies in scratch memory: good until the next call.
    """
    out = scratch("operand", tuple(codes.shape), torch.bfloat16, codes.device)
    if native := native_for(codes):
        native.eb_codes_to_bfloat16(pointer(codes), codes.numel(), zero_point, pointer(out))
        return out
    return out.copy_(codes.to(torch.int16) - zero_point)


def scale_bfloat16(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Return values · factor in float32, for bfloat16 values."""
    if native := native_for(values):
        out = torch.empty(values.shape, dtype=torch.float32)
        native.eb_scale_bfloat16(pointer(values), values.numel(), factor, pointer(out))
        return out
    return values.to(torch.float32) * factor


def column_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums over the columns of `values: bfloat16[m, n]`, float32[n], added up in float64."""
    if native := native_for(values):
        sums = torch.empty(values.shape[1], dtype=torch.float32)
        native.eb_column_sums(pointer(values), values.shape[0], values.shape[1], pointer(sums))
        return sums
    return values.to(torch.float64).sum(dim=0).to(torch.float32)


def draws(size: int, keys: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return draws 0 … size−1 of a stream in [0, 1), float32[size]; `peer/native/eight_bit.c` defines them."""
    key0, key1 = keys
    words = torch.arange((size + 1) // 2, dtype=torch.int64, device=device)
    h = (words * 0x9E3779B9 + key0) & _WORD
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _WORD
    h = h ^ key1
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _WORD
    h = h ^ (h >> 16)
    halves = torch.stack((h & 0xFFFF, h >> 16), dim=1).view(-1)[:size]
    return halves.to(torch.float32) * 2.0**-16


_WORD = 2**32 - 1


def _finished(
    accumulator: torch.Tensor, offset: torch.Tensor | None, factor: float, bias: torch.Tensor | None, relu: bool
) -> torch.Tensor:
    y = (accumulator if offset is None else accumulator - offset).to(torch.float32) * factor
    if bias is not None:
        y += bias
    return y.clamp_(min=0.0) if relu else y


def codes_of(values: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the result of `quantize`, by torch operators."""
    return cut(torch.round(values * grid.inverse) + grid.zero_point, -128).to(torch.int8)


def cut(levels: torch.Tensor, low: float, high: float = 127) -> torch.Tensor:
    """Return levels between `low` and `high`, NaN as `low`; overwrites them."""
    return levels.nan_to_num_(nan=float(low)).clamp_(low, high)


def native_for(tensor: torch.Tensor) -> Kernels | None:
    """Return the native kernels, if there are any and they can read a tensor."""
    return lib if tensor.device.type == "cpu" and tensor.is_contiguous() else None


_KINDS = {torch.float32: "float *", torch.float64: "double *", torch.int32: "int32_t *", torch.bfloat16: "uint16_t *"}
"""Type of a tensor → what C has in its place. Bytes are codes with or without a sign, or a mask: the kernel knows."""


def pointer(tensor: torch.Tensor | None) -> CData:
    """Return where a contiguous tensor lies, for a native kernel; NULL for None."""
    if tensor is None:
        return ffi.NULL
    assert tensor.is_contiguous()
    return ffi.cast(_KINDS.get(tensor.dtype, "void *"), tensor.data_ptr())


def room(size: int) -> CData:
    """Return where a native kernel can work in so many bytes of scratch memory: good until the next call."""
    return pointer(scratch("room", (size,), torch.uint8, _CPU))


def done(status: int) -> None:
    """Raise MemoryError for a native kernel's result that reports lack of memory."""
    if status:
        raise MemoryError("no memory for what a layer computes on the way")
