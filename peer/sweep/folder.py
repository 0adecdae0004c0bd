"""The folder of a sweep: computes the cells that are missing, merges shards, and writes tables.

Each cell has a file of its own, written when the cell ends. So a sweep that was interrupted continues with what is
missing, several processes may work on one folder, and folders that were written elsewhere are merged by copying.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peer.errors import StateError
from peer.executors import ALL, Computing, Shard
from peer.own_files import write_whole
from peer.report.numbers import duration, percent, size
from peer.sweep.cell import Cell, request, simulate
from peer.sweep.plan import Planned, Sweep, cells


class SweepFolder:
    """A sweep and the folder that keeps its results."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self.sweep, self.folder = sweep, folder
        self.planned = cells(sweep)
        (folder / "cells").mkdir(parents=True, exist_ok=True)

    def missing(self, shard: Shard = ALL) -> list[Planned]:
        """Return the cells of a shard that have no file yet."""
        return [planned for planned in shard.of(self.planned) if not self._file(planned).exists()]

    def run(
        self,
        computing: Computing,
        shard: Shard = ALL,
        *,
        say: Callable[[str], None] = lambda line: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> int:
        """Compute the missing cells of a shard, or those that have begun when it `is_over`; return how many failed."""
        missing = self.missing(shard)
        calls = [(planned, request(planned, self.sweep)) for planned in missing]
        started, failed = time.monotonic(), 0
        for done, (planned, answer) in enumerate(computing.results(simulate, calls, is_over), start=1):
            content = json.loads(answer)
            left = (time.monotonic() - started) / done * (len(missing) - done)
            place = f"[{done}/{len(missing)}, {duration(left)} left] {planned.describe()}"
            if "failed" in content:
                failed += 1
                say(f"{place}: failed: {content['failed']}")
                continue
            cell = Cell(contender=planned.contender, values=dict(planned.values), seed=planned.seed, **content)
            self._write(planned, cell)
            say(f"{place}: {_outcome(cell)}")
        return failed

    def merge(self, folders: Sequence[Path]) -> int:
        """Take the cells of this sweep out of other folders; return how many are new. Raises StateError where two
        folders have different results of one cell, or one is no folder of a sweep."""
        new = 0
        for folder in folders:
            if not (folder / "cells").is_dir():
                raise StateError(f"{folder} contains no cells of a sweep")
            for planned in self.planned:
                other = folder / "cells" / self._file(planned).name
                if not other.exists():
                    continue
                theirs, own = Cell.read(other), self._file(planned)
                if not own.exists():
                    self._write(planned, theirs)
                    new += 1
                elif (ours := Cell.read(own)).result != theirs.result:
                    differing = [name for name in theirs.result if theirs.result[name] != ours.result.get(name)]
                    raise StateError(
                        f"{other} and {own} differ in {', '.join(differing)}: {planned.describe()} was computed with "
                        "different versions or processors; move one of the files away"
                    )
        return new

    def rows(self) -> list[Cell]:
        """Return the cells that there are, in the order of the sweep."""
        return [Cell.read(self._file(planned)) for planned in self.planned if self._file(planned).exists()]

    def report(self) -> list[Cell]:
        """Write results.json and results.csv; return the cells."""
        rows = self.rows()
        document = {"sweep": self.sweep.model_dump(mode="json"), "cells": [asdict(row) for row in rows]}
        write_whole(self.folder / "results.json", json.dumps(document, indent=1) + "\n")
        write_whole(self.folder / "results.csv", as_csv(self.sweep, rows))
        return rows

    def _write(self, planned: Planned, cell: Cell) -> None:
        write_whole(self._file(planned), json.dumps(asdict(cell), ensure_ascii=False) + "\n")

    def _file(self, planned: Planned) -> Path:
        return self.folder / "cells" / f"{planned.key}.json"


def as_csv(sweep: Sweep, rows: Sequence[Cell]) -> str:
    """Return the cells as CSV, a column for each axis and each figure that is a number or a text."""
    text = io.StringIO()
    figures = list(dict.fromkeys(name for row in rows for name, value in row.result.items() if not _is_table(value)))
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
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, dict | list)


def _outcome(cell: Cell) -> str:
    if cell.result["ended"] != "completed":
        return f"{cell.result['ended']} ({duration(cell.seconds)})"
    worst = cell.result["worst_accuracy"]
    found = "" if worst is None else f"worst peer {100 * worst:.1f} %, "
    return f"{found}{duration(cell.seconds)}"
