"""Reads new rows in the metrics of a run, and hands them to trackers."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import time

from peer.errors import StateError
from peer.records import RoundRecord
from peer.report.comparison import settings
from peer.report.run_data import RunData, metrics_files, read_frame
from peer.state.metrics import ConsensusRecord, EvaluationRecord, MetricsStore, Record

MOST_PEERS = 32
"""Most peers whose figures are handed over: no tracker is of use with thousands of curves."""

_FIGURES = (
    "loss", "rate", "payload_bytes", "frame_bytes", "train_s", "gossip_s", "wait_s", "late", "repairs", "push_weight",
    "error_norm", "replica_error", "neighbor_distance", "theta", "fraction", "bits", "staleness",
)  # fmt: skip
"""Fields of RoundRecord that are handed over."""


@dataclass(frozen=True)
class Point:
    """Figures of one peer, or of the averaged model, after some rounds."""

    whose: str
    done: int
    at: float
    """Unix seconds."""
    figures: Mapping[str, float]


class Follower:
    """The figures of a folder, read piece by piece."""

    def __init__(self, directory: Path, *, every: int = 1) -> None:
        """`every`: of the rounds, only those whose number is a multiple are handed over."""
        self.directory, self._every = directory, every
        self._stores: dict[Path, MetricsStore] = {}
        self._places: dict[tuple[Path, type], int] = {}
        """File and kind of row → how far it was read."""
        self._handed: dict[int, int] = {}
        """Peer → last round that was handed over."""
        self._own: dict[Path, set[int]] = {}
        """File → the peers whose rounds are in it."""
        self._evaluated: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        """Peer → time of its last round."""
        self._began = time()

    @property
    def has_begun(self) -> bool:
        """Whether there is a metrics file yet."""
        return bool(metrics_files(self.directory))

    def describe(self) -> tuple[str, dict[str, str]]:
        """Return the name of the run, and how it is configured. Raises StateError if the folder is none."""
        frame = read_frame(self.directory)
        return frame.name, settings(frame)

    def new(self) -> Iterator[Point]:
        """Yield the rows since the last call, file by file, by round."""
        frame = read_frame(self.directory)
        if frame.summary is not None and frame.summary.started_at:
            self._began = datetime.fromisoformat(frame.summary.started_at).timestamp()
        for file in metrics_files(self.directory):
            try:
                store = self._stores.setdefault(file, MetricsStore(file, read_only=True))
                yield from self._new_in(file, store, frame)
            except sqlite3.OperationalError:
                continue  # It is being made, or written to: the next look finds it.
            except sqlite3.Error as error:
                raise StateError(f"{file}: cannot be read: {error}") from None

    def close(self) -> None:
        """Close the files."""
        for store in self._stores.values():
            store.close()

    def _new_in(self, file: Path, store: MetricsStore, frame: RunData) -> Iterator[Point]:
        for record in self._written(file, store, RoundRecord):
            # A peer that went back to a checkpoint repeats its rounds.
            self._own.setdefault(file, set()).add(record.peer)
            if record.peer < MOST_PEERS and record.round > self._handed.get(record.peer, -1):
                self._handed[record.peer] = record.round
                self._seconds[record.peer] = record.time_s
                if (record.round + 1) % self._every == 0:
                    yield self._point(frame, record.peer, record.round + 1, _of_round(record))
        for evaluation in self._written(file, store, EvaluationRecord):
            peer = evaluation.peer
            # A peer writes what others told it of theirs as well, which their own files say better.
            is_own = peer < 0 or (peer < MOST_PEERS and peer in self._own.get(file, ()))
            is_new = evaluation.round > self._evaluated.get(peer, -1)
            if evaluation.split == "test" and is_own and is_new:
                self._evaluated[peer] = evaluation.round
                yield self._point(frame, peer, evaluation.round, _of_evaluation(evaluation))
        for distance in self._written(file, store, ConsensusRecord):
            figures = {"consensus_distance": distance.consensus_distance, "model_norm": distance.model_norm}
            yield Point("all", distance.round, self._at(-1), figures)

    def _written(self, file: Path, store: MetricsStore, kind: type[Record]) -> list[Record]:
        rows, self._places[file, kind] = store.written(kind, after=self._places.get((file, kind), 0))
        return rows

    def _point(self, frame: RunData, peer: int, done: int, figures: Mapping[str, float]) -> Point:
        whose = frame.peer_name(peer) if peer >= 0 else "average"
        return Point(whose, done, self._at(peer), {k: v for k, v in figures.items() if math.isfinite(v)})

    def _at(self, peer: int) -> float:
        return self._began + self._seconds.get(peer, max(self._seconds.values(), default=0.0))


def _of_round(record: RoundRecord) -> dict[str, float]:
    values = ((name, getattr(record, name)) for name in _FIGURES)
    return {name: float(value) for name, value in values if value is not None}


def _of_evaluation(record: EvaluationRecord) -> dict[str, float]:
    figures = {"accuracy": record.accuracy, "test_loss": record.loss}
    # A task with metrics of its own may count no samples.
    return {name: value for name, value in figures.items() if value is not None} | dict(record.metrics)
