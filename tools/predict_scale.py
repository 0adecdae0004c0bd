"""Predicts rounds and time to an accuracy for numbers of peers that nobody can simulate, and says how wrong it may be.

    python -m tools.predict_scale                                         sgp and quant-sgp on three graphs over LTE
    python -m tools.predict_scale --algorithm sgp --graph ring --link dsl
    python -m tools.predict_scale --simulate 8 --simulate 64 --simulate 512 --peers 10000

Points around centres, 100 samples a peer with label skew 0.8, constant learning rate. Sizes given with --simulate are
simulated until the peers are on average as accurate as --accuracy; for --peers, rounds are extrapolated as a power of
the mixing time of the graph. Seconds are rounds times the seconds of a round on the links, which the link model of
studies computes for any size: who sends to whom and how long that takes, with messages weighed at eight peers.

Theory bounds rounds to a target by a sum of terms with 1 / (spectral gap) (Koloskova et al., 2020), which for slow
graphs is far from what happens: peers learn from near neighbours long before the whole graph agrees. The exponent is
therefore fitted, not assumed, and every extrapolation comes with the error of the same one on simulated sizes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from peer.config.options import Config
from peer.gossip.base import Memory
from peer.gossip.topology import Schedule
from peer.lab.study.predict import link_model, round_seconds, weigh
from peer.lab.study.race import first_at
from peer.links.profiles import find
from peer.records import Progress
from peer.run.plan import algorithm_spec, build_schedule
from peer.simulate import run as simulator
from peer.state.metrics import EvaluationRecord, MetricsStore
from tools.grid import Program

LEAST_SIZES = 2
"""Least number of sizes to which a power law is fitted."""
SAMPLES_OF_A_PEER = 100
WEIGHED_PEERS = 8
PROGRAM = Program.named("predict_scale")
OWN = {"sgp": ("compressor.kind=none",)}
HEAD = (
    "| algorithm | graph | peers | mixing, rounds | rounds, simulated | rounds, by the law | error | s a round | time |"
)


def main() -> int:
    arguments = PROGRAM.parse(__doc__)
    print(HEAD)
    print("| --- | --- |" + " ---: |" * 7)
    laws = []
    for algorithm, graph in itertools.product(arguments.algorithm, arguments.graph):
        own = [f"algorithm.name={algorithm}", f"graph.kind={graph}", *OWN.get(algorithm, ()), *arguments.set]
        laws.append((algorithm, graph, predicted(own, arguments)))
    for algorithm, graph, law in laws:
        if law is not None:
            print(f"\n{algorithm} on {graph}: rounds = {law.factor:.1f} · (mixing rounds)^{law.exponent:.3f}", end="")
    print()
    return 0


def predicted(own: list[str], arguments: argparse.Namespace) -> PowerLaw | None:
    """Print the rows of an algorithm on a graph; return the law, if the target was reached often enough for one."""

    def job(peers: int) -> Config:
        samples = f"training.task_options.samples={peers * SAMPLES_OF_A_PEER}"
        return PROGRAM.config(f"run.rounds={arguments.rounds}", samples, *own)

    weight = weigh(job(WEIGHED_PEERS), WEIGHED_PEERS).frame_bytes

    def row(peers: int, simulated: float | None, by_law: float | None, error: float | None) -> None:
        config = job(peers)
        schedule, spec = build_schedule(config, Path(), peers), algorithm_spec(config)
        round_s = round_seconds(
            schedule, link_model(find(arguments.link)), arguments.step_seconds, weight,
            to_all=spec.memory is Memory.REPLICAS, exchanges=spec.exchanges, rounds=max(4, schedule.cycle_rounds + 1),
        )  # fmt: skip
        rounds = simulated if simulated is not None else by_law
        cells = [
            config.algorithm.name, schedule.name, f"{peers:,}", f"{mixing_rounds(schedule):,.3g}", _whole(simulated),
            _whole(by_law), "" if error is None else f"{100 * error:+.0f} %", f"{round_s:.3f}",
            "" if rounds is None else _time(rounds * round_s),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)

    points = []
    for peers in sorted(arguments.simulate):
        found = rounds_to(job(peers), peers, arguments.accuracy)
        if found is None:
            print(f"{own[0]}, {peers} peers: not in {arguments.rounds} rounds", file=sys.stderr)
            continue
        mixing = mixing_rounds(build_schedule(job(peers), Path(), peers))
        points.append(Simulated(num_peers=peers, mixing_rounds=mixing, rounds=found))
    errors = errors_beyond(points)
    for point in points:
        error = errors.get(point.num_peers)
        row(point.num_peers, point.rounds, None if error is None else point.rounds * (1 + error), error)
    if len(points) < LEAST_SIZES:
        return None
    law = fit(points)
    for peers in arguments.peers:
        row(peers, None, law.rounds(mixing_rounds(build_schedule(job(peers), Path(), peers))), None)
    return law


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


def _whole(rounds: float | None) -> str:
    return "" if rounds is None else f"{rounds:,.0f}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    raise SystemExit(main())
