"""Learning-rate schedules: γ as a function of the round, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable

from peer.config.options import TrainingOptions


def learning_rate(options: TrainingOptions, rounds: int, t: int) -> float:
    """Return γ of round t, counted from 0, of a run of so many rounds.

    A cosine reaches its end after the last round, so that this one still learns. Warm-up multiplies:
    γ(t) · min(1, (t + 1)/warmup_rounds).
    """
    rate = peak = options.learning_rate
    if options.schedule == "step":
        falls = sum(t >= math.ceil(fraction * rounds) for fraction in options.step_milestones)
        rate = peak * options.step_factor**falls
    elif options.schedule == "cosine":
        progress, floor = min(t / max(rounds, 1), 1.0), options.final_rate * peak
        rate = floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return rate * min((t + 1) / options.warmup_rounds, 1.0) if options.warmup_rounds > 0 else rate


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
