"""The content of a run folder, read for the report; missing or unreadable files are noted, not fatal.

Layout of a run folder: config.toml, summary.json, metrics.sqlite (a simulation, or figures over all peers),
peers/peer-K/state/metrics.sqlite, model.safetensors, graph.svg. In a cluster folder the peers are in peer-K, their
collected metrics in collected/peer-K.sqlite, and the configuration is that of a peer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from peer.config.options import load
from peer.config.writer import render
from peer.errors import ConfigError, StateError
from peer.files import instead_of
from peer.foreign_values import parse_toml
from peer.records import RoundRecord
from peer.state.metrics import ConsensusRecord, EvaluationRecord, LinkRecord, MetricsStore, Summary, measured

Item = TypeVar("Item")


@dataclass
class RunData:
    """The content of a run folder."""

    directory: Path
    summary: Summary | None = None
    config: str | None = None
    """Text of config.toml."""
    graph_svg: bytes | None = None
    rounds: list[RoundRecord] = field(default_factory=list)
    """Rows by round and peer."""
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    links: list[LinkRecord] = field(default_factory=list)
    consensus: list[ConsensusRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences about files that are missing or could not be read."""
    unreadable: list[str] = field(default_factory=list)
    """Metrics files that are there and could not be read, and why."""

    @property
    def name(self) -> str:
        return self.summary.name if self.summary is not None else self.directory.resolve().name

    @property
    def peers(self) -> list[int]:
        """Indices of the peers that have figures, ascending."""
        known = {record.peer for record in self.rounds} | {e.peer for e in self.evaluations if e.peer >= 0}
        return sorted(known)

    def peer_name(self, peer: int) -> str:
        """Return the name of a peer as the configuration gives it; the same before there is a summary as after."""
        names = self.summary.peer_names if self.summary is not None else self._configured_names
        return names[peer] if peer < len(names) else f"peer-{peer}"

    @cached_property
    def _configured_names(self) -> list[str]:
        try:
            peers = parse_toml(self.config or "").get("peers", [])
            return [str(peer["name"]) for peer in peers]
        except (ValueError, KeyError, TypeError):
            return []  # Somebody is writing it, or has changed it.

    def rounds_of(self, peer: int) -> list[RoundRecord]:
        """Return the rows of one peer, by round."""
        return self._by_peer.get(peer, [])

    @cached_property
    def _by_peer(self) -> dict[int, list[RoundRecord]]:
        return grouped((record.peer, record) for record in self.rounds)


def load_run(directory: Path) -> RunData:
    """Return the content of a run folder or a cluster folder. Raises StateError if it has neither summary nor metrics,
    or metrics of which none can be read."""
    if not directory.is_dir():
        raise StateError(f"{directory}: no such folder; `sotto up` and `simulate` make them{instead_of(directory)}")
    data = read_frame(directory)
    svg = directory / "graph.svg"
    if svg.exists():
        data.graph_svg = svg.read_bytes()
    found = _read_metrics(data)
    if data.summary is None and not found:
        raise StateError(f"{directory}: is not a run folder: it contains neither summary.json nor metrics")
    return data


def read_frame(directory: Path) -> RunData:
    """Return the content of a folder without its figures: summary and configuration, where present."""
    data = RunData(directory)
    _read_summary(data)
    data.config = _read_text(data, "config.toml") or _config_of_a_peer(data)
    return data


def metrics_files(directory: Path) -> list[Path]:
    """Return the metrics files of a run, or of a cluster. The later of two with rows of one peer counts."""
    # Files copied back count before collected ones, which may be older.
    kinds = ("collected/peer-*.sqlite", "peer-*/state/metrics.sqlite", "peers/peer-*/state/metrics.sqlite")
    files = [directory / "metrics.sqlite", *(file for kind in kinds for file in sorted(directory.glob(kind)))]
    return [file for file in files if file.exists()]


def _read_summary(data: RunData) -> None:
    file = data.directory / "summary.json"
    try:
        data.summary = Summary.load(file)
        data.notes += data.summary.missing
    except FileNotFoundError:
        data.notes.append("There is no summary.json: the run is still going on, or was cut off.")
    except (OSError, StateError) as error:
        data.notes.append(f"summary.json cannot be read: {_reason(error)}.")


def _read_text(data: RunData, name: str) -> str | None:
    try:
        return (data.directory / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        data.notes.append(f"{name} cannot be read: {_reason(error)}.")
        return None


def _read_metrics(data: RunData) -> bool:
    """Read every metrics file of the run; return whether there was one. Raises StateError if none can be read."""
    files = metrics_files(data.directory)
    rounds: dict[tuple[Any, ...], RoundRecord] = {}
    tables: list[tuple[Sequence[RoundRecord], Sequence[EvaluationRecord]]] = []
    links: dict[tuple[Any, ...], LinkRecord] = {}
    consensus: dict[int, ConsensusRecord] = {}
    for file in files:
        try:
            with closing(MetricsStore(file, read_only=True)) as store:
                tables.append((store.rounds(), store.evaluations()))
                rounds |= {(row.round, row.peer): row for row in tables[-1][0]}
                links |= {(row.peer, row.neighbor): row for row in store.links()}
                consensus |= {row.round: row for row in store.consensus()}
        except sqlite3.Error as error:
            reason = _reason(error) + _advice(file, error)
            data.unreadable.append(f"{file.relative_to(data.directory)} cannot be read: {reason}")
    if files and len(data.unreadable) == len(files):
        raise StateError(f"{data.directory}: {'; '.join(data.unreadable)}")
    data.notes += [f"{each}." for each in data.unreadable]
    data.rounds = _sorted_values(rounds)
    data.evaluations = _sorted_values({(row.round, row.peer, row.split): row for row in measured(tables)})
    data.links = _sorted_values(links)
    data.consensus = _sorted_values(consensus)
    return bool(files)


def _config_of_a_peer(data: RunData) -> str | None:
    first = next(iter(sorted(data.directory.glob("peer-*/peer.toml"))), None)
    if first is None:
        return None
    try:
        # A short file leaves out what a page shows, and compares with other runs.
        return render(load(first, environment={}), header="")
    except ConfigError:
        return _read_text(data, str(first.relative_to(data.directory)))


def _sorted_values(rows: dict[Any, Any]) -> list[Any]:
    return [rows[key] for key in sorted(rows)]


def _advice(file: Path, error: sqlite3.Error) -> str:
    """Return the advice where SQLite may not write beside a file whose process was killed."""
    refused = getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))
    beside = file.with_name(f"{file.name}-wal")
    if not refused or not beside.exists() or not beside.stat().st_size:
        return ""
    return f"; its last rows are in {beside.name}, which SQLite reads only where it may write: copy the folder there"


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean of at least one number."""
    return sum(values) / len(values)


def grouped(pairs: Iterable[tuple[int, Item]]) -> dict[int, list[Item]]:
    """Return number → what comes with it, in order."""
    found: dict[int, list[Item]] = {}
    for number, item in pairs:
        found.setdefault(number, []).append(item)
    return found
