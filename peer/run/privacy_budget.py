"""ε that private local steps have spent, and the noise with which a run keeps to a limit.

The accountant is that of Google's `dp-accounting` (privacy loss distributions, rounded so that ε is never too small),
which the extra `privacy` installs. Neighbouring data sets differ in one sample that is there or not. Every round counts
from the first on, whether or not this device did it: the steps of a device that lost its state folder stay counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from peer.config.options import Config
from peer.errors import ConfigError
from peer.train.private_step import sampling_rate

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_STAGES = 20
"""Stages of a run for whose ends ε is computed."""
_STEP = 1e-3
"""Precision of the noise multiplier."""


@dataclass(frozen=True)
class Budget:
    """Privacy spent by the private steps of one peer."""

    noise_multiplier: float
    sampling_rate: float
    delta: float
    rounds: int
    local_steps: int

    def spent(self, done: int) -> float:
        """Return an upper bound of the ε that the first `done` rounds spent, at most one stage above the value."""
        if done <= 0:
            return 0.0
        stage = -(-self.rounds // _STAGES)
        counted = min(self.rounds, -(-done // stage) * stage) if done <= self.rounds else done
        return epsilon(self.noise_multiplier, self.sampling_rate, counted * self.local_steps, self.delta)


def plan_budget(config: Config, num_samples: int) -> Budget:
    """Return the budget of a device with that many training samples; the noise is that of the options, or the least
    that keeps to their ε. Raises ConfigError (`privacy.epsilon`) if that is impossible, or the accountant is
    missing."""
    options, training, rounds = config.privacy, config.training, config.run.rounds
    steps, rate = rounds * training.local_steps, sampling_rate(training, num_samples)
    if not 0 < rate <= 1:
        raise ConfigError(
            f"is larger than the {num_samples} training samples of this device",
            key="training.batch_size",
            value=training.batch_size,
        )
    noise = options.noise_multiplier
    if noise is None:
        assert options.epsilon is not None
        noise = noise_for(options.epsilon, rate, steps, options.delta)
    elif options.epsilon is not None and (spent := epsilon(noise, rate, steps, options.delta)) > options.epsilon:
        raise ConfigError(
            f"is not enough for {rounds} rounds, which spend {spent:.3g}: lower run.rounds or training.batch_size, or"
            " raise privacy.noise_multiplier",
            key="privacy.epsilon",
            value=options.epsilon,
        )
    return Budget(noise, rate, options.delta, rounds, training.local_steps)


@lru_cache(maxsize=256)
def epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    """Return ε at δ of `steps` Gaussian mechanisms on Poisson samples. Raises ConfigError without the accountant."""
    return float(_one_step(noise_multiplier, sampling_rate).self_compose(steps).get_epsilon_for_delta(delta))


@lru_cache(maxsize=2)
def _one_step(noise_multiplier: float, sampling_rate: float) -> PrivacyLossDistribution:
    """Return the privacy loss of one step, which takes ten times as long as ε of any number of them."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError:
        raise ConfigError("needs the package dp-accounting: pip install 'sottovoce[privacy]'", key="privacy") from None
    return privacy_loss_distribution.from_gaussian_mechanism(noise_multiplier, sampling_prob=sampling_rate)


@lru_cache(maxsize=64)
def noise_for(limit: float, sampling_rate: float, steps: int, delta: float) -> float:
    """Return the least noise multiplier, in steps of a thousandth, with which ε stays within a limit. Raises
    ConfigError if none below 1,000 does."""
    low, high, too_much = 0, 1000, math.inf
    while (within := epsilon(high * _STEP, sampling_rate, steps, delta)) > limit:
        low, high, too_much = high, 2 * high, within
        if high > 1_000_000:
            raise ConfigError("is too small for so many steps", key="privacy.epsilon", value=limit)
    tried = 0
    while low + 1 < high:
        tried += 1
        middle = (low + high) // 2
        # A power of the noise leads from one end to the other nearly as ε does, and spares the accountant half of what
        # it does, for seconds. Where it does not, halves of what is left come to an end.
        if math.isfinite(too_much) and within > 0 and tried % 4:
            share = math.log(too_much / limit) / math.log(too_much / within)
            middle = min(max(round(low * (high / low) ** share), low + 1), high - 1)
        # Next to no noise overflows the accountant, and is far from enough.
        spent = epsilon(middle * _STEP, sampling_rate, steps, delta) if middle >= 100 else math.inf
        if spent <= limit:
            high, within = middle, spent
        else:
            low, too_much = middle, spent
    return high * _STEP
