"""The products of linear layers, and what happens to their sums.

On processors that multiply bytes (or, for the weight gradient, bfloat16) in one instruction these are native kernels
that finish each tile of sums while it is in registers (`peer/native/eight_bit_linear.h`). Elsewhere a product of torch
is followed by the functions of `kernels`: with the same bits, except that sums of the weight gradient are rounded in
another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from peer.native import CData, ffi, lib
from peer.train.eight_bit import kernels, row_kernels
from peer.train.eight_bit.kernels import pointer
from peer.train.eight_bit.products import MAX_TERMS, int8_product
from peer.train.eight_bit.ranges import Grid, inverse_step
from peer.train.eight_bit.scratch import scratch
from peer.train.eight_bit.stored import as_levels

if TYPE_CHECKING:
    from peer.native._kernels import Kernels

_LANES = 16


@dataclass(frozen=True, slots=True)
class Weights:
    """The 8-bit weights of one product; they lie in scratch memory, good until those of the next are taken."""

    codes: torch.Tensor
    """int8: [outputs, inputs], or in the order of the native kernels."""
    sums: torch.Tensor
    """int32[results], the sum of the codes of each result."""
    largest: float
    """The largest magnitude of the weights."""
    packed: bool
    """Whether the codes are in the order of the native kernels."""

    @property
    def scale(self) -> float:
        """One step of the codes."""
        return self.largest / 127.0


@dataclass(frozen=True, slots=True)
class Operands:
    """Those of a product, y = Σ (codes − zero point) · weights · factor + bias."""

    codes: torch.Tensor
    """int8[rows, terms]."""
    zero_point: int
    weights: Weights
    factor: float
    bias: torch.Tensor | None = None
    """float32[results]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        return self.codes.shape[0], self.weights.sums.shape[0]


def quantize_weights(weight: torch.Tensor, *, transposed: bool = False, largest: float | None = None) -> Weights:
    """Return the codes of `weight: float32[outputs, inputs]` around zero, rounded to nearest, for a product whose
    results are the outputs; the inputs if `transposed`. `largest` is their largest magnitude, where it is known. It
    always is of a weight that is codes already, int8."""
    if largest is None:
        low, high = kernels.extremes(weight)
        largest = max(-low, high)
    outputs, inputs = weight.shape
    results, terms = (inputs, outputs) if transposed else (outputs, inputs)
    if terms > MAX_TERMS:
        raise ValueError(f"a product of {terms} terms may overflow 32 bits; {MAX_TERMS} are the most")
    native = kernels.native_for(weight) if _speed() & 1 else None
    if native is None:
        if weight.dtype == torch.int8:
            codes, sums = weight, weight.sum(dim=1, dtype=torch.int32)
        else:
            codes, sums, _ = kernels.quantize_weights(weight)
        return Weights(codes, codes.sum(dim=0, dtype=torch.int32) if transposed else sums, largest, packed=False)
    weight, inverse = as_levels(weight, inverse_step(largest))
    size = -(-results // _LANES) * _LANES * -(-terms // 4) * 4
    codes = scratch("weights", (size,), torch.int8, weight.device)
    sums = torch.empty(results, dtype=torch.int32)
    native.eb_linear_pack(
        pointer(weight, "float *"), outputs, inputs, inverse, transposed, pointer(codes, "int8_t *"),
        pointer(sums, "int32_t *"), _room(64 * (inputs + _LANES), "int8_t *"),
    )  # fmt: skip
    return Weights(codes, sums, largest, packed=True)


def measure(x: Operands, *, relu: bool) -> tuple[float, float]:
    """Return the extremes of what `forward` would quantize."""
    if x.weights.packed:
        return _codes(x, Grid(1.0, 0), None, relu)
    return kernels.measure_forward(*_accumulated(x, x.weights.codes.t()), x.factor, x.bias, relu=relu)


def forward(x: Operands, grid: Grid, *, relu: bool) -> tuple[torch.Tensor, tuple[float, float]]:
    """Return codes int8[rows, results] of y, at least 0 with `relu`, and the extremes of y."""
    if x.weights.packed:
        codes = torch.empty(x.shape, dtype=torch.int8)
        return codes, _codes(x, grid, codes, relu)
    return kernels.finish_forward(*_accumulated(x, x.weights.codes.t()), x.factor, x.bias, grid, relu=relu)


def forward_floats(x: Operands) -> torch.Tensor:
    """Return y, float32[rows, results]."""
    if x.weights.packed:
        y = torch.empty(x.shape)
        native_product(_kernels().eb_linear_floats, x, x.factor, pointer(x.bias, "float *"), pointer(y, "float *"))
        return y
    return kernels.finish_forward_floats(*_accumulated(x, x.weights.codes.t()), x.factor, x.bias)


def accumulate(x: Operands) -> torch.Tensor:
    """Return Σ (codes − zero point) · weights, int32[rows, results].

    It lies in scratch memory: good until the next product.
    """
    if x.weights.packed:
        accumulator = scratch("accumulator", x.shape, torch.int32, x.codes.device)
        native_product(_kernels().eb_linear_product, x, pointer(accumulator, "int32_t *"))
        return accumulator
    accumulator, offset = _accumulated(x, x.weights.codes.t())
    return accumulator if offset is None else accumulator.sub_(offset)


def backward(x: Operands, mask: torch.Tensor | None, masked: int) -> tuple[torch.Tensor, float]:
    """Return y in bfloat16[rows, results] for the codes of a gradient and transposed weights, 0 where `mask`, int8 of
    this shape, equals `masked`; and its largest magnitude."""
    if x.weights.packed:
        gradient = torch.empty(x.shape, dtype=torch.bfloat16)
        return gradient, _gradient(x, gradient, mask=mask, masked=masked)
    return kernels.finish_backward(_accumulated(x, x.weights.codes)[0], x.factor, mask, masked)


def backward_table(x: Operands, codes: torch.Tensor, slopes: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return y · slopes[code + 128] instead, `codes: int8[rows, results]` and `slopes: float32[256]`."""
    if x.weights.packed:
        gradient = torch.empty(x.shape, dtype=torch.bfloat16)
        return gradient, _gradient(x, gradient, mask=codes, slopes=slopes)
    return row_kernels.finish_backward_table(_accumulated(x, x.weights.codes)[0], x.factor, codes, slopes)


def add_backward_(gradient: torch.Tensor, x: Operands) -> float:
    """Add y to `gradient: bfloat16[rows, results]`, and return its largest magnitude."""
    if x.weights.packed:
        return _gradient(x, gradient, add=True)
    return row_kernels.add_backward_(gradient, _accumulated(x, x.weights.codes)[0], x.factor)


def weight_gradient(
    gradient: torch.Tensor, codes: torch.Tensor, zero_point: int, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32[outputs, inputs] = factor · Σ gradient · (codes − zero point), products of bfloat16 summed over
    rows in float32, and the sums of the gradient over rows, float32[outputs].

    `gradient: bfloat16[rows, outputs]` is that before its quantization, `codes: int8[rows, inputs]` are those stored.
    """
    shape = gradient.shape[1], codes.shape[1]
    if _speed() & 2 and (native := kernels.native_for(gradient)):
        assert codes.is_contiguous()
        found, sums = torch.empty(shape), torch.empty(shape[0])
        native.eb_linear_weight_gradient(
            pointer(gradient, "uint16_t *"), pointer(codes, "int8_t *"), zero_point, codes.shape[0], *shape, factor,
            pointer(found, "float *"), pointer(sums, "float *"),
            _room(native.eb_linear_gradient_room(codes.shape[0], shape[0])),
        )  # fmt: skip
        return found, sums
    operand = kernels.codes_to_bfloat16(codes, zero_point)
    product = scratch("weight gradient", shape, torch.bfloat16, gradient.device)
    torch.mm(gradient.t(), operand, out=product)
    return kernels.scale_bfloat16(product, factor), kernels.column_sums(gradient)


def native_product(kernel: Callable[..., None], x: Operands, *rest: CData | float) -> None:
    """Run a native kernel that multiplies int8 codes by int8 weights into int32."""
    assert x.codes.dtype == x.weights.codes.dtype == torch.int8
    assert x.codes.is_contiguous()
    # The kernels read codes as uint8, 128 more than they are.
    offset = x.weights.sums * (x.zero_point + 128)
    rows, terms = x.codes.shape
    kernel(
        pointer(x.codes, "int8_t *"), rows, terms, pointer(x.weights.codes, "int8_t *"), offset.shape[0],
        pointer(offset, "int32_t *"), *rest, _room(_kernels().eb_linear_room(rows, terms)),
    )  # fmt: skip


def _codes(x: Operands, grid: Grid, codes: torch.Tensor | None, relu: bool) -> tuple[float, float]:
    ends = ffi.new("float[2]")
    native_product(
        _kernels().eb_linear_codes, x, x.factor, pointer(x.bias, "float *"), relu, grid.inverse, grid.zero_point,
        pointer(codes, "int8_t *"), ends,
    )  # fmt: skip
    return ends[0], ends[1]


def _gradient(
    x: Operands,
    gradient: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    masked: int = 0,
    slopes: torch.Tensor | None = None,
    add: bool = False,
) -> float:
    assert gradient.is_contiguous()
    assert mask is None or mask.is_contiguous()
    largest = ffi.new("float *")
    native_product(
        _kernels().eb_linear_backward, x, x.factor, pointer(mask, "int8_t *"), masked, pointer(slopes, "float *"), add,
        pointer(gradient, "uint16_t *"), largest,
    )  # fmt: skip
    found: float = largest[0]
    return found


def _accumulated(x: Operands, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return Σ codes · weights in scratch memory, and what the zero point added to each column."""
    accumulator = scratch("accumulator", x.shape, torch.int32, x.codes.device)
    int8_product(x.codes, weights, accumulator)
    return accumulator, x.weights.sums * x.zero_point if x.zero_point else None


def _speed() -> int:
    return 0 if lib is None else _speed_of_tier(lib.widest_registers, lib.byte_instructions)


@cache
def _speed_of_tier(widest_registers: int, byte_instructions: int) -> int:
    """Return `eb_linear_speed` with the limits that are set now."""
    return _kernels().eb_linear_speed()


def _kernels() -> Kernels:
    assert lib is not None, "without the kernels no weights are packed"
    return lib


def _room(size: int, kind: str = "uint8_t *") -> CData:
    return pointer(scratch("room", (size,), torch.uint8, torch.device("cpu")), kind)
