"""The folder of a sweep: computes the cells that are missing, merges shards, and writes tables.

Each cell has a file of its own, written when the cell ends. An interrupted sweep therefore continues with its missing
cells, several processes may work on one folder, and folders written elsewhere are merged by copying. A cell is a
simulated run, from a text to a text, so that it can be computed anywhere.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from peer.config.options import load
from peer.errors import DivergenceError, SottoError, StateError
from peer.files import write_whole
from peer.lab.grid import FileRow, Files, aligned
from peer.lab.sweep.sweep import Planned, Sweep, cells, describe
from peer.ops.executors import ALL, Computing, Shard
from peer.report.numbers import duration, percent, size
from peer.run.plan import algorithm_spec
from peer.simulate import run as simulator


class SweepFolder:
    """A sweep and the folder that keeps its results."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self.sweep, self.folder = sweep, folder
        self.grid: Files[Planned, Cell] = Files(cells(sweep), folder / "cells", Cell, lambda planned: planned.key)

    def run(
        self,
        computing: Computing,
        shard: Shard = ALL,
        *,
        say: Callable[[str], None] = lambda line: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> int:
        """Compute the missing cells of a shard; once it `is_over`, only those begun. Return how many failed."""
        missing = self.grid.missing(shard)
        calls = [
            (planned, (json.dumps(planned.overrides), self.sweep.peers, self.sweep.stacked)) for planned in missing
        ]
        started, done = time.monotonic(), itertools.count(1)

        def say_one(planned: Planned, text: str) -> None:
            number = next(done)
            left = (time.monotonic() - started) / number * (len(missing) - number)
            say(f"[{number}/{len(missing)}, {duration(left)} left] {planned.describe()}: {text}")

        answers = computing.results(simulate, calls, is_over)
        outcomes = ((planned, _row(planned, json.loads(answer))) for planned, answer in answers)
        return self.grid.run(outcomes, lambda _, row: _outcome(row), say_one)

    def merge(self, folders: Sequence[Path]) -> int:
        """Take the cells of this sweep out of other folders; return how many are new. Raises StateError where two
        folders have different results of one cell, or one is no folder of a sweep."""
        for folder in folders:
            if not (folder / "cells").is_dir():
                raise StateError(f"{folder} contains no cells of a sweep")
        return sum(self.grid.merge(folder / "cells") for folder in folders)

    def report(self) -> list[Cell]:
        """Write results.json and results.csv; return the cells that there are, in the order of the sweep."""
        rows = [row for _, row in self.grid.rows()]
        document = {"sweep": self.sweep.model_dump(mode="json"), "cells": [asdict(row) for row in rows]}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "results.json", json.dumps(document, indent=1) + "\n")
        write_whole(self.folder / "results.csv", as_csv(self.sweep, rows))
        return rows


def _row(planned: Planned, answer: Mapping[str, Any]) -> Cell | SottoError:
    if "failed" in answer:
        return SottoError(answer["failed"])
    return Cell(contender=planned.contender, values=dict(planned.values), seed=planned.seed, **answer)


def as_csv(sweep: Sweep, rows: Sequence[Cell]) -> str:
    """Return the cells as CSV, a column for each axis and each figure that is a number or a text."""
    text = io.StringIO()
    plain = (name for row in rows for name, value in row.result.items() if not isinstance(value, dict | list))
    figures = list(dict.fromkeys(plain))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["contender", *sweep.axes, "seed", *figures, "seconds"])
    for row in rows:
        values = [row.values[key] for key in sweep.axes]
        writer.writerow([row.contender, *values, row.seed, *(row.result.get(name) for name in figures), row.seconds])
    return text.getvalue()


def as_text(sweep: Sweep, rows: Sequence[Cell]) -> str:
    """Return a table for a terminal."""
    keys = [key.rpartition(".")[2] for key in sweep.axes]
    lines = [["contender", *keys, "seed", "ended", "worst peer", "averaged", "sent"]]
    for row in rows:
        found = row.result
        ended = str(found["ended"]).partition(":")[0]
        figures = [percent(found.get("worst_accuracy")), percent(found.get("averaged_accuracy"))]
        values = [str(row.values[key]) for key in sweep.axes]
        lines.append([row.contender, *values, str(row.seed), ended, *figures, size(found.get("payload_bytes"))])
    return "\n".join(aligned(lines, left=True))


def _outcome(cell: Cell) -> str:
    if cell.result["ended"] != "completed":
        return f"{cell.result['ended']} ({duration(cell.seconds)})"
    worst = cell.result["worst_accuracy"]
    found = "" if worst is None else f"worst peer {100 * worst:.1f} %, "
    return f"{found}{duration(cell.seconds)}"


_FIGURES = (
    "completed_rounds", "averaged_accuracy", "worst_accuracy", "averaged_metrics", "worst_metrics",
    "consensus_distance", "payload_bytes", "frame_bytes", "bits_per_parameter",
)  # fmt: skip
"""Figures of a run's summary that depend on the configuration alone, not on the machine."""


@dataclass(frozen=True, kw_only=True)
class Cell(FileRow):
    """The outcome of one cell."""

    contender: str
    values: dict[str, str | int | float | bool]
    seed: int
    result: dict[str, Any]
    """`ended` and the figures of the summary; the same wherever it is computed."""
    seconds: float
    """Duration of the computation."""

    indent = None

    def difference(self, other: Self) -> str | None:
        """Name the figures that depend on the machine, where they must not. The duration may differ."""
        if self.result == other.result:
            return None
        differing = [name for name in other.result if other.result[name] != self.result.get(name)]
        return (
            f"differ in {', '.join(differing)}: {describe(self.contender, self.values, self.seed)} was computed with "
            "different versions or processors; move one of the files away"
        )


def simulate(overrides: str, num_peers: int, stacked: bool) -> str:
    """Return JSON: `result` and `seconds`, or `failed` with a sentence. Relative paths start in the working folder of
    the computing process."""
    started = time.monotonic()
    try:
        result = _result(json.loads(overrides), num_peers, stacked)
    except SottoError as error:
        return json.dumps({"failed": str(error)})
    return json.dumps({"result": result, "seconds": time.monotonic() - started})


def _result(overrides: list[str], num_peers: int, stacked: bool) -> dict[str, Any]:
    config = load(environment={}, overrides=overrides)
    stacked = stacked and not algorithm_spec(config).asynchronous
    try:
        summary = simulator.run(config, Path(), num_peers=num_peers, stacked=stacked, baseline=False).summary
    except DivergenceError as error:
        return {"ended": f"diverged: {error}"}
    document = summary.document()
    return {name: document[name] for name in ("ended", *_FIGURES)}
