"""Learning-rate schedules: γ as a function of the round, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from peer.config.options import TrainingOptions
from peer.errors import ConfigError

KINDS = ("constant", "step", "cosine")


class LearningRate(Protocol):
    """γ of every round of a run."""

    def rate(self, t: int) -> float:
        """Return γ of round t, counted from 0."""
        ...


@dataclass(frozen=True)
class Constant:
    """Always the same γ."""

    peak: float

    def rate(self, t: int) -> float:
        return self.peak


@dataclass(frozen=True)
class Step:
    """`peak`, multiplied by `factor` from each of the rounds in `milestones` on."""

    peak: float
    milestones: tuple[int, ...]
    factor: float = 0.1

    def rate(self, t: int) -> float:
        return self.peak * self.factor ** sum(t >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Cosine:
    """From `peak` down half a cosine that reaches `floor` after `rounds`, so that the last round still learns."""

    peak: float
    rounds: int
    floor: float = 0.0

    def rate(self, t: int) -> float:
        progress = min(t / max(self.rounds, 1), 1.0)
        return self.floor + (self.peak - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WarmUp:
    """The schedule `then`, times (t + 1)/rounds in the first `rounds`."""

    rounds: int
    then: LearningRate

    def rate(self, t: int) -> float:
        return self.then.rate(t) * min((t + 1) / self.rounds, 1.0) if self.rounds > 0 else self.then.rate(t)


def build(
    kind: str,
    *,
    peak: float,
    rounds: int,
    warmup_rounds: int = 0,
    milestones: Sequence[float] = (0.5, 0.75),
    factor: float = 0.1,
    final: float = 0.0,
) -> LearningRate:
    """Return the schedule of a configuration; `milestones` are fractions of the run, `final` is one of `peak`.

    Warm-up multiplies: γ(t) · min(1, (t + 1)/warmup_rounds). Raises ConfigError for an unknown kind.
    """
    schedule: LearningRate
    if kind == "constant":
        schedule = Constant(peak)
    elif kind == "step":
        schedule = Step(peak, tuple(math.ceil(fraction * rounds) for fraction in milestones), factor)
    elif kind == "cosine":
        schedule = Cosine(peak, rounds, final * peak)
    else:
        raise ConfigError("unknown learning-rate schedule", key="training.schedule", value=kind, valid=", ".join(KINDS))
    return WarmUp(warmup_rounds, schedule) if warmup_rounds > 0 else schedule


def learning_rates(options: TrainingOptions, rounds: int) -> LearningRate:
    """Return the configured γ of every round."""
    return build(
        options.schedule,
        peak=options.learning_rate,
        rounds=rounds,
        warmup_rounds=options.warmup_rounds,
        milestones=options.step_milestones,
        factor=options.step_factor,
        final=options.final_rate,
    )


def step_size_decay(rates: Iterable[float]) -> tuple[float, ...]:
    """Return C_α of each round k: the smallest for which γ_i / γ_j ≤ C_α wherever i ≤ j ≤ k (Moniqua, Theorem 2, with
    η_α = 1).

    θ_k bounds distances that the steps up to round k led to, and a run may end with any round, so later rounds do not
    count. With them, a cosine over 1,000 rounds would make the first bounds 4·10⁵ times larger. `rates` are the γ of a
    run in order, all above 0.
    """
    decays, largest, decay = [], 0.0, 1.0
    for rate in rates:
        if rate <= 0.0:
            raise ValueError("the bound needs every γ to be above 0")
        largest = max(largest, rate)
        decay = max(decay, largest / rate)
        decays.append(decay)
    return tuple(decays)
