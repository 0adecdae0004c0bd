"""The known figures of a run, read from metrics piece by piece.

Rows come from files on this machine, or from peers that were asked for them. Memory grows with peers, not with rounds.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peer.foreign_text import printable
from peer.records import ACCURACY, Criterion, RoundRecord
from peer.report.run_data import metrics_files
from peer.state.metrics import ConsensusRecord, EvaluationRecord, MetricsStore
from peer.watch.history import History

MOST_METRICS = 8
"""Most figures of one task that are kept: more have no room on a page."""

_ROUND = ("peer", "round", "time_s", "loss", "payload_bytes", "frame_bytes", "wait_s")
_CHUNK = 20_000
"""Rows read at once."""
_WINDOW = 20
"""Rounds whose mean is the rate of a peer."""


@dataclass
class Latest:
    """The latest figures of one peer."""

    round: int = -1
    loss: float | None = None
    payload_bytes: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    """Figures of its last evaluation, by name."""
    evaluated: int = -1
    window: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """(time, frame bytes, waiting time) of its last rounds."""

    def rate(self) -> float | None:
        """Return frame bytes per second of its last rounds."""
        span = self._span()
        return None if span is None else sum(size for _, size, _ in list(self.window)[1:]) / span

    def wait_share(self) -> float | None:
        """Return the fraction of its last rounds spent waiting."""
        span = self._span()
        return None if span is None else min(1.0, sum(wait for *_, wait in list(self.window)[1:]) / span)

    def _span(self) -> float | None:
        span = self.window[-1][0] - self.window[0][0] if len(self.window) > 1 else 0.0
        return span if span > 0 else None


class Figures:
    """Takes rows, and knows the curves and the latest figures of all peers."""

    def __init__(self) -> None:
        self.loss = History()
        self.curves: dict[str, History] = {}
        """Figure name → curves of the peers."""
        self.averages: dict[str, History] = {}
        """The same for the averaged model, as peer 0."""
        self.latest: dict[int, Latest] = {}
        self.average = Latest()
        self.consensus_distance: float | None = None

    def of(self, peer: int) -> Latest:
        """Return what is newest of a peer, of which there may be nothing."""
        return self.latest.get(peer, Latest())

    def put_rounds(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Take rows of rounds: peer, round, time, loss, payload bytes, frame bytes, waiting time."""
        for peer, round_, time_s, loss, payload, frame, wait in rows:
            latest = self.latest.setdefault(peer, Latest())
            if round_ <= latest.round:
                # It was put back to a checkpoint, and repeats these rounds.
                latest.window.clear()
            latest.round = round_
            latest.loss = latest.loss if loss is None else loss
            latest.payload_bytes += payload
            latest.window.append((time_s, frame, wait))
        if rows:
            table = np.array([(row[0], row[1], row[3]) for row in rows], dtype=np.float64)
            self.loss.put(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2])

    def put_evaluations(self, records: Iterable[EvaluationRecord]) -> None:
        """Take evaluations on the common test set; peer −1 is the averaged model."""
        for record in records:
            if record.split != "test":
                continue
            figures = {printable(name): value for name, value in list(record.metrics.items())[:MOST_METRICS]}
            if record.accuracy is not None:
                figures[ACCURACY.name] = record.accuracy
            is_average = record.peer < 0
            latest = self.average if is_average else self.latest.setdefault(record.peer, Latest())
            latest.figures, latest.evaluated = figures, record.round
            for name, value in figures.items():
                curves = (self.averages if is_average else self.curves).setdefault(name, History())
                peer = np.array([max(0, record.peer)])
                curves.put(peer, np.array([record.round]), np.array([value], dtype=np.float64))


class MetricsFiles:
    """Reads new rows of the metrics files in a folder."""

    def __init__(self, directory: Path, figures: Figures) -> None:
        self._directory, self._figures = directory, figures
        self._places: dict[tuple[Path, type], int] = {}
        self._own: dict[Path, set[int]] = {}
        """File → the peers whose rounds are in it."""

    def read(self) -> None:
        """Take the rows written since the last call. No file stays open: its writer could not tidy up behind itself."""
        for file in metrics_files(self._directory):
            # An unfinished or damaged file is left out: a report says more.
            with contextlib.suppress(sqlite3.Error), closing(MetricsStore(file, read_only=True)) as store:
                self._read(file, store)

    def _read(self, file: Path, store: MetricsStore) -> None:
        own = self._own.setdefault(file, set())
        while rows := self._new(file, store, RoundRecord, _ROUND):
            own.update(row[0] for row in rows)
            # If two files have rounds of one peer, the rows read first count: a copy has nothing new.
            known = {peer: self._figures.of(peer).round for peer in own if self._is_in_another(file, peer)}
            self._figures.put_rounds([row for row in rows if row[1] > known.get(row[0], -1)])
        columns = ("peer", "round", "split", "correct", "total", "loss", "metrics")
        while rows := self._new(file, store, EvaluationRecord, columns):
            # A peer also writes evaluations that others told it; their own files say more.
            self._figures.put_evaluations(
                EvaluationRecord(**dict(zip(columns, row, strict=True)))
                for row in rows
                if row[0] < 0 or row[0] in own or self._figures.of(row[0]).round < 0
            )
        while rows := self._new(file, store, ConsensusRecord, ("consensus_distance",)):
            self._figures.consensus_distance = rows[-1][0]

    def _is_in_another(self, file: Path, peer: int) -> bool:
        return any(peer in peers for other, peers in self._own.items() if other != file)

    def _new(self, file: Path, store: MetricsStore, kind: type[Any], columns: Sequence[str]) -> list[tuple[Any, ...]]:
        place = self._places.get((file, kind), 0)
        rows, self._places[file, kind] = store.tail(kind, columns, after=place, most=_CHUNK)
        return rows


def compared_by(figures: Figures, criteria: Sequence[Criterion]) -> Criterion | None:
    """Return the figure that compares models: the first criterion that was told. None while the better direction of the
    task's own metrics is unknown."""
    if criteria:
        return next((each for each in criteria if each.name in figures.curves), criteria[0])
    return ACCURACY if ACCURACY.name in figures.curves or not figures.curves else None
