"""Running ranges: from which numbers to which the 8-bit codes of an activation reach.

A tensor is quantized with the range that earlier batches had, so that one pass over it is enough to quantize it and to
measure it. A range widens at once to a batch's values, so that at most that one batch is cut off, and narrows by 1 % of
the difference a batch. The first batch of all is measured before it is quantized.

Ranges are buffers: local to a peer, never sent, part of its checkpoint. In evaluation they stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

NARROWING = 0.01
"""Part of the way to a narrower batch that a range moves."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The values of the codes: code q is the number (q − zero_point) · scale."""

    scale: float
    zero_point: int
    """An int8 code."""

    @property
    def inverse(self) -> float:
        """1 / scale."""
        return 1.0 / self.scale


ANY_GRID = Grid(1.0, 0)
"""Where nothing but the extremes is asked for."""


def grid_over(low: float, high: float) -> Grid:
    """Return the grid whose 256 codes reach from `low` to `high`, zero being one of them (gemmlowp)."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255.0
    if math.isnan(scale) or math.isinf(scale):
        # All results become NaN, so that the loss shows it.
        return Grid(math.nan, 0)
    if scale < 1e-30:
        return Grid(1.0, 0 if low < 0.0 else -128)
    return Grid(scale, min(127, max(-128, round(-low / scale) - 128)))


def symmetric_grid_over(low: float, high: float) -> Grid:
    """Return the grid around zero that reaches to `low` and to `high`."""
    largest = max(-low, high)
    if not math.isfinite(largest):
        return Grid(math.nan, 0)
    return Grid(max(largest, 1e-30) / 127.0, 0)


def inverse_step(largest: float) -> float:
    """Return how many of 127 steps that reach to `largest` make 1; 0 where nothing but 0 is, NaN of NaN."""
    return 127.0 / largest if largest > 0.0 else math.nan if math.isnan(largest) else 0.0


def rectified(ends: tuple[float, float], relu: bool) -> tuple[float, float]:
    """Return the extremes of a ReLU's output, if there is one, from those of its input."""
    low, high = ends
    # NaN stays: `max` returns its first argument where the comparison fails.
    return (max(low, 0.0), max(high, 0.0)) if relu else ends


class RunningRange(nn.Module):
    """The range of one activation tensor."""

    running_range: torch.Tensor
    """float32[2], least and greatest; both 0 before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.momentum: float | None = NARROWING
        """Part of the way to a narrower batch that the range moves; None: it only widens, so that all batches count
        alike."""
        self.register_buffer("running_range", torch.zeros(2))

    def reset_running_stats(self) -> None:
        """Forget every batch."""
        self.running_range.zero_()

    def grid(self, over: Callable[[float, float], Grid] = grid_over) -> Grid | None:
        """Return the grid `over` the range; None before the first batch."""
        low, high = self.running_range.tolist()
        return None if low == high == 0.0 else over(low, high)

    def observe_(self, low: float, high: float) -> None:
        """Take in the extremes of a batch."""
        low, high = min(low, 0.0), max(high, 0.0)
        held = self.running_range
        old_low, old_high = held.tolist()
        if math.isnan(low) or math.isnan(old_low):
            low = high = math.nan
        elif old_low < old_high:
            narrowing = self.momentum or 0.0
            low = min(low, old_low + narrowing * (low - old_low))
            high = max(high, old_high + narrowing * (high - old_high))
        if held.is_cpu:
            numbers = held.numpy()
            numbers[0], numbers[1] = low, high
        else:
            held.copy_(torch.tensor((low, high)))


class ChannelRanges(nn.Module):
    """The largest magnitude of each channel of an activation tensor, which moves like `RunningRange`; the grid of a
    channel is symmetric about zero."""

    running_largest: torch.Tensor
    """float32[channels]; all 0 before the first batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.momentum: float | None = NARROWING
        self.register_buffer("running_largest", torch.zeros(channels))

    def reset_running_stats(self) -> None:
        """Forget every batch."""
        self.running_largest.zero_()

    def steps(self) -> torch.Tensor | None:
        """Return the step size of each channel's codes, float32[channels]; None before the first batch."""
        return self.steps_of(self.running_largest) if self.running_largest.any() else None

    @staticmethod
    def steps_of(largest: torch.Tensor) -> torch.Tensor:
        """Return the steps with which 127 of them reach the largest magnitudes; 1 where nothing but 0 is."""
        return torch.where(largest == 0.0, 1.0, largest / 127.0)

    def observe_(self, largest: torch.Tensor) -> None:
        """Take in the largest magnitudes of a batch, float32[channels]."""
        narrower = self.running_largest + (self.momentum or 0.0) * (largest - self.running_largest)
        self.running_largest.copy_(torch.maximum(largest, narrower))
