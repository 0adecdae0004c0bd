"""The norms of the image models, in full precision.

Batch statistics differ from peer to peer where peers hold different data; those of a sample do not. Group norm and the
two EvoNorms are therefore for skewed data, batch norm and Range batch norm for comparison. The running statistics of
the latter are buffers: local to a peer, never sent (see `peer.train.statistics`).

The Range norms need no squares and no square root over the activations: they estimate the standard deviation of n
numbers from their range, which 8-bit arithmetic can do (Banner et al., "Scalable methods for 8-bit training of neural
networks", 2018, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from peer.train.full_precision.evonorm import evonorm_s0

Norm = Literal["evonorm", "range-evonorm", "group", "batch", "range-batch"]

EPSILON = 1e-5
GROUPS = 32
"""Groups of an EvoNorm, as in its paper; with fewer channels, every channel is a group."""
CHUNKS = 16
"""Range batch norm averages the ranges of at most so many parts of a batch: a single range follows its outliers."""


def make_norm(name: Norm, channels: int) -> nn.Module:
    """Return a norm for float32[b, channels, h, w]: "evonorm", "range-evonorm", "group", "batch" or "range-batch". An
    EvoNorm gets the most equal groups up to 32."""
    return _MAKERS[name](channels)


def activates(name: Norm) -> bool:
    """Return whether the norm is an activation too, so that no ReLU follows."""
    return name in ("evonorm", "range-evonorm")


def range_scale(n: int) -> float:
    """Return C(n): times the range of n normal numbers it estimates their standard deviation.

    C(n) = 0.175 · (1 + √(π ln 4)) / √(2 ln n), the constant of the published code of Range batch norm. (Its paper
    prints 1/√(2 ln n), which is 1.85 times as large; the gain γ takes up the difference.)
    """
    return 0.5 * 0.35 * (1.0 + math.sqrt(math.pi * math.log(4.0))) / math.sqrt(2.0 * math.log(max(n, 2)))


class EvoNormS0(nn.Module):
    """y = x · σ(v x) / √(s² + ε) · γ + β, with s² the variance of a sample over a group of channels; v, γ and β a
    channel each (Liu et al., "Evolving normalization-activation layers", 2020)."""

    def __init__(self, channels: int, *, groups: int = GROUPS, epsilon: float = EPSILON) -> None:
        super().__init__()
        self.groups, self.epsilon = equal_groups(channels, groups), epsilon
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.v = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, c, h, w] for [b, c, h, w], in the type of x."""
        return evonorm_s0(x, self.v, self.weight, self.bias, self.groups, self.epsilon)


class RangeEvoNorm(EvoNormS0):
    """y = x · h(v x) / (C(n) · r + ε) · γ + β, with r the range (largest less smallest) of the n activations of a
    sample in a group of channels, h(x) = max(0, min(1, (x + 3)/6)), and v, γ and β a channel each.

    The proposal of the low-precision paper (section 3, equation 2). Its parameters are those of EvoNorm-S0, so that
    either can go on from the other's.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, c, h, w] for [b, c, h, w], in the type of x."""
        b, c = x.shape[:2]
        dtype, x = x.dtype, x.to(self.weight.dtype)
        # One reduction each over a flat row: several dimensions at once take ten times as long.
        grouped = x.reshape(b, self.groups, -1)
        spread = grouped.max(dim=2).values - grouped.min(dim=2).values
        scale = 1.0 / (range_scale(grouped.shape[2]) * spread + self.epsilon)
        scale = scale.repeat_interleave(c // self.groups, dim=1) * self.weight
        gate = functional.hardsigmoid(x * self.v.view(c, 1, 1))
        return (x * gate * scale.view(b, c, 1, 1) + self.bias.view(c, 1, 1)).to(dtype)


class RangeBatchNorm(nn.Module):
    """y = (x − μ) / (C(n) · r + ε) · γ + β, with μ the mean of a channel over the batch and r the mean, over the parts
    of the batch, of the range of its n activations there (Banner et al., section 3).

    The batch is cut into the largest number of equal parts up to 16. In evaluation, running means of μ and C(n) · r
    take the place of the batch's, with the momentum of torch's batch norm: the new value counts a tenth; with
    `momentum` None all batches since the last reset count alike.
    """

    running_mean: torch.Tensor
    running_scale: torch.Tensor
    num_batches_tracked: torch.Tensor

    def __init__(self, channels: int, *, momentum: float | None = 0.1, epsilon: float = EPSILON) -> None:
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_scale", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.int64))

    def reset_running_stats(self) -> None:
        """Forget all batches."""
        self.running_mean.zero_()
        self.running_scale.fill_(1.0)
        self.num_batches_tracked.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, c, h, w] for [b, c, h, w], in the type of x."""
        c = x.shape[1]
        dtype, x = x.dtype, x.to(self.weight.dtype)
        mean, scale = self._statistics(x) if self.training else (self.running_mean, self.running_scale)
        gain = self.weight / (scale + self.epsilon)
        return (x * gain.view(c, 1, 1) + (self.bias - mean * gain).view(c, 1, 1)).to(dtype)

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and scale of the batch, float32[c] each, and let the running ones move on."""
        b, c, h, w = x.shape
        parts = equal_parts(b, CHUNKS)
        numbers = x.reshape(parts, b // parts, c, h * w)
        spread = numbers.amax(dim=3).amax(dim=1) - numbers.amin(dim=3).amin(dim=1)
        mean = x.mean(dim=(0, 2, 3))
        scale = range_scale(b // parts * h * w) * spread.mean(dim=0)
        self.follow_(mean, scale)
        return mean, scale

    @torch.no_grad()
    def follow_(self, mean: torch.Tensor, scale: torch.Tensor) -> None:
        """Let the running statistics follow those of a batch, float32[c] each."""
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.add_(share * (mean - self.running_mean))
        self.running_scale.add_(share * (scale - self.running_scale))


def equal_groups(channels: int, groups: int) -> int:
    """Return how many groups the channels make. Raises ValueError if they do not make equal ones."""
    groups = min(groups, channels)
    if channels % groups:
        raise ValueError(f"{channels} channels do not make {groups} equal groups")
    return groups


def equal_parts(total: int, most: int) -> int:
    """Return the largest number of equal parts, up to `most`, that `total` can be cut into."""
    return next(parts for parts in range(min(most, total), 0, -1) if total % parts == 0)


_MAKERS: Mapping[Norm, Callable[[int], nn.Module]] = {
    "evonorm": lambda channels: EvoNormS0(channels, groups=equal_parts(channels, GROUPS)),
    "range-evonorm": lambda channels: RangeEvoNorm(channels, groups=equal_parts(channels, GROUPS)),
    "group": lambda channels: nn.GroupNorm(channels // 2, channels),
    "batch": nn.BatchNorm2d,
    "range-batch": RangeBatchNorm,
}

NORMS: tuple[Norm, ...] = tuple(_MAKERS)
