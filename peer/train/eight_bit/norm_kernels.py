"""Operations on codes between convolutions: norms, activations, sums, pooling.

Codes lie as uint8[b, n, c], n being the pixels; before a norm a code stands for q = code − 128 steps of its channel.
Each function runs a native kernel (`peer/native/eight_bit_norm.h`) where these were built and the tensors lie on the
CPU, and torch operators elsewhere, on the CPU with the same bits: single exactly rounded operations in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from peer.native import CData, ffi
from peer.train.eight_bit import kernels
from peer.train.eight_bit.kernels import done, native_for, pointer

Gate = Literal[0, 1, 2]
"""Factor of q: none, the sigmoid, or the hard sigmoid of `inner` · q."""
PLAIN: Gate = 0
SIGMOID: Gate = 1
HARD_SIGMOID: Gate = 2

MAX_POSITIONS = (2**31 - 1) // 128**2
"""Height times width of the largest image: a squared code is at most 128²."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of each channel of each sample, [b, c]."""

    sums: torch.Tensor
    """int32, of q."""
    squares: torch.Tensor
    """int32, of q²."""
    lows: torch.Tensor
    """uint8, the least code."""
    highs: torch.Tensor
    """uint8, the greatest."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Gradient that only the pixels with the least and the greatest code get, [b, c]."""

    lows: torch.Tensor
    """uint8."""
    highs: torch.Tensor
    """uint8."""
    at_low: torch.Tensor
    """float32."""
    at_high: torch.Tensor
    """float32."""


@dataclass(frozen=True, slots=True)
class Slopes:
    """∂x = g · t'(q) · slope + q · linear + constant + the terms of `ends`; float64[b, c] or [c] each."""

    slope: torch.Tensor
    linear: torch.Tensor
    constant: torch.Tensor
    ends: Ends | None = None


def statistics(codes: torch.Tensor) -> Statistics:
    """Return sums and extremes of each channel of each sample. Raises ValueError for images of so many positions that
    the sum of the squares might not fit."""
    b, n, c = codes.shape
    if n > MAX_POSITIONS:
        raise ValueError(f"sums over {n} positions may overflow 32 bits; {MAX_POSITIONS} are the most")
    if native := native_for(codes):
        sums, squares = (torch.empty((b, c), dtype=torch.int32) for _ in range(2))
        lows, highs = (torch.empty((b, c), dtype=torch.uint8) for _ in range(2))
        native.eb_norm_statistics(
            pointer(codes), b, n, c, pointer(sums), pointer(squares), pointer(lows), pointer(highs)
        )
        return Statistics(sums, squares, lows, highs)
    q = codes.to(torch.int32) - 128
    return Statistics(
        q.sum(dim=1, dtype=torch.int32),
        q.square().sum(dim=1, dtype=torch.int32),
        codes.amin(dim=1),
        codes.amax(dim=1),
    )


def ties(codes: torch.Tensor, lows: torch.Tensor, highs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many codes equal `lows` and `highs: uint8[b, c]`, int32[b, c] each."""
    b, n, c = codes.shape
    if native := native_for(codes):
        at_low, at_high = (torch.empty((b, c), dtype=torch.int32) for _ in range(2))
        native.eb_norm_ties(pointer(codes), b, n, c, pointer(lows), pointer(highs), pointer(at_low), pointer(at_high))
        return at_low, at_high
    at_low, at_high = ((codes == end[:, None]).sum(dim=1, dtype=torch.int32) for end in (lows, highs))
    return at_low, at_high


@dataclass(frozen=True, slots=True)
class Addend:
    """A summand of a norm's codes, added in the same pass: the result is codes · factors[0] + other · factors[1] +
    shift, cut to `cut`."""

    other: torch.Tensor
    """uint8[b, n, c]."""
    factors: tuple[float, float]
    shift: float
    cut: tuple[float, float]


def residual_sum(addend: Addend | None) -> tuple[CData, CData]:
    """Return a ResidualSum for the native kernels, or NULL, and where they write the extremes of the sum."""
    ends = ffi.new("float[2]", (math.inf, -math.inf))
    if addend is None:
        return ffi.NULL, ends
    given = (pointer(addend.other), *addend.factors, addend.shift, *addend.cut, ends)
    return ffi.new("ResidualSum *", given), ends


def forward(
    codes: torch.Tensor,
    gate: Gate,
    inner: torch.Tensor | None,
    factor: torch.Tensor,
    shift: torch.Tensor,
    cut: tuple[float, float],
    addend: Addend | None = None,
) -> tuple[torch.Tensor, tuple[float, float], tuple[float, float]]:
    """Return uint8 codes of t · factor + shift, cut to `cut` and rounded to nearest, or of their sum with an `addend`;
    the extremes before the cut; and those of the sum.

    t = q · gate(inner · q); `inner: float32[c]`, `factor` and `shift: float32[b, c]`.
    """
    b, n, c = codes.shape
    if native := native_for(codes):
        out, ends = torch.empty_like(codes), ffi.new("float[2]", (math.inf, -math.inf))
        added, ends_of_sum = residual_sum(addend)
        native.eb_norm_forward(
            pointer(codes), b, n, c, gate, pointer(inner), pointer(factor), pointer(shift), *cut, added,
            pointer(out), ends,
        )  # fmt: skip
        return out, (ends[0], ends[1]), (ends_of_sum[0], ends_of_sum[1])
    q = codes.to(torch.float32) - 128.0
    if inner is not None:
        q = q * _gate(gate, q * inner)
    levels = q * factor[:, None] + shift[:, None]
    of_levels = kernels.extremes(levels)
    found = rounded_(levels, cut)
    if addend is None:
        return found, of_levels, (math.inf, -math.inf)
    total, of_total = sum_forward(found, addend.other, addend.factors, addend.shift, addend.cut)
    return total, of_levels, of_total


def backward_sums(
    codes: torch.Tensor, gradient: torch.Tensor, gate: Gate, inner: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sums over the pixels of g, of g · t and of g · q² · gate'(inner · q), float32[b, c]; the last one
    means nothing without a gate.

    `gradient: bfloat16[b, n, c]`.
    """
    b, n, c = codes.shape
    if native := native_for(codes):
        plain, weighted, gated = (torch.empty((b, c)) for _ in range(3))
        native.eb_norm_backward_sums(
            pointer(codes), pointer(gradient), b, n, c, gate, pointer(inner), pointer(plain),
            pointer(weighted), pointer(gated),
        )  # fmt: skip
        return plain, weighted, gated
    q, g = codes.to(torch.float32) - 128.0, gradient.to(torch.float32)
    if inner is None:
        return _in_turn(g), _in_turn(g * q), torch.zeros(b, c, device=codes.device)
    u = q * inner
    value = _gate(gate, u)
    return _in_turn(g), _in_turn(g * (q * value)), _in_turn((g * (q * q)) * _gate_slope(gate, u, value))


def backward(
    codes: torch.Tensor, gradient: torch.Tensor, gate: Gate, inner: torch.Tensor | None, slopes: Slopes
) -> tuple[torch.Tensor, float]:
    """Return ∂x by `slopes`, float32[b, c] each, in bfloat16, and its largest magnitude."""
    (b, n, c), ends = codes.shape, slopes.ends
    if native := native_for(codes):
        out = torch.empty_like(gradient)
        lows, highs, at_low, at_high = (
            (None,) * 4 if ends is None else (ends.lows, ends.highs, ends.at_low, ends.at_high)
        )
        largest = native.eb_norm_backward(
            pointer(codes), pointer(gradient), b, n, c, gate, pointer(inner), pointer(slopes.slope),
            pointer(slopes.linear), pointer(slopes.constant), pointer(lows), pointer(highs), pointer(at_low),
            pointer(at_high), pointer(out),
        )  # fmt: skip
        return out, largest
    q, g = codes.to(torch.float32) - 128.0, gradient.to(torch.float32)
    if inner is not None:
        u = q * inner
        value = _gate(gate, u)
        g = g * (value + u * _gate_slope(gate, u, value))
    result = (g * slopes.slope[:, None] + q * slopes.linear[:, None]) + slopes.constant[:, None]
    if ends is not None:
        zero = torch.zeros((), device=codes.device)
        result = result + torch.where(codes == ends.lows[:, None], ends.at_low[:, None], zero)
        result = result + torch.where(codes == ends.highs[:, None], ends.at_high[:, None], zero)
    return kernels.to_bfloat16(result)


def batch_norm_backward(
    codes: torch.Tensor,
    gradient: torch.Tensor,
    steps: torch.Tensor,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    gamma: torch.Tensor,
    count: float,
) -> tuple[torch.Tensor, float, torch.Tensor, torch.Tensor] | None:
    """Return the gradients of a batch norm for the gradient of its output, bfloat16[b, n, c]: that of its input, of the
    same shape, and its largest magnitude, and those of γ and β, float32[c]. None where there is no such kernel.

    A step of `codes: uint8[b, n, c]` is `steps: float32[c]`; `mean` and `inverse_deviation: float64[c]` are those by
    which the norm centred and scaled, of `count` numbers for each channel, infinitely many if it was not in training.
    """
    native = native_for(codes)
    if native is None or not gamma.is_contiguous():
        return None
    b, n, c = codes.shape
    plain, weighted, _ = backward_sums(codes, gradient, PLAIN, None)
    sums, sums_with_q = plain.double().sum(dim=0), weighted.double().sum(dim=0)
    out = torch.empty_like(gradient)
    of_gamma, of_beta = torch.empty(c), torch.empty(c)
    largest = ffi.new("float *")
    done(
        native.eb_batch_norm_backward(
            pointer(codes), pointer(gradient), b, n, c, pointer(steps), pointer(mean), pointer(inverse_deviation),
            pointer(gamma), pointer(sums), pointer(sums_with_q), count, pointer(of_gamma), pointer(of_beta),
            pointer(out), largest,
        )
    )  # fmt: skip
    return out, largest[0], of_gamma, of_beta


def sum_forward(
    a: torch.Tensor,
    b: torch.Tensor,
    factors: tuple[float, float],
    shift: float,
    cut: tuple[float, float],
) -> tuple[torch.Tensor, tuple[float, float]]:
    """Return uint8 codes of a · factors[0] + b · factors[1] + shift, as `forward` does, for codes of equal shape."""
    if native := native_for(a):
        out, ends = torch.empty_like(a), ffi.new("float[2]", (math.inf, -math.inf))
        native.eb_sum_forward(pointer(a), pointer(b), a.numel(), *factors, shift, *cut, pointer(out), ends)
        return out, (ends[0], ends[1])
    one, other, last = (torch.tensor(v, dtype=torch.float32, device=a.device) for v in (*factors, shift))
    levels = (a.to(torch.float32) * one + b.to(torch.float32) * other) + last
    of_levels = kernels.extremes(levels)
    return rounded_(levels, cut), of_levels


def sum_backward(
    a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None, masked: int
) -> tuple[torch.Tensor, float]:
    """Return a + b, both bfloat16, 0 where `mask`, uint8 of the same shape, equals `masked`; and the largest
    magnitude."""
    if native := native_for(a):
        out = torch.empty_like(a)
        largest = native.eb_sum_backward(pointer(a), pointer(b), a.numel(), pointer(mask), masked, pointer(out))
        return out, largest
    total = a.to(torch.float32) + b.to(torch.float32)
    return kernels.to_bfloat16(total if mask is None else total.masked_fill_(mask == masked, 0.0))


def max_pool_forward(codes: torch.Tensor, kernel: int, stride: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest codes of windows of `codes: uint8[b, h, w, c]`, and their places in the windows, row · kernel
    + column, uint8 each; of equals the first counts."""
    b, h, w, c = codes.shape
    rows, columns = ((size + 2 * padding - kernel) // stride + 1 for size in (h, w))
    if native := native_for(codes):
        out, places = (torch.empty((b, rows, columns, c), dtype=torch.uint8) for _ in range(2))
        native.eb_max_pool_forward(pointer(codes), b, h, w, c, kernel, stride, padding, pointer(out), pointer(places))
        return out, places
    # Filled with a value below every code, one window a row: [b, kernel², rows, columns, c].
    framed = functional.pad(codes.to(torch.int16), (0, 0, padding, padding, padding, padding), value=-1)
    windows = framed.unfold(1, kernel, stride).unfold(2, kernel, stride).permute(0, 4, 5, 1, 2, 3).flatten(1, 2)
    found = windows[:, 0]
    places = torch.zeros_like(found)
    for place in range(1, kernel * kernel):
        more = windows[:, place] > found
        found, places = torch.where(more, windows[:, place], found), torch.where(more, place, places)
    return found.to(torch.uint8).contiguous(), places.to(torch.uint8).contiguous()


def max_pool_backward(
    places: torch.Tensor, gradient: torch.Tensor, size: tuple[int, int], kernel: int, stride: int, padding: int
) -> tuple[torch.Tensor, float]:
    """Return the gradient bfloat16[b, *size, c] that the places get, and its largest magnitude; where windows overlap
    it is added up in float32."""
    b, rows, columns, c = places.shape
    h, w = size
    if native := native_for(places):
        out = torch.empty((b, h, w, c), dtype=torch.bfloat16)
        sums = torch.empty((h, w, c))
        largest = native.eb_max_pool_backward(
            pointer(places), pointer(gradient), b, h, w, c, kernel, stride, padding, pointer(sums), pointer(out)
        )
        return out, largest
    g = gradient.to(torch.float32)
    total = torch.zeros((b, h + 2 * padding, w + 2 * padding, c), device=places.device)
    # Windows one after the other: the order in which float32 is added up is part of the result.
    for row in range(rows):
        for column in range(columns):
            for place in range(kernel * kernel):
                y, x = row * stride + place // kernel, column * stride + place % kernel
                taken = places[:, row, column] == place
                total[:, y, x] += torch.where(taken, g[:, row, column], 0.0)
    return kernels.to_bfloat16(total[:, padding : padding + h, padding : padding + w])


def _gate(gate: Gate, u: torch.Tensor) -> torch.Tensor:
    if gate == SIGMOID:
        return 1.0 / (1.0 + _exponential(-u))
    return kernels.cut((u + 3.0) * np.float32(1.0 / 6.0).item(), 0.0, 1.0)


def _gate_slope(gate: Gate, u: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if gate == SIGMOID:
        return value * (1.0 - value)
    return torch.where((u > -3.0) & (u < 3.0), torch.tensor(1.0 / 6.0, device=u.device), 0.0)


def _exponential(x: torch.Tensor) -> torch.Tensor:
    """e^x to 3e-6 of itself, by the operations of `peer/native/vectors.h`."""

    def single(value: float | np.float32) -> float:
        return np.float32(value).item()

    x = kernels.cut(x, -87.0, 87.0)
    k = torch.round(x * single(1.44269504))
    r = (x - k * single(0.693359375)) - k * single(-2.12194440e-4)
    p = r * single(np.float32(1.0) / np.float32(120.0)) + single(np.float32(1.0) / np.float32(24.0))
    p = p * r + single(np.float32(1.0) / np.float32(6.0))
    for term in (0.5, 1.0, 1.0):
        p = p * r + term
    powers: torch.Tensor = ((k.to(torch.int32) + 127) << 23).view(torch.float32)
    return p * powers


def rounded_(levels: torch.Tensor, cut: tuple[float, float]) -> torch.Tensor:
    """Return the uint8 codes of levels, cut and rounded to nearest; overwrites them."""
    return torch.round(kernels.cut(levels, *cut)).to(torch.uint8)


def _in_turn(values: torch.Tensor) -> torch.Tensor:
    """Return the sums over the pixels of float32[b, n, c], added up one after the other."""
    if values.device.type != "cpu":
        return values.sum(dim=1)
    # The native sums begin with 0, so that none of them is −0.
    return torch.from_numpy(np.add.accumulate(values.numpy(), axis=1, dtype=np.float32)[:, -1] + np.float32(0.0))
