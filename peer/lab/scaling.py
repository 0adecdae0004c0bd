"""Number of rounds that a run needs with more peers than can be simulated: a power of the mixing time of its graph.

Rounds to a target are counted in simulations of several sizes. Theory bounds them by a sum of terms with 1 / (spectral
gap) (Koloskova et al., 2020), which for slow graphs is far from what happens: peers learn from near neighbours long
before the whole graph agrees. The exponent is therefore fitted, not assumed, and every extrapolation comes with the
error of the same one on simulated sizes.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from peer.config.options import Config
from peer.gossip.topology import Schedule
from peer.lab.study.race import first_at
from peer.records import Progress
from peer.simulate import run as simulator
from peer.state.metrics import EvaluationRecord, MetricsStore

LEAST_SIZES = 2
"""Least number of sizes to which a power law is fitted."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """One simulated size."""

    num_peers: int
    mixing_rounds: float
    rounds: float
    """Rounds to the target."""


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """rounds = factor · mixing_rounds^exponent."""

    factor: float
    exponent: float

    def rounds(self, mixing_rounds: float) -> float:
        """Return the rounds to the target."""
        return float(self.factor * mixing_rounds**self.exponent)


def mixing_rounds(schedule: Schedule) -> float:
    """Return the rounds in which disagreement falls by a factor e: 1 / (spectral gap), and a cycle at least. A one-peer
    graph of a power of 2 of peers averages exactly in a cycle, which makes its gap 1, but needs all rounds of it."""
    gap = schedule.spectral_gap
    return max(float(schedule.cycle_rounds), 1.0 / gap if gap > 0 else math.inf)


def fit(points: Sequence[Simulated]) -> PowerLaw:
    """Return the power law that is closest in logarithms; a constant where all graphs mix in the same time."""
    x, y = np.log([point.mixing_rounds for point in points]), np.log([point.rounds for point in points])
    spread = x - x.mean()
    exponent = float(spread @ (y - y.mean()) / (spread @ spread)) if np.ptp(x) > 1e-9 else 0.0
    return PowerLaw(factor=float(np.exp(y.mean() - exponent * x.mean())), exponent=exponent)


def errors_beyond(points: Sequence[Simulated]) -> dict[int, float]:
    """Return, by number of peers, the relative error of the law fitted to all smaller sizes, where there are enough;
    positive where it predicts too many rounds."""
    ordered = sorted(points, key=lambda point: point.num_peers)
    return {
        point.num_peers: fit(ordered[:number]).rounds(point.mixing_rounds) / point.rounds - 1.0
        for number, point in enumerate(ordered)
        if number >= LEAST_SIZES
    }


def rounds_to(config: Config, num_peers: int, accuracy: float) -> float | None:
    """Return the number of rounds until the mean accuracy of the evaluated peers first is `accuracy`, linear between
    evaluations; None if it never is. Raises SottoError."""
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="sotto-scaling-") as name:
        directory = Path(name)

        def look(progress: Progress) -> None:
            store = MetricsStore(directory / "metrics.sqlite", read_only=True)
            if _crossing(store.evaluations(), accuracy) is not None:
                stop.set()
            store.close()

        simulator.run(
            config, Path(), num_peers=num_peers, directory=directory, stacked=True, baseline=False, stop=stop,
            on_progress=look,
        )  # fmt: skip
        store = MetricsStore(directory / "metrics.sqlite", read_only=True)
        found = _crossing(store.evaluations(), accuracy)
        store.close()
    return found


def _crossing(evaluations: Sequence[EvaluationRecord], accuracy: float) -> float | None:
    by_round: dict[int, list[float]] = defaultdict(list)
    for each in evaluations:
        if each.peer >= 0 and each.split == "test" and each.accuracy is not None:
            by_round[each.round].append(each.accuracy)
    return first_at(accuracy, [(round_, mean(found)) for round_, found in sorted(by_round.items())])
