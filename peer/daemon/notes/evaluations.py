"""Evaluations: this peer's model is measured now and then, and accuracies spread from neighbour to neighbour.

Every peer thus knows the newest accuracy of every other, and in the end that all have finished. Where the run has
certificates, each peer signs its own accuracy, and only signed ones are passed on. They may still not be true: only the
display, and a peer's stay after its last round, depend on them. Without certificates, a neighbour that is connected
speaks for itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from peer.compress.payload import FloatArray
from peer.config.options import EvaluationOptions
from peer.daemon.notes import notes
from peer.foreign_values import parse_json
from peer.node.evaluation_cadence import is_evaluated, is_shared
from peer.node.statements import is_later
from peer.rate_limits import Allowances
from peer.records import ACCURACY, Criterion
from peer.run.setup import PeerTrainer
from peer.run.summary import evaluation_record
from peer.state.disk import writing
from peer.state.metrics import EvaluationRecord
from peer.train.local_step import Split

log = logging.getLogger("sotto")

_NEWS = {"rate": 1.0, "burst": 20.0}
"""Evaluations of one peer on one split that are looked at and passed on, by second."""


class Models(NamedTuple):
    """A peer's model for evaluation: valid until it goes on training."""

    z: FloatArray
    """The model that it evaluates and saves."""
    x: FloatArray
    """The value that it mixes; z = x / u."""
    u: float


class OwnEvaluation:
    """Measures the model of this peer."""

    def __init__(self, peer: int, trainer: PeerTrainer, splits: Sequence[Split], keep_in: Path | None) -> None:
        """`keep_in`: where models are left for `sotto up`, which measures how far those of all peers are apart."""
        self.splits = tuple(splits)
        self._peer, self._trainer, self._keep_in = peer, trainer, keep_in

    def measure(self, done: int, models: Models) -> list[EvaluationRecord]:
        """Return the accuracy on each split after `done` rounds, and leave (x, u) where it is looked for.
        Raises StateError if the disk refuses."""
        records = [self.measure_split(done, models.z, split) for split in self.splits]
        if self._keep_in is not None:
            with writing(f"{self._keep_in.name}/{done}.npy"):
                self._keep_in.mkdir(exist_ok=True)
                beside = self._keep_in / f".{done}.npy.new"
                with open(beside, "wb") as file:
                    np.save(file, np.append(models.x.astype(np.float64), models.u))
                beside.rename(self._keep_in / f"{done}.npy")
        return records

    def measure_split(self, done: int, z: FloatArray, split: Split) -> EvaluationRecord:
        """Return the accuracy on one split after `done` rounds."""
        return evaluation_record(self._peer, done, split, self._trainer.evaluate(z, split))


@dataclass
class Evaluations:
    """The newest accuracy of every peer, as far as this one has heard."""

    hearsay: notes.Hearsay
    options: EvaluationOptions
    rounds: int
    """Rounds of the run."""
    _: KW_ONLY
    is_former: Callable[[int], bool] = lambda peer: False
    """Returns whether a device takes part again under a newer number."""
    samples: SampleCounts
    broadcast: Callable[[str, bytes, int | None], None]
    """Tells the neighbours: (topic, note, the one that needs no telling)."""
    on_news: Callable[[EvaluationRecord], None]
    """Told of each evaluation that was not known."""
    criteria: tuple[Criterion, ...] = (ACCURACY,)
    """The figures of an evaluation, the one that models are compared by first."""

    def __post_init__(self) -> None:
        """Begin with no evaluation."""
        self.newest: dict[tuple[int, str], EvaluationRecord] = {}
        """(peer, split) → newest known evaluation."""
        self._told_by: dict[tuple[int, str], int] = {}
        """(peer, split) → its teller; absent for evaluations measured here or known from before a restart."""
        self._notes: dict[tuple[int, str], bytes] = {}
        """(peer, split) → the note that said so, or says so, signed where the run has certificates."""
        self._peer = self.hearsay.own
        self._metrics = [criterion.name for criterion in self.criteria if criterion != ACCURACY]
        self._news = Allowances(**_NEWS)
        self._complained_of: set[int] = set()

    def is_due(self, done: int) -> bool:
        """Return whether peers measure their models after `done` rounds."""
        return is_evaluated(self.options, done, self.rounds)

    def is_shared(self, done: int) -> bool:
        """Return whether all peers are to know an evaluation after `done` rounds."""
        return is_shared(self.options, done, self.rounds)

    def restore(self, records: Iterable[EvaluationRecord]) -> None:
        """Restore the evaluations known before a restart: others may have left by the time that anybody asks them."""
        for record in records:
            # The run may have fewer rounds than before, or another list of peers.
            if record.peer in self.hearsay.peers and record.round <= self.rounds and self.samples.fit(record):
                self.newest[record.peer, record.split] = record

    def share(self, records: Iterable[EvaluationRecord]) -> None:
        """Tell the neighbours an evaluation measured here, if all peers are to know it."""
        for record in records:
            known = self.newest.get((record.peer, record.split))
            if self.is_shared(record.round) and (known is None or known.round < record.round):
                self._learn(record, None, None)

    def heard(self, source: int, note: bytes) -> None:
        """Judge a note of a neighbour, and pass it on if it is news. Raises RemoteProtocolError if it is malformed."""
        record = notes.decode_evaluation(note, self.rounds, self._metrics)
        if record.peer == self._peer or not self._is_news(record, source, note):
            return  # Before the signature is looked at: every neighbour brings the same.
        about, is_awaited = (record.peer, record.split), self._is_awaited(record)
        teller = self.hearsay.teller(
            notes.EVALUATION, note, record.peer, source, self._news, about=about, is_awaited=is_awaited
        )
        if teller is not None and not self.samples.fit(record):
            self._complain(record, source)
        elif teller is not None:
            self._learn(record, teller, note, besides=source)

    def _is_awaited(self, record: EvaluationRecord) -> bool:
        """Return whether peers wait for an evaluation: the first one after the last round."""
        known = self.newest.get((record.peer, record.split))
        return record.round == self.rounds and (known is None or known.round < self.rounds)

    def _is_news(self, record: EvaluationRecord, source: int, note: bytes) -> bool:
        key = record.peer, record.split
        known = self.newest.get(key)
        if known is None or known.round < record.round:
            return True
        if known == record:
            return False
        # It went back to an earlier round, or, without proofs, somebody else said more than is true.
        corrects = source == record.peer and self._told_by.get(key, source) != source
        return is_later(note, self._notes.get(key, b""), unsigned=corrects)

    def _learn(
        self, record: EvaluationRecord, source: int | None, note: bytes | None, *, besides: int | None = None
    ) -> None:
        """Take the evaluation in a `note` of `source`; None stands for one measured here, which nobody has told yet. It
        is passed on to all but `besides`."""
        key = record.peer, record.split
        is_awaited = self._is_awaited(record)
        may_pass_on = source is not None or self._news.spend(key, self.hearsay.now()) or is_awaited
        self.newest[key] = record
        # A note that is not sent needs no signature.
        self._notes.pop(key, None)
        if note is not None:
            self._notes[key] = note
        if source is None:
            self._told_by.pop(key, None)
        else:
            self._told_by[key] = source
        if may_pass_on and self.samples.may_be_told(record):
            self.broadcast(notes.EVALUATION, self._note(record), besides)
        self.on_news(record)

    def _complain(self, record: EvaluationRecord, source: int) -> None:
        if record.peer not in self._complained_of:
            self._complained_of.add(record.peer)
            log.warning(
                "peer %d told of an evaluation of peer %d on %d samples that are not the %s set of this run: it and its"
                " like are not shown",
                source,
                record.peer,
                sum(record.total),
                record.split,
            )

    def notes(self) -> list[bytes]:
        """Return the notes for a neighbour that was away."""
        told = [record for record in self.newest.values() if self.samples.may_be_told(record)]
        return [self._note(record) for record in told]

    def _note(self, record: EvaluationRecord) -> bytes:
        """Return the note of a record, signed when it is first sent. Records of others from before a restart cannot be
        signed."""
        key = record.peer, record.split
        if key not in self._notes:
            note = notes.encode_evaluation(record)
            own = record.peer == self._peer
            self._notes[key] = self.hearsay.statements.sign(notes.EVALUATION, note) if own else note
        return self._notes[key]

    @property
    def told(self) -> tuple[Criterion, ...]:
        """The criteria of which this peer's evaluation has figures; those of the others where it has none, and all
        before the first. A script need not tell all that it may."""
        tested = [record for (_, split), record in self.newest.items() if split == "test"]
        for records in ([each for each in tested if each.peer == self._peer], tested):
            told = tuple(c for c in self.criteria if any(each.figure(c) is not None for each in records))
            if told:
                return told
        return self.criteria

    def own(self) -> EvaluationRecord | None:
        """Return the newest evaluation of this peer on the common test set."""
        return self.newest.get((self._peer, "test"))

    def worst(self) -> EvaluationRecord | None:
        """Return the newest evaluation on the common test set of the peer that does worst. Evaluations of a device from
        before its loss are no part of the run."""
        tested = [
            record for (peer, split), record in self.newest.items() if split == "test" and not self.is_former(peer)
        ]
        criterion = self.told[0]
        known = [(value, record) for record in tested if (value := record.figure(criterion)) is not None]
        return min(known, key=lambda each: criterion.rank(each[0]))[1] if known else None

    def told_by(self, record: EvaluationRecord) -> int | None:
        """Return the neighbour that told of a known evaluation; None for one known from this peer itself."""
        return self._told_by.get((record.peer, record.split))

    def finished(self) -> set[int]:
        """Return the peers whose evaluation after the last round is known."""
        return {
            peer for (peer, split), record in self.newest.items() if split == "test" and record.round == self.rounds
        }


class SampleCounts:
    """Plausible numbers of samples in an evaluation."""

    def __init__(self, test_classes: Sequence[int], num_samples: int | None) -> None:
        """`test_classes`: how many samples of each class the common test set has. `num_samples`: of the training data,
        of which peers hold some out; None where each device has its own data, and may have its own test set."""
        self._num_classes = len(test_classes) if len(test_classes) <= notes.MOST_CLASSES else 1
        self._test = tuple(test_classes) if self._num_classes == len(test_classes) else (sum(test_classes),)
        self._num_samples = num_samples

    def fit(self, record: EvaluationRecord) -> bool:
        """Return whether an evaluation can be one on the data of this run."""
        total = record.total
        if len(total) > notes.MOST_CLASSES:
            total = (sum(total),)
        if self._num_samples is None:
            return len(total) == self._num_classes
        if record.split == "test":
            return total == self._test
        return len(total) == self._num_classes and sum(total) <= self._num_samples

    def may_be_told(self, record: EvaluationRecord) -> bool:
        """Return whether others may hear of an evaluation; one on a hold-out shows the classes of private data."""
        return record.split == "test" or self._num_samples is not None


def stored(record: EvaluationRecord) -> str:
    """Return an evaluation as checkpoints hold it."""
    values = [record.peer, record.round, record.split, record.correct, record.total]
    return json.dumps(values + [record.metrics] * bool(record.metrics), separators=(",", ":"))


def parse_stored(text: str) -> EvaluationRecord:
    """Read the text that `stored` wrote. Raises ValueError or TypeError if it cannot be that."""
    peer, round_, split, correct, total, *rest = parse_json(text, infinite="kept")
    metrics = {str(name): float(value) for name, value in rest[0].items()} if rest else {}
    return EvaluationRecord(
        peer=peer, round=round_, split=split, correct=tuple(correct), total=tuple(total), metrics=metrics
    )
