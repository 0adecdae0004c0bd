"""How well the peers do: the own model is measured now and then, and accuracies spread from neighbour to neighbour.

Every peer so knows the newest accuracy of every other, and in the end that all have come to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from peer.compress.payload import FloatArray
from peer.config import EvaluationOptions
from peer.errors import RemoteProtocolError
from peer.node.evaluation_cadence import is_evaluated, is_shared
from peer.run_summary import evaluation_record
from peer.state.disk import writing
from peer.state.metrics import EvaluationRecord
from peer.train.local_step import Evaluation, Split

TOPIC = "evaluation"
"""Of the notes that carry an `EvaluationRecord`."""

_MOST_CLASSES = 1000
_MOST_SAMPLES = 1 << 53
"""More than any test set has; sums of so many classes stay integers that JSON, SQLite and floats can hold."""


class Models(NamedTuple):
    """What a peer has to show: good until it goes on training."""

    z: FloatArray
    """The model that it evaluates and saves."""
    x: FloatArray
    """What it mixes; z = x / u."""
    u: float


class Evaluator(Protocol):
    """Whoever can measure a model (`train.local_step.Trainer`)."""

    def evaluate(self, z: FloatArray, split: Split = "test") -> Evaluation: ...


class OwnEvaluation:
    """Measures the model of this peer."""

    def __init__(self, peer: int, evaluator: Evaluator, splits: Sequence[Split], keep_in: Path | None) -> None:
        """`keep_in`: where models are left for `sotto up`, which measures how far those of all peers are apart."""
        self.splits = tuple(splits)
        self._peer, self._evaluator, self._keep_in = peer, evaluator, keep_in

    def measure(self, done: int, models: Models) -> list[EvaluationRecord]:
        """Return the accuracy on each split after `done` rounds, and leave (x, u) where it is looked for.
        Raises StateError if the disk refuses."""
        records = [self.measure_split(done, models.z, split) for split in self.splits]
        if self._keep_in is not None:
            with writing(f"{self._keep_in.name}/{done}.npy"):
                self._keep_in.mkdir(exist_ok=True)
                beside = self._keep_in / f".{done}.npy"
                with open(beside, "wb") as file:
                    np.save(file, np.append(models.x.astype(np.float64), models.u))
                beside.rename(self._keep_in / f"{done}.npy")
        return records

    def measure_split(self, done: int, z: FloatArray, split: Split) -> EvaluationRecord:
        """Return the accuracy on one split after `done` rounds."""
        return evaluation_record(self._peer, done, split, self._evaluator.evaluate(z, split))


class Evaluations:
    """The newest accuracy of every peer, as far as this one has heard."""

    def __init__(
        self,
        peer: int,
        options: EvaluationOptions,
        rounds: int,
        *,
        peers: Container[int],
        broadcast: Callable[[str, bytes, int | None], None],
        on_news: Callable[[], None],
    ) -> None:
        """`rounds`: how many the run has. `peers`: of whom something may be said. `broadcast(topic, note, besides)`
        tells the neighbours; `on_news` is called after each evaluation that was not known."""
        self.newest: dict[tuple[int, str], EvaluationRecord] = {}
        """(peer, split) → newest known evaluation."""
        self._peer, self._options, self._rounds = peer, options, rounds
        self._peers, self._broadcast, self._on_news = peers, broadcast, on_news

    def is_due(self, done: int) -> bool:
        """Return whether peers measure their models after `done` rounds."""
        return is_evaluated(self._options, done, self._rounds)

    def is_shared(self, done: int) -> bool:
        """Return whether all peers are to know what is measured after `done` rounds."""
        return is_shared(self._options, done, self._rounds)

    def restore(self, records: Iterable[EvaluationRecord]) -> None:
        """Know again what was known before a restart: others may have left by the time that anybody asks them."""
        for record in records:
            self.newest[record.peer, record.split] = record

    def share(self, records: Iterable[EvaluationRecord]) -> None:
        """Tell the neighbours what was measured here, if all peers are to know it."""
        for record in records:
            if self.is_shared(record.round):
                self._learn(record, None)

    def heard(self, source: int, note: bytes) -> None:
        """Judge a note of a neighbour, and pass it on if it is news. Raises RemoteProtocolError for what is none."""
        record = parse_evaluation(note, self._peers, self._rounds)
        # What this peer measured it knows best: whatever comes back of it is old, or made up.
        if record.peer != self._peer:
            self._learn(record, source)

    def _learn(self, record: EvaluationRecord, source: int | None) -> None:
        known = self.newest.get((record.peer, record.split))
        if known is not None and known.round >= record.round:
            return
        self.newest[record.peer, record.split] = record
        self._broadcast(TOPIC, evaluation_note(record), source)
        self._on_news()

    def notes(self) -> list[bytes]:
        """Return what a neighbour that was away should hear."""
        return [evaluation_note(record) for record in self.newest.values()]

    def own(self) -> EvaluationRecord | None:
        """Return the newest evaluation of this peer on the common test set."""
        return self.newest.get((self._peer, "test"))

    def worst(self) -> EvaluationRecord | None:
        """Return the lowest newest accuracy on the common test set."""
        tested = (record for (_, split), record in self.newest.items() if split == "test")
        return min(tested, key=lambda record: record.accuracy, default=None)

    def finished(self) -> set[int]:
        """Return whose evaluation after the last round is known."""
        return {
            peer for (peer, split), record in self.newest.items() if split == "test" and record.round == self._rounds
        }


def evaluation_note(record: EvaluationRecord) -> bytes:
    """Return an evaluation as peers tell it to each other; of very many classes only the sum."""
    correct, total = record.correct, record.total
    if len(correct) > _MOST_CLASSES:
        correct, total = (sum(correct),), (sum(total),)
    return json.dumps([record.peer, record.round, record.split, correct, total], separators=(",", ":")).encode()


def parse_evaluation(note: bytes, peers: Container[int], rounds: int) -> EvaluationRecord:
    """Return what `evaluation_note` made, for one of these peers in a run of so many rounds. Raises
    RemoteProtocolError for anything else, whatever it is."""
    try:
        peer, round_, split, correct, total = json.loads(note)
        pairs = list(zip(correct, total, strict=True))
    except (ValueError, TypeError, RecursionError):
        raise RemoteProtocolError("told of an evaluation in another form") from None
    if not (isinstance(peer, int) and peer in peers and isinstance(split, str) and split in ("test", "holdout")):
        raise RemoteProtocolError("told of an evaluation of nobody, or on no split")
    if not (isinstance(round_, int) and 0 <= round_ <= rounds):
        raise RemoteProtocolError("told of an evaluation in no round of this run")
    are_counts = all(isinstance(c, int) and isinstance(n, int) and 0 <= c <= n <= _MOST_SAMPLES for c, n in pairs)
    if len(pairs) > _MOST_CLASSES or not are_counts:
        raise RemoteProtocolError("told of an evaluation whose counts are none")
    return EvaluationRecord(
        peer=peer, round=round_, split=split, correct=tuple(c for c, _ in pairs), total=tuple(n for _, n in pairs)
    )
