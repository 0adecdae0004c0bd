"""The row-wise steps of a transformer around its products: softmax, layer norm, GELU, and their backward passes.

As in `kernels`: a native kernel where there is one and the tensors lie on the CPU, torch operators with the same bits
elsewhere. Sums over a row are added up in 64 lanes and then by halves, exponentials by a polynomial of our own, so that
both do the same operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from peer.native import ffi
from peer.train.eight_bit.kernels import codes_of, cut, extremes, mask_gradient_, native_for, pointer
from peer.train.eight_bit.ranges import Grid

if TYPE_CHECKING:
    from peer.native._kernels import Kernels

_LANES = 64
MOST_COLUMNS = 8192
"""Widest layer norm: more do not fit the native kernel's memory."""


def add_backward_(gradient: torch.Tensor, accumulator: torch.Tensor, factor: float) -> float:
    """Add accumulator · factor to a bfloat16 gradient, and return its largest magnitude."""
    if native := native_for(accumulator):
        return native.eb_add_backward(pointer(accumulator), accumulator.numel(), factor, pointer(gradient))
    gradient.copy_(gradient.to(torch.float32) + (accumulator.to(torch.float32) * factor).view(gradient.shape))
    return mask_gradient_(gradient, None, 0)


def finish_backward_table(
    accumulator: torch.Tensor, factor: float, codes: torch.Tensor, slopes: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return accumulator · factor · slopes[code + 128] as bfloat16, and its largest magnitude."""
    gradient = torch.empty(accumulator.shape, dtype=torch.bfloat16, device=accumulator.device)
    if native := native_for(accumulator):
        largest = native.eb_finish_backward_table(
            pointer(accumulator), accumulator.numel(), factor, pointer(codes), pointer(slopes), pointer(gradient)
        )
        return gradient, largest
    slope = slopes.to(codes.device)[codes.to(torch.int64) + 128].view(accumulator.shape)
    gradient.copy_(accumulator.to(torch.float32) * factor * slope)
    return gradient, mask_gradient_(gradient, None, 0)


def look_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return table[code + 128] of every code; `table: int8[256]`."""
    if native := native_for(codes):
        out = torch.empty_like(codes)
        native.eb_look_up(pointer(codes), codes.numel(), pointer(table), pointer(out))
        return out
    return table.to(codes.device)[codes.to(torch.int64) + 128]


def scale_rows(gradient: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return gradient · scales[:, None] as bfloat16, and its largest magnitude; `gradient: bfloat16[m, n]`."""
    out = torch.empty_like(gradient)
    if native := native_for(gradient):
        largest = native.eb_scale_rows(
            pointer(gradient), gradient.shape[0], gradient.shape[1], pointer(scales), pointer(out)
        )
        return out, largest
    out.copy_(gradient.to(torch.float32) * scales[:, None])
    return out, mask_gradient_(out, None, 0)


def softmax(accumulator: torch.Tensor, factor: float, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of the softmax of accumulator · factor over the last dimension, and the weight of each row:
    probability = code · weight, the code of a row's largest being 127.

    `accumulator: int32[b, h, m, n]`, codes int8 and weights float32[b · h · m]; columns where `hidden`, if given, get
    probability 0: bool[b or 1, m or 1, n].
    """
    b, h, m, n = accumulator.shape
    if native := native_for(accumulator):
        codes = torch.empty(accumulator.shape, dtype=torch.int8)
        weights = torch.empty(b * h * m)
        mask = hidden if hidden is None or hidden.shape[1] == 1 else hidden[:, None].expand(b, h, m, n).contiguous()
        rows = 1 if mask is None else accumulator.numel() // mask.numel()
        native.eb_softmax(
            pointer(accumulator), b * h * m, n, factor, pointer(mask), rows, pointer(codes), pointer(weights)
        )
        return codes, weights
    shown = accumulator
    if hidden is not None:
        shown = accumulator.masked_fill(hidden[:, None], -(2**31))
    most = shown.amax(dim=-1, keepdim=True)
    below = ((accumulator - most).to(torch.float32) * factor).clamp_(max=0.0)
    codes = cut(torch.round(127.0 * exponential(below)), 0).to(torch.int8)
    if hidden is not None:
        codes = codes.masked_fill(hidden[:, None], 0)
    sums = codes.sum(dim=-1, dtype=torch.int32).view(-1).to(torch.float32)
    return codes, torch.where(sums > 0, 1.0 / sums, 0.0)


def softmax_backward(
    accumulator: torch.Tensor, factor: float, codes: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return p (g − Σ p g) over the last dimension as bfloat16, g being accumulator · factor, and its largest
    magnitude."""
    gradient = torch.empty(accumulator.shape, dtype=torch.bfloat16, device=accumulator.device)
    columns = accumulator.shape[-1]
    if native := native_for(accumulator):
        largest = native.eb_softmax_backward(
            pointer(accumulator), accumulator.numel() // columns, columns, factor,
            pointer(codes), pointer(weights), pointer(gradient),
        )  # fmt: skip
        return gradient, largest
    g = accumulator.view(-1, columns).to(torch.float32) * factor
    p = codes.view(-1, columns).to(torch.float32) * weights[:, None]
    gradient.copy_((p * (g - _row_sums(p * g))).view(gradient.shape))
    return gradient, mask_gradient_(gradient, None, 0)


@dataclass(kw_only=True)
class LayerNormOperands:
    """x of a layer norm: floats, or accumulator · factor + bias plus a residual in codes."""

    floats: torch.Tensor | None = None
    accumulator: torch.Tensor | None = None
    factor: float = 1.0
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    residual_zero: int = 0
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError for rows that are too wide."""
        source = self.accumulator if self.floats is None else self.floats
        assert source is not None
        self.shape, self.device = source.shape, source.device
        if self.shape[1] > MOST_COLUMNS:
            raise ValueError(f"a layer norm over {self.shape[1]} numbers; {MOST_COLUMNS} are the most")

    @property
    def native(self) -> Kernels | None:
        """The native kernels, if they can read x."""
        source = self.accumulator if self.floats is None else self.floats
        assert source is not None
        return native_for(source)

    def values(self) -> torch.Tensor:
        """Return x, float32[m, n]."""
        if self.floats is not None:
            return self.floats
        assert self.accumulator is not None
        assert self.residual is not None
        x = self.accumulator.to(torch.float32) * self.factor
        if self.bias is not None:
            x = x + self.bias
        residual = (self.residual.view(self.shape).to(torch.int32) - self.residual_zero).to(torch.float32)
        return x + residual * self.residual_scale


Ends = tuple[float, float]


def layer_norm(
    x: LayerNormOperands,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
    normal_grid: Grid,
    grid: Grid,
) -> tuple[torch.Tensor, Ends, torch.Tensor, Ends, torch.Tensor]:
    """Return codes of n = (x − mean) / deviation on `normal_grid` and of n · γ + β on `grid`, each with the extremes of
    the numbers; and 1 / deviation of each row, float32[m]."""
    rows, columns = x.shape
    deviations = torch.empty(rows, dtype=torch.float32, device=x.device)
    normal, codes = (torch.empty(rows, columns, dtype=torch.int8, device=x.device) for _ in range(2))
    if native := x.native:
        of_normal, of_result = (ffi.new("float[2]", (math.inf, -math.inf)) for _ in range(2))
        native.eb_layer_norm(
            pointer(x.accumulator), pointer(x.floats), rows, columns, x.factor, pointer(x.bias),
            pointer(x.residual), x.residual_zero, x.residual_scale, epsilon, pointer(gamma), pointer(beta),
            normal_grid.inverse, pointer(normal), of_normal, grid.inverse, grid.zero_point, pointer(codes), of_result,
            pointer(deviations),
        )  # fmt: skip
        return normal, (of_normal[0], of_normal[1]), codes, (of_result[0], of_result[1]), deviations
    values = x.values()
    values = values - _row_sums(values) / columns
    variances = _row_sums(values * values) / columns + epsilon
    # torch's float32 root is not always the nearest number; that of float64, rounded, is.
    by = 1.0 / torch.sqrt(variances.to(torch.float64)).to(torch.float32)
    deviations.copy_(by.view(-1))
    values = values * by
    ends = extremes(values)
    normal.copy_(cut(torch.round(values * normal_grid.inverse), -127))
    values = values * gamma + beta
    codes.copy_(codes_of(values, grid))
    return normal, ends, codes, extremes(values), deviations


def layer_norm_backward(
    gradient: torch.Tensor, normal: torch.Tensor, normal_scale: float, deviations: torch.Tensor, gamma: torch.Tensor
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Return the gradient with regard to x as bfloat16[m, n], its largest magnitude, and that of γ, float32[n]."""
    rows, columns = gradient.shape
    out = torch.empty_like(gradient)
    if native := native_for(gradient):
        sums = torch.zeros(columns, dtype=torch.float64)
        largest = native.eb_layer_norm_backward(
            pointer(gradient), rows, columns, pointer(normal), normal_scale, pointer(deviations), pointer(gamma),
            pointer(out), pointer(sums),
        )  # fmt: skip
        return out, largest, sums.to(torch.float32)
    n, g = normal.to(torch.float32) * normal_scale, gradient.to(torch.float32)
    gamma_gradient = (g * n).to(torch.float64).sum(dim=0).to(torch.float32)
    h = g * gamma
    mean, slope = _row_sums(h) / columns, _row_sums(h * n) / columns
    out.copy_((h - mean - n * slope) * deviations[:, None])
    return out, mask_gradient_(out, None, 0), gamma_gradient


@lru_cache(maxsize=256)
def gelu_tables(grid: Grid, result: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes on `result` of GELU of every code on `grid`, int8[256], and its slopes, float32[256]."""
    x = [(code - grid.zero_point) * grid.scale for code in range(-128, 128)]
    areas = [0.5 * (1.0 + math.erf(value / math.sqrt(2.0))) for value in x]
    values = torch.tensor([value * area for value, area in zip(x, areas, strict=True)], dtype=torch.float32)
    density = [math.exp(-0.5 * value * value) / math.sqrt(2.0 * math.pi) for value in x]
    slopes = [area + value * height for value, area, height in zip(x, areas, density, strict=True)]
    return codes_of(values, result), torch.tensor(slopes, dtype=torch.float32)


GELU_LEAST = -0.17
"""GELU's minimum is −0.16997."""


def exponential(x: torch.Tensor) -> torch.Tensor:
    """Return eˣ for x ≤ 0, float32, to about 2⁻¹⁸, and 2⁻³⁰ where it is less; as `exponential` of eight_bit.c."""
    t = (x * 1.44269504).clamp_(min=-30.0)
    whole = torch.round(t)
    f = t - whole
    p = torch.full_like(f, 0.00133335581)
    for coefficient in (0.00961812911, 0.0555041087, 0.240226507, 0.693147181, 1.0):
        p = p * f
        p = p + coefficient
    return (p.view(torch.int32) + whole.to(torch.int32) * 0x800000).view(torch.float32)


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of the rows of float32[m, n] in the order of the native kernels, float32[m, 1]."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % _LANES)).view(rows, -1, _LANES)
    lanes = torch.zeros(rows, _LANES, dtype=torch.float32, device=values.device)
    for part in range(padded.shape[1]):
        lanes += padded[:, part]
    half = _LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes
