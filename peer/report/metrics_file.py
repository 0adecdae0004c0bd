"""The metrics of runs as one table for other programs: CSV, or Parquet.

A row is a row of the metrics files (`peer.state.metrics`), with the name of its run and of its peer in front.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from peer.errors import ConfigError, StateError
from peer.files import replacing
from peer.records import RoundRecord
from peer.report.comparison import distinct
from peer.report.run_data import RunData
from peer.state.metrics import ConsensusRecord, EvaluationRecord, LinkRecord

TABLES: Mapping[str, tuple[type, Callable[[RunData], Sequence[Any]]]] = {
    "rounds": (RoundRecord, lambda run: run.rounds),
    "evaluations": (EvaluationRecord, lambda run: run.evaluations),
    "links": (LinkRecord, lambda run: run.links),
    "consensus": (ConsensusRecord, lambda run: run.consensus),
}


def write_metrics(runs: Sequence[RunData], table: str, output: Path) -> int:
    """Write one of TABLES of some runs to a file, by the ending of its name; return the number of rows.

    Raises ConfigError if the ending is neither .csv nor .parquet, Parquet needs a package that is missing, or the file
    cannot be written, and StateError if a file of metrics cannot be read: fewer rows would look like a shorter run.
    """
    unreadable = [f"{run.directory}: {each}" for run in runs for each in run.unreadable]
    if unreadable:
        raise StateError("; ".join(unreadable))
    heads, rows = _rows(runs, table)
    try:
        if output.suffix == ".csv":
            _write_csv(heads, rows, output)
        elif output.suffix == ".parquet":
            _write_parquet(heads, rows, output)
        else:
            raise ConfigError("has an ending of no known format", file=str(output), valid="NAME.csv or NAME.parquet")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=str(output)) from None
    return len(rows)


def _rows(runs: Sequence[RunData], table: str) -> tuple[list[str], list[list[Any]]]:
    record, of_run = TABLES[table]
    names = [item.name for item in fields(record)]
    heads = ["run", *(["peer_name"] if "peer" in names else []), *names]
    if record is EvaluationRecord:
        heads.append("accuracy")
    labels = distinct([run.directory.resolve().name for run in runs])
    rows = []
    for label, run in zip(labels, runs, strict=True):
        for each in of_run(run):
            # −1 stands for the averaged model.
            named = [run.peer_name(each.peer) if each.peer >= 0 else "average"] if "peer" in names else []
            accuracy = [each.accuracy] if record is EvaluationRecord else []
            rows.append([label, *named, *(getattr(each, name) for name in names), *accuracy])
    return heads, rows


def _write_csv(heads: Sequence[str], rows: Sequence[Sequence[Any]], output: Path) -> None:
    with replacing(output) as beside, open(beside, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows([[_cell(value) for value in row] for row in rows])


def _cell(value: Any) -> Any:
    """Return a value as a cell of CSV. A spreadsheet would compute a text that begins like a formula."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return json.dumps(value) if isinstance(value, tuple | dict) else value


def _write_parquet(heads: Sequence[str], rows: Sequence[Sequence[Any]], output: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        problem = "Parquet needs pyarrow: pip install 'sottovoce[parquet]', or write .csv"
        raise ConfigError(problem, file=str(output)) from None
    # Metrics of tasks have names of their own: a column of JSON text, as in the files that they come from.
    cells = [[json.dumps(value) if isinstance(value, dict) else value for value in row] for row in rows]
    columns = {head: pyarrow.array([row[number] for row in cells]) for number, head in enumerate(heads)}
    with replacing(output) as beside:
        pyarrow.parquet.write_table(pyarrow.table(columns), beside)
