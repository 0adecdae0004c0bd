"""The products of linear layers, and the steps after their sums.

Where these multiply bytes (or, for the weight gradient, bfloat16) in less time than torch, they are native kernels that
finish each tile of sums while it is in registers (`peer/native/eight_bit_linear.h`). Elsewhere a product of torch
is followed by the functions of `kernels`: with the same bits, except that sums of the weight gradient are rounded in
another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from peer.native import CData, ffi, lib
from peer.train.eight_bit import kernels, row_kernels
from peer.train.eight_bit.kernels import pointer
from peer.train.eight_bit.products import check_terms, int8_product
from peer.train.eight_bit.ranges import Grid
from peer.train.eight_bit.scratch import scratch

if TYPE_CHECKING:
    from peer.native._kernels import Kernels


@dataclass(frozen=True, slots=True)
class Operands:
    """Those of y = W x + b."""

    codes: torch.Tensor
    """int8[rows, inputs]."""
    zero_point: int
    scale: float
    weight: torch.Tensor
    """float32[outputs, inputs], or codes of it, int8."""
    largest: float | None
    """The largest magnitude of the weights, where it is known; it always is of codes."""
    bias: torch.Tensor | None = None
    """float32[outputs]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the result."""
        return self.codes.shape[0], self.weight.shape[0]


@dataclass(frozen=True, slots=True)
class OperandsBack:
    """Those of the gradient with regard to x, which is rounded to codes here."""

    gradient: torch.Tensor
    """bfloat16[rows, outputs], that of y."""
    largest_gradient: float
    """The largest magnitude in it."""
    keys: tuple[int, int]
    """Keys of its stochastic rounding."""
    weight: torch.Tensor
    """float32[outputs, inputs], or codes of it, int8."""
    largest: float | None
    """The largest magnitude of the weights, where it is known; it always is of codes."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the result."""
        return self.gradient.shape[0], self.weight.shape[1]


def forward(x: Operands, grid: Grid, *, relu: bool) -> tuple[torch.Tensor, tuple[float, float], float]:
    """Return codes int8[rows, outputs] of y, at least 0 with `relu`, the extremes of y, and the largest magnitude of
    the weights."""
    if native := _native(x):
        codes, ends, weight = torch.empty(x.shape, dtype=torch.int8), ffi.new("float[2]"), x.weight.to(torch.float32)
        largest = native.eb_linear_codes(
            _layer(native, x, weight), pointer(x.codes), x.zero_point, x.scale, pointer(x.bias),
            relu, grid.inverse, grid.zero_point, pointer(codes), ends,
        )  # fmt: skip
        return codes, (ends[0], ends[1]), largest
    acc, offset, largest = _accumulated(x)
    return *kernels.finish_forward(acc, offset, x.scale * (largest / 127.0), x.bias, grid, relu=relu), largest


def forward_floats(x: Operands) -> tuple[torch.Tensor, float]:
    """Return y, float32[rows, outputs], and the largest magnitude of the weights."""
    if native := _native(x):
        y, weight = torch.empty(x.shape), x.weight.to(torch.float32)
        return y, native.eb_linear_floats(
            _layer(native, x, weight), pointer(x.codes), x.zero_point, x.scale, pointer(x.bias), pointer(y)
        )
    acc, offset, largest = _accumulated(x)
    return kernels.finish_forward_floats(acc, offset, x.scale * (largest / 127.0), x.bias), largest


def accumulate(x: Operands) -> tuple[torch.Tensor, float]:
    """Return Σ (codes − zero point) · weights, int32[rows, outputs], and the value of one step of both.

    The sums lie in scratch memory: good until the next product.
    """
    if native := _native(x):
        acc = scratch("accumulator", x.shape, torch.int32, x.codes.device)
        weight = x.weight.to(torch.float32)
        largest = native.eb_linear_product(_layer(native, x, weight), pointer(x.codes), x.zero_point, pointer(acc))
        return acc, x.scale * (largest / 127.0)
    acc, offset, largest = _accumulated(x)
    return acc if offset is None else acc.sub_(offset), x.scale * (largest / 127.0)


def backward(x: OperandsBack, mask: torch.Tensor | None, masked: int) -> tuple[torch.Tensor, float]:
    """Return the gradient with regard to x, bfloat16[rows, inputs], 0 where `mask`, int8 of this shape, equals
    `masked`; and its largest magnitude."""
    if native := _native(x):
        gradient = torch.empty(x.shape, dtype=torch.bfloat16)
        return gradient, _back(native, x, gradient, mask=mask, masked=masked)
    return kernels.finish_backward(*_accumulated_back(x), mask, masked)


def backward_table(x: OperandsBack, codes: torch.Tensor, slopes: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return this gradient times slopes[code + 128] instead, `codes: int8[rows, inputs]` and `slopes: float32[256]`."""
    if native := _native(x):
        gradient = torch.empty(x.shape, dtype=torch.bfloat16)
        return gradient, _back(native, x, gradient, mask=codes, slopes=slopes)
    return row_kernels.finish_backward_table(*_accumulated_back(x), codes, slopes)


def add_backward_(gradient: torch.Tensor, x: OperandsBack) -> float:
    """Add this gradient to `gradient: bfloat16[rows, inputs]`, and return the largest magnitude of the sum."""
    if native := _native(x):
        return _back(native, x, gradient, add=True)
    return row_kernels.add_backward_(gradient, *_accumulated_back(x))


def weight_gradient(
    gradient: torch.Tensor, codes: torch.Tensor, zero_point: int, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32[outputs, inputs] = factor · Σ gradient · (codes − zero point), products of bfloat16 summed over
    rows in float32, and the sums of the gradient over rows, float32[outputs].

    `gradient: bfloat16[rows, outputs]` is that before its quantization, `codes: int8[rows, inputs]` are those stored.
    """
    shape = gradient.shape[1], codes.shape[1]
    is_fast = _speed() & 2 and not (_rounds_as_before and _speed() & 4)
    if is_fast and (native := kernels.native_for(gradient)):
        assert codes.is_contiguous()
        found, sums = torch.empty(shape), torch.empty(shape[0])
        native.eb_linear_weight_gradient(
            pointer(gradient), pointer(codes), zero_point, codes.shape[0], *shape, factor, pointer(found),
            pointer(sums), kernels.room(native.eb_linear_gradient_room(codes.shape[0], shape[0])),
        )  # fmt: skip
        return found, sums
    operand = kernels.codes_to_bfloat16(codes, zero_point)
    product = scratch("weight gradient", shape, torch.bfloat16, gradient.device)
    torch.mm(gradient.t(), operand, out=product)
    return kernels.scale_bfloat16(product, factor), kernels.column_sums(gradient)


def round_weight_gradients_as_before_() -> None:
    """Compute weight gradients from now on as release 0.2 did on processors that multiply floats for them: by torch,
    rounded to bfloat16. Only so a run that began under it repeats its journal to the same bits."""
    global _rounds_as_before
    _rounds_as_before = True


def multiplies_bytes(codes: torch.Tensor) -> Kernels | None:
    """Return the native kernels, if they multiply bytes in one instruction and can read these."""
    return kernels.native_for(codes) if _speed() & 1 else None


def _native(x: Operands | OperandsBack) -> Kernels | None:
    """Return the native kernels, if they are fast and can read the operands."""
    values, terms = (x.gradient, x.weight.shape[0]) if isinstance(x, OperandsBack) else (x.codes, x.weight.shape[1])
    check_terms(terms)
    return multiplies_bytes(values) if x.weight.is_contiguous() else None


def _layer(native: Kernels, x: Operands | OperandsBack, weight: torch.Tensor) -> CData:
    """Return a LinearLayer; it points to `weight`, x.weight in float32, which somebody has to hold meanwhile."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    room = kernels.room(native.eb_linear_room(rows, outputs, inputs, isinstance(x, OperandsBack)))
    levels, largest = x.weight.dtype == torch.int8, -1.0 if x.largest is None else x.largest
    return ffi.new("LinearLayer *", (rows, outputs, inputs, pointer(weight), levels, largest, room))


def _back(
    native: Kernels,
    x: OperandsBack,
    gradient: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    masked: int = 0,
    slopes: torch.Tensor | None = None,
    add: bool = False,
) -> float:
    weight = x.weight.to(torch.float32)
    return native.eb_linear_backward(
        _layer(native, x, weight), pointer(x.gradient), x.largest_gradient, *x.keys,
        pointer(mask), masked, pointer(slopes), add, pointer(gradient),
    )  # fmt: skip


def _weights(x: Operands | OperandsBack) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the codes of the weights, int8[outputs, inputs], in scratch memory, good until those of the next product
    are taken; the sum of the codes of each result, int32[outputs]; and the largest magnitude of the weights."""
    largest = x.largest
    if largest is None:
        low, high = kernels.extremes(x.weight)
        largest = max(-low, high)
    if x.weight.dtype == torch.int8:
        return x.weight, x.weight.sum(dim=1, dtype=torch.int32), largest
    return *kernels.quantize_weights(x.weight, largest), largest


def _accumulated(x: Operands) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    """Return Σ codes · weights in scratch memory, the zero point's share of each column, and the largest magnitude of
    the weights."""
    codes, sums, largest = _weights(x)
    acc = scratch("accumulator", x.shape, torch.int32, x.codes.device)
    int8_product(x.codes, codes.t(), acc)
    return acc, sums * x.zero_point if x.zero_point else None, largest


def _accumulated_back(x: OperandsBack) -> tuple[torch.Tensor, float]:
    """Return Σ codes · weights in scratch memory, and the value of one step of both."""
    weights, _, largest = _weights(x)
    codes, scale = kernels.quantize_gradient(x.gradient, x.largest_gradient, x.keys)
    acc = scratch("accumulator", x.shape, torch.int32, codes.device)
    return int8_product(codes, weights, acc), scale * (largest / 127.0)


_rounds_as_before = False


def _speed() -> int:
    return 0 if lib is None else _speed_of_tier(lib.widest_registers, lib.byte_instructions)


@cache
def _speed_of_tier(widest_registers: int, byte_instructions: int) -> int:
    """Return `eb_linear_speed` with the limits that are set now."""
    assert lib is not None
    return lib.eb_linear_speed()
