"""One curve of a race: a contender trains on real data, and its accuracy by gradient step.

Our contenders are simulated, which gives the models of real peers; rivals run their own code in processes of their own
(`rivals.training`). Neither knows links: cells measure the duration of a step on them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peer import gossip
from peer.config.options import load
from peer.errors import SottoError
from peer.lab.grid import FileRow
from peer.lab.study.checkout import commit
from peer.lab.study.predict import simulated
from peer.lab.study.rivals.training_orders import PROGRAM, TrainingOrders
from peer.lab.study.study import Contender, Study

AVERAGED = -1
"""Number of the averaged model among the peers of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """An evaluation."""

    steps: int
    """Gradient steps of each peer."""
    worst: float
    """Accuracy of the worst peer."""
    averaged: float
    """Accuracy of the averaged model; the same where all peers hold one model."""


@dataclass(frozen=True, kw_only=True)
class Curve(FileRow):
    """The curve of one contender with one seed."""

    contender: str
    skew: float
    seed: int
    commit: str
    seconds: float
    """Duration of the training on this machine."""
    payload_bytes: float | None
    """Compressed numbers that one peer sends for each step, on average; None for a rival, which does not count them."""
    points: tuple[Point, ...]

    def steps_to(self, accuracy: float) -> float | None:
        """Return the steps after which the worst peer is that accurate, linear between evaluations; None if never."""
        return first_at(accuracy, [(point.steps, point.worst) for point in self.points])


def first_at(accuracy: float, points: Iterable[tuple[int, float]]) -> float | None:
    """Return the first place where a curve of (steps or rounds, accuracy) from (0, 0) on is at an accuracy, linear
    between its points; None if it never is."""
    for (start, before), (end, after) in itertools.pairwise([(0, 0.0), *points]):
        if after >= accuracy:
            return start + (accuracy - before) / (after - before) * (end - start)
    return None


def train(study: Study, contender: Contender, skew: float, seed: int, data: Path | None) -> Curve:
    """Train a contender to the last step. Raises SottoError; `data` is the folder of the data set."""
    started, settings = time.monotonic(), study.race_settings(contender, skew, seed, data)
    if contender.rival is not None:
        payload, points = None, _rival_points(study, contender, settings)
    else:
        payload, points = _own_points(study, contender, settings)
    return Curve(
        contender=contender.name,
        skew=skew,
        seed=seed,
        commit=commit(),
        seconds=round(time.monotonic() - started, 1),
        payload_bytes=payload,
        points=points,
    )


def _own_points(study: Study, contender: Contender, settings: Sequence[str]) -> tuple[float, tuple[Point, ...]]:
    """Return the payload of a step, and the points."""
    period = study.steps_per_round(contender)
    config = load(environment={}, overrides=list(settings))
    # As many processes as there are processors, like the rivals; no bit depends on their number.
    has_rounds = not gossip.ALGORITHMS[config.algorithm.name].spec.asynchronous
    workers = os.cpu_count() or 1 if has_rounds else 1
    with simulated(config, study.peers, stacked=True, workers=workers) as store:
        rounds, evaluations = store.rounds(), store.evaluations()
    by_round: dict[int, dict[int, float]] = defaultdict(dict)
    for each in evaluations:
        if each.accuracy is not None:
            by_round[each.round][each.peer] = each.accuracy
    points = [
        Point(
            steps=done * period,
            worst=min(accuracy for peer, accuracy in together.items() if peer != AVERAGED),
            averaged=together[AVERAGED],
        )
        for done, together in sorted(by_round.items())
    ]
    return statistics.mean(record.payload_bytes for record in rounds) / period, tuple(points)


def _rival_points(study: Study, contender: Contender, settings: Sequence[str]) -> tuple[Point, ...]:
    assert contender.rival is not None
    with tempfile.TemporaryDirectory(prefix="sotto-curve-") as folder:
        orders = TrainingOrders(
            name=contender.rival,
            settings=dict(contender.settings),
            overrides=list(settings),
            num_workers=study.peers,
            folder=folder,
        )
        file = Path(folder, "orders.json")
        file.write_text(json.dumps(asdict(orders)), encoding="utf-8")
        _run_program([sys.executable, "-m", PROGRAM, str(file)], contender.name)
        found = json.loads(orders.result_file.read_text())
    return tuple(Point(steps=int(steps), worst=accuracy, averaged=accuracy) for steps, accuracy, _ in found)


def _run_program(command: Sequence[str], name: str) -> None:
    """Run a program to its end, its workers with it. Raises SottoError with the last line that it wrote."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        try:
            _, said = program.communicate()
        finally:
            # An interrupted program leaves workers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    if program.returncode:
        lines = said.strip().splitlines()
        raise SottoError(f"{name} failed: {lines[-1] if lines else f'exit code {program.returncode}'}")
