"""The figures of a run: a peer's records, their storage, and the summary that `report/` reads.

Each peer writes `metrics.sqlite` in its state folder; a simulation writes one file with the rows of all its peers.
Rows are keyed (peer, round) and replaced, never appended: a peer that goes back to a checkpoint after a crash and
repeats rounds must not count them twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from peer.errors import RemoteProtocolError, StateError
from peer.files import open_own, write_whole
from peer.foreign_values import parse_json
from peer.records import ACCURACY, Better, Criterion, RoundRecord
from peer.state.disk import cannot_be_written, writing
from peer.state.foreign_files import read_as


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """Accuracy of one model after one round; `peer` −1 is the averaged model."""

    peer: int
    round: int
    split: str
    """"test" (common) or "holdout" (the peer's own)."""
    correct: tuple[int, ...]
    """For each class; one entry where the task has no classes."""
    total: tuple[int, ...]
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The task's own, by name."""

    @property
    def accuracy(self) -> float | None:
        """Fraction in [0, 1]; None where no sample was judged, as in a training script that measures nothing."""
        samples = sum(self.total)
        return sum(self.correct) / samples if samples else None

    def figure(self, criterion: Criterion) -> float | None:
        """Return the accuracy or metric of that name; None if it is not known."""
        return self.accuracy if criterion == ACCURACY else self.metrics.get(criterion.name)

    def compared_by(self, criteria: Sequence[Criterion]) -> Criterion:
        """Return the first criterion of which it has a figure; the first of all where it has none."""
        return next((each for each in criteria if self.figure(each) is not None), criteria[0])


def measured(
    files: Sequence[tuple[Sequence[RoundRecord], Sequence[EvaluationRecord]]],
) -> list[EvaluationRecord]:
    """Return the evaluations in the (rounds, evaluations) of several files. A peer also writes figures that others told
    it: those count only where no file has rounds of those others."""
    has_file = {record.peer for rounds, _ in files for record in rounds}
    found = []
    for rounds, evaluations in files:
        own = {-1, *(record.peer for record in rounds)}
        found += [record for record in evaluations if record.peer in own or record.peer not in has_file]
    return found


@dataclass(frozen=True, kw_only=True)
class LinkRecord:
    """Totals of one directed link since the run began, as its sender counted them."""

    peer: int
    neighbor: int
    frames: int = 0
    payload_bytes: int = 0
    frame_bytes: int = 0
    protobuf_bytes: int = 0
    socket_bytes: int | None = None
    """TCP payload as the kernel counted it for the connection (TLS and HTTP/2 included, retransmissions too)."""
    packet_bytes: int | None = None
    """`socket_bytes` plus 40 bytes of IP and TCP header for every segment sent."""
    reconnects: int = 0
    resent_frames: int = 0
    offences: int = 0
    """Times that the neighbour broke the protocol."""
    last_offence: str | None = None
    """Sentence about the last of them."""
    up: bool = False
    """Whether there was a connection when this was written."""


@dataclass(frozen=True, kw_only=True)
class LinkRoundRecord:
    """Traffic of one directed link in one round, as its sender counted it.

    Frames are counted in their own round, protobuf and socket bytes when they leave: those of a frame that waits in a
    socket go to a later round.
    """

    peer: int
    neighbor: int
    round: int
    values: int = 0
    """Parameters described by the messages."""
    payload_bytes: int = 0
    entropy_bits: float = 0.0
    """Lower bound of the payload, in bits; 0 in the rounds in which it was not taken."""
    frame_bytes: int = 0
    protobuf_bytes: int = 0
    socket_bytes: int | None = None
    """TCP payload as the kernel counted it; None if it cannot be asked."""


@dataclass(frozen=True, kw_only=True)
class ConsensusRecord:
    """Figures over all models of a run after one round."""

    round: int
    consensus_distance: float
    """(1/n) Σ ‖z_i − z̄‖₂."""
    model_norm: float
    """‖z̄‖₂."""


@dataclass(kw_only=True)
class Summary:
    """Content of the table at the end of a run (`summary.json` of a run folder)."""

    name: str
    algorithm: str
    compressor: str
    graph: str
    num_peers: int
    rounds: int
    seed: int
    parameters: int
    seconds: float
    """Seconds from the command to its last figure, on the clock of this machine; the one process on all data left
    out."""
    started_at: str = ""
    """Beginning of the run: ISO 8601, UTC."""
    commands: list[str] = field(default_factory=list)
    """Command lines that started it, and resumed it."""
    collected_at: str = ""
    """Time at which the figures of a cluster were collected: ISO 8601, UTC; empty for a run on one machine."""
    missing: list[str] = field(default_factory=list)
    """Sentences about figures of a cluster that are not here."""
    peer_states: dict[str, str] = field(default_factory=dict)
    """In a cluster, name of a peer → its state when it was asked, or its fate."""
    simulated: bool = False
    """Whether the times of rounds are virtual."""
    peer_names: list[str] = field(default_factory=list)
    criteria: dict[str, Better] = field(default_factory=lambda: {ACCURACY.name: ACCURACY.better})
    """Figures that measure models, and which values are better. Models are compared by the first."""
    peer_accuracy: list[float] = field(default_factory=list)
    """Accuracy of each peer's de-biased model on the common test set, fractions; empty if a task has its own
    metrics, or nobody measured any."""
    peer_metrics: dict[str, list[float]] = field(default_factory=dict)
    """The same for the task's own metrics, by name."""
    is_sample: bool = False
    """Whether these figures are of an evenly spread sample of the peers, because there are too many to evaluate."""
    members: list[int] = field(default_factory=list)
    """Numbers of the peers with these accuracies, if not all that ever took part were there in the end, or measured."""
    epsilon: float | None = None
    """ε that the private local steps of the peer with the fewest samples spent; None if they were not private, or the
    figures are those of a cluster."""
    averaged_accuracy: float | None = None
    averaged_metrics: dict[str, float] = field(default_factory=dict)
    precision: str = "float32"
    """Precision in which the peers trained: float32, bfloat16 or int8. If devices chose differently, or their choice is
    not known here, the configured value."""
    chosen_precisions: dict[str, dict[str, object]] = field(default_factory=dict)
    """If each device chooses, name of a peer, or `precision_choice.ALL_PEERS` → `PrecisionChoice.document`."""
    single_process_accuracy: float | None = None
    """Accuracy of one process trained in full precision on all data with the same schedule."""
    single_process_metrics: dict[str, float] = field(default_factory=dict)
    class_accuracy: list[float | None] = field(default_factory=list)
    """Accuracy of the worst peer for each class; None for a class without test samples."""
    holdout_accuracy: list[float] = field(default_factory=list)
    """Accuracy of each peer's model on its own hold-out split, fractions; empty without hold-outs."""
    holdout_metrics: dict[str, list[float]] = field(default_factory=dict)
    consensus_distance: float | None = None
    rounds_to_consensus: int | None = None
    """Rounds of full-precision gossip that would bring that distance below 0.1 % of the model's norm (SCSP's rule)."""
    payload_bytes: int = 0
    """Payload bytes of all peers in the whole run."""
    frame_bytes: int = 0
    protobuf_bytes: int = 0
    socket_bytes: int | None = None
    packet_bytes: int | None = None
    full_precision_payload_bytes: int = 0
    """The same messages as float32 vectors: 4 bytes a parameter."""
    bits_per_parameter: float | None = None
    """Payload bits for each parameter of each message; None before the first."""
    entropy_bits_per_parameter: float | None = None
    repairs: int = 0
    reconnects: int = 0
    exchanges: int = 0
    """Asynchronous algorithms: exchanges of all pairs."""
    staleness: float | None = None
    """Asynchronous algorithms: exchanges between reading the model and applying the gradient, mean of all steps."""
    most_staleness: float | None = None
    """The most for one step."""
    completed_rounds: int = 0
    """Rounds of the peer that completed most."""
    training_seconds: float = 0.0
    """Time of the last round of any peer on the clock of the curves, which begins when the peers have started."""
    seconds_per_round: float = 0.0
    """Seconds per round on the same clock."""
    ended: str = "completed"
    """completed, stopped, diverged: reason, …"""
    version: str = ""
    machine: dict[str, str] = field(default_factory=dict)
    """Processor, torch and Python version, on which bit identity depends."""

    @property
    def worst_accuracy(self) -> float | None:
        return min(self.peer_accuracy) if self.peer_accuracy else None

    @property
    def criterion(self) -> Criterion:
        """The figure by which models are compared."""
        return next(iter(self.all_criteria))

    @property
    def all_criteria(self) -> list[Criterion]:
        return [Criterion(name, better) for name, better in self.criteria.items()]

    def margin(self, criterion: Criterion) -> float | None:
        """Return two standard errors of the mean of a sample, drawn without replacement: the mean of all peers is that
        close with a probability of about 95 %. None if the figures are no sample."""
        values = self.of_peers(criterion)
        if not self.is_sample or len(values) < 2:
            return None
        left_out = 1.0 - len(values) / self.num_peers
        return 2.0 * statistics.stdev(values) * math.sqrt(left_out / len(values))

    def of_peers(self, criterion: Criterion) -> list[float]:
        """Return the figure of each peer's model, as `peer_accuracy`."""
        return self.peer_accuracy if criterion == ACCURACY else self.peer_metrics.get(criterion.name, [])

    def of_holdouts(self, criterion: Criterion) -> list[float]:
        """Return the figure of each peer's model on its hold-out, as `holdout_accuracy`."""
        return self.holdout_accuracy if criterion == ACCURACY else self.holdout_metrics.get(criterion.name, [])

    def worst(self, criterion: Criterion) -> float | None:
        """Return the figure of the worst peer's model."""
        figures = self.of_peers(criterion)
        return criterion.worst(figures) if figures else None

    def mean(self, criterion: Criterion) -> float | None:
        """Return the mean of the peers' figures. It is the figure of no model, nor of all samples together: it stands
        in where nobody could judge the averaged model."""
        figures = self.of_peers(criterion)
        return statistics.fmean(figures) if figures else None

    def averaged(self, criterion: Criterion) -> float | None:
        """Return the figure of the averaged model."""
        return self.averaged_accuracy if criterion == ACCURACY else self.averaged_metrics.get(criterion.name)

    def single_process(self, criterion: Criterion) -> float | None:
        """Return the figure of one process trained on all data."""
        if criterion == ACCURACY:
            return self.single_process_accuracy
        return self.single_process_metrics.get(criterion.name)

    def document(self) -> dict[str, Any]:
        """Return the JSON document of `save`."""
        own = [criterion for criterion in self.all_criteria if criterion != ACCURACY]
        worst = {"worst_metrics": {criterion.name: self.worst(criterion) for criterion in own}}
        means = {"mean_of_devices": {criterion.name: self.mean(criterion) for criterion in self.all_criteria}}
        margins = {"margins": {criterion.name: self.margin(criterion) for criterion in self.all_criteria}}
        return asdict(self) | {"worst_accuracy": self.worst_accuracy} | worst | means | margins

    def continue_from(self, path: Path) -> None:
        """Take over the start time and commands of the run from the summary of its first part, if it can be read."""
        with contextlib.suppress(OSError, StateError):
            earlier = Summary.load(path)
            self.started_at, self.commands = earlier.started_at, [*earlier.commands, *self.commands]

    def save(self, path: Path) -> None:
        """Write as JSON. Raises StateError."""
        with writing(path.name):
            write_whole(path, json.dumps(self.document(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Summary:
        """Read a file of `save`. Raises as `read_as`."""
        return read_as(cls, path, infinite="kept")


Record = TypeVar("Record", RoundRecord, EvaluationRecord, ConsensusRecord)

_TABLES: dict[str, tuple[type, tuple[str, ...]]] = {
    "rounds": (RoundRecord, ("peer", "round")),
    "evaluations": (EvaluationRecord, ("peer", "round", "split")),
    "links": (LinkRecord, ("peer", "neighbor")),
    "link_rounds": (LinkRoundRecord, ("peer", "neighbor", "round")),
    "consensus": (ConsensusRecord, ("round",)),
}


_NAME_OF = {kind: table for table, (kind, _) in _TABLES.items()}


def _columns(kind: type[Any]) -> list[str]:
    return [item.name for item in fields(kind)]


def _quoted(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


_INSERTIONS = {
    kind: f"INSERT OR REPLACE INTO {table} ({_quoted(_columns(kind))}) VALUES ({', '.join('?' * len(fields(kind)))})"
    for kind, table in _NAME_OF.items()
}

PAGED = ("rounds", "evaluations", "links")
"""Tables that `MetricsStore.page` reads."""

_PAGE_CHARACTERS = 500_000
"""Characters after which a page ends with the next whole round."""


class MetricsStore:
    """The metrics file of one peer or one simulation. Writing is buffered; `flush` commits. Every method that writes
    raises StateError if the disk refuses, which may show only in a later call."""

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        """Open or create a file; None keeps everything in memory."""
        self._name = "metrics in memory" if path is None else path.name
        if path is None:
            self._connection = _create(":memory:")
            return
        if read_only:
            # A path may hold characters with a meaning in URIs: '#', '?', '%'.
            uri = f"{path.absolute().as_uri()}?mode=ro"
            self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            # A file of somebody else may compute endless apparent rows.
            others = "SELECT COUNT(*) FROM sqlite_master WHERE type NOT IN ('table', 'index')"
            if self._connection.execute(others).fetchone()[0]:
                self._connection.close()
                raise sqlite3.DataError("it holds more than tables")
            return
        with _writing(self._name):
            if not path.exists():
                # Others read the file as soon as it is there: it gets its name once its tables are in it.
                beside = path.with_name(f".{path.name}.new")
                beside.unlink(missing_ok=True)
                _create(beside).close()
                beside.rename(path)
            else:
                os.close(open_own(path, os.O_RDWR))
            self._connection = _create(path)

    def put(self, *records: RoundRecord | EvaluationRecord | LinkRecord | LinkRoundRecord | ConsensusRecord) -> None:
        """Insert or replace rows."""
        with _writing(self._name):
            for record in records:
                values = [json.dumps(v) if isinstance(v, tuple | dict) else v for v in vars(record).values()]
                self._connection.execute(_INSERTIONS[type(record)], values)

    def flush(self) -> None:
        """Make the rows visible to readers."""
        with _writing(self._name):
            self._connection.commit()

    def drop_after(self, round_: int) -> None:
        """Delete the rows of rounds above `round_`, and of evaluations after them."""
        # Rounds are counted from 0; an evaluation has the number of rounds before it.
        with _writing(self._name):
            for table, last in (("rounds", 0), ("link_rounds", 0), ("evaluations", 1), ("consensus", 1)):
                self._connection.execute(f"DELETE FROM {table} WHERE round > ?", (round_ + last,))
        self.flush()

    def rounds(self, *, after: int = -1) -> list[RoundRecord]:
        """Return the rows of rounds above `after`, by round and peer."""
        return self._read(RoundRecord, "WHERE round > ? ORDER BY round, peer", (after,))

    def evaluations(self) -> list[EvaluationRecord]:
        return self._read(EvaluationRecord, "ORDER BY round, peer, split")

    def links(self) -> list[LinkRecord]:
        return self._read(LinkRecord, "ORDER BY peer, neighbor")

    def consensus(self) -> list[ConsensusRecord]:
        return self._read(ConsensusRecord, "ORDER BY round")

    def written(self, kind: type[Record], *, after: int = 0) -> tuple[list[Record], int]:
        """Return the rows of one kind in the order in which they were written, and the place of the last of them.
        Passed as `after`, it selects the rows written since."""
        last = self._connection.execute(f"SELECT COALESCE(MAX(rowid), 0) FROM {_NAME_OF[kind]}").fetchone()[0]
        return self._read(kind, "WHERE rowid > ? AND rowid <= ? ORDER BY rowid", (after, last)), int(last)

    def tail(self, kind: type[Record], columns: Sequence[str], *, after: int, most: int) -> tuple[list[Any], int]:
        """Return some columns of at most `most` rows, as `written` orders them and records hold them, and the place of
        the last of these."""
        query = f"SELECT rowid, {_quoted(columns)} FROM {_NAME_OF[kind]} WHERE rowid > ? ORDER BY rowid LIMIT ?"
        rows = self._connection.execute(query, (after, most)).fetchall()
        found = [list(_values_of(kind, columns, row[1:]).values()) for row in rows]
        return found, rows[-1][0] if rows else after

    def page(self, table: str, *, after: int = -1) -> tuple[list[str], list[list[Any]], int | None]:
        """Return columns and rows of one of PAGED, of whole rounds above `after`, and the last of these rounds; None if
        no later ones are left. Evaluations on hold-outs, which reveal something of private data, are left out.
        """
        columns = _columns(_TABLES[table][0])
        names = _quoted(columns)
        if table == "links":
            return columns, [list(row) for row in self._connection.execute(f"SELECT {names} FROM links")], None
        only = "AND split = 'test' " if table == "evaluations" else ""
        query = f"SELECT {names} FROM {table} WHERE round > ? {only}ORDER BY round"
        rows: list[list[Any]] = []
        size, last = 0, after
        for row in self._connection.execute(query, (after,)):
            round_ = row[columns.index("round")]
            if size > _PAGE_CHARACTERS and round_ != last:
                return columns, rows, last
            rows.append(list(row))
            size, last = size + sum(len(str(value)) for value in row), round_
        return columns, rows, None

    def last_round(self, peer: int, table: str = "rounds") -> int:
        """Return the last round of a peer in a table; −1 if there is none."""
        (last,) = self._connection.execute(f"SELECT MAX(round) FROM {table} WHERE peer = ?", (peer,)).fetchone()
        return -1 if last is None else int(last)

    def last_figures(self, peer: int, criteria: Sequence[Criterion] | None = None) -> dict[str, Any]:
        """Return loss, accuracy, metrics and sent bytes of a peer as its answer to `sotto status` has them. `criteria`:
        those of its script; None for a task, which is judged by its first metric. Raises sqlite3.Error."""
        rows = "FROM rounds WHERE peer = ?"
        loss = self._connection.execute(f"SELECT loss {rows} AND loss NOT NULL ORDER BY round DESC LIMIT 1", (peer,))
        (payload,) = self._connection.execute(f"SELECT SUM(payload_bytes) {rows}", (peer,)).fetchone()
        own = "WHERE peer = ? AND split = 'test' ORDER BY round DESC LIMIT 1"
        tested = self._read(EvaluationRecord, own, (peer,))
        sockets = [link.socket_bytes for link in self.links() if link.peer == peer]
        metrics = dict(tested[0].metrics) if tested else {}
        criterion = next(iter(metrics), ACCURACY.name)
        if criteria and tested:
            criterion = tested[0].compared_by(criteria).name
        return {
            "loss": next((float(value) for (value,) in loss), None),
            "accuracy": tested[0].accuracy if tested else None,
            "metrics": metrics,
            "criterion": criterion,
            "payload_bytes": payload,
            "socket_bytes": None if not sockets or None in sockets else sum(size or 0 for size in sockets),
        }

    def close(self) -> None:
        """Commit and close."""
        try:
            self.flush()
            with contextlib.suppress(sqlite3.OperationalError):
                # Leave one plain file behind; impossible while others read, and for readers.
                self._connection.execute("PRAGMA journal_mode = DELETE")
        finally:
            self._connection.close()

    def _read(self, kind: type[Any], rest: str, arguments: Sequence[object] = ()) -> list[Any]:
        columns = _columns(kind)
        query = f"SELECT {_quoted(columns)} FROM {_NAME_OF[kind]} {rest}"
        return _records(kind, columns, self._connection.execute(query, arguments).fetchall())


def page_records(
    table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, peer: int, rounds: int
) -> list[RoundRecord | EvaluationRecord | LinkRecord]:
    """Return the records of a page from another peer's `MetricsStore.page`. Raises RemoteProtocolError for a page that
    peer `peer` cannot have in a run of so many rounds. Columns that this release does not know are left out, those that
    it misses have their default.
    """
    try:
        records = _records(_TABLES[table][0], columns, rows)
    except sqlite3.DataError as error:
        raise RemoteProtocolError(f"sent {table} that are no metrics: {error}") from None
    if table != "evaluations" and any(record.peer != peer for record in records):
        raise RemoteProtocolError(f"sent {table} of another peer")
    last = max((record.round for record in records if table != "links"), default=0)
    if last > rounds:
        raise RemoteProtocolError(f"sent {table} of round {last}, and the run has {rounds}")
    return records


def _records(kind: type[Any], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Return rows of a table as records. Raises sqlite3.DataError, with the reason, for values that no peer writes: a
    column takes any value."""
    try:
        return [kind(**_values_of(kind, columns, row)) for row in rows]
    except TypeError:
        raise sqlite3.DataError("columns are missing") from None


def _values_of(kind: type[Any], columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """Return the values of a row by column, those left out that this release does not know. Raises sqlite3.DataError
    as `_records`."""
    if len(row) != len(columns):
        raise sqlite3.DataError("rows too short")
    kinds = _FIELDS[kind]
    values = {name: value for name, value in zip(columns, row, strict=True) if name in kinds}
    for name, value in values.items():
        if value is None and kinds[name] is _FLOAT:
            values[name] = math.nan  # SQLite has none.
        elif not isinstance(value, kinds[name]):
            raise sqlite3.DataError(name)
        elif isinstance(value, int) and not (-1 if name == "peer" else 0) <= value < _MOST.get(name, 1 << 62):
            raise sqlite3.DataError(f"{name} {value}")
    for name in _JSON_COLUMNS & values.keys():
        values[name] = _parsed(name, values[name])
    if "correct" in values:
        _check_counts(values["correct"], values.get("total", ()))
    return values


@contextlib.contextmanager
def _writing(name: str) -> Iterator[None]:
    """Raise StateError, naming the file, if the disk refuses, or it is not a metrics file."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        raise cannot_be_written(name, error) from None
    except sqlite3.DatabaseError as error:
        raise StateError(f"{name}: {error}; move it away and start again: it holds figures only, no state") from None


def _create(path: Path | str) -> sqlite3.Connection:
    """Open a file for writing and make the tables that it lacks."""
    connection = sqlite3.connect(path, check_same_thread=False)
    # Metrics may lose the last moments before a power cut; they are rebuilt when the rounds are repeated.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    for table, (record, keys) in _TABLES.items():
        columns = _quoted(_columns(record))
        connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns}, PRIMARY KEY ({', '.join(keys)}))")
        # A file of an earlier version goes on with the columns that it lacked at their defaults.
        there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        for item in fields(record):
            if item.name not in there:
                default = "NULL" if item.default is MISSING or item.default is None else repr(item.default)
                connection.execute(f'ALTER TABLE {table} ADD COLUMN "{item.name}" DEFAULT {default}')
    return connection


_FLOAT = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "int | None": (int, NoneType),
    "float": _FLOAT,
    "float | None": (int, float, NoneType),
    "str": str,
    "str | None": (str, NoneType),
    "bool": int,
    "tuple[int, ...]": str,
    "Mapping[str, float]": (str, NoneType),
}
"""Type of a field, as in its annotation → type that SQLite may hold for it."""


_FIELDS = {kind: {item.name: _KINDS[str(item.type)] for item in fields(kind)} for kind, _ in _TABLES.values()}
_JSON_COLUMNS = {"correct", "total", "metrics"}
_MOST_SAMPLES = 1 << 53
_MOST = {"peer": 1 << 20, "neighbor": 1 << 20}
"""Bounds of peers' numbers: a drawing of a run has a row for each lower number."""


def _parsed(name: str, text: str | None) -> Any:
    """Return a field of a record from the value in its column. Raises sqlite3.DataError for an impossible value."""
    try:
        value = parse_json(text or "{}", infinite="kept")  # A file of an earlier release has no metrics.
    except ValueError as error:
        raise sqlite3.DataError(f"{name}: {error}") from None
    if name == "metrics":
        if not isinstance(value, dict) or not all(type(figure) in (int, float) for figure in value.values()):
            raise sqlite3.DataError("no figures by name")
        return value
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise sqlite3.DataError("no list of numbers")
    return tuple(value)


def _check_counts(correct: Sequence[int], total: Sequence[int]) -> None:
    """Raise sqlite3.DataError for impossible numbers of right answers."""
    if len(correct) != len(total) or not all(0 <= c <= n < _MOST_SAMPLES for c, n in zip(correct, total, strict=True)):
        raise sqlite3.DataError("counts of samples that are none")
