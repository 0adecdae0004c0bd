"""What a peer knows of everybody's accuracy, without a peer: what is news, what is passed on, what is made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from peer.compress.payload import FloatArray
from peer.config import EvaluationOptions
from peer.daemon.evaluations import Evaluations, Models, OwnEvaluation, evaluation_note, parse_evaluation
from peer.errors import RemoteProtocolError, StateError
from peer.state.metrics import EvaluationRecord
from peer.train.local_step import Evaluation, Split

ROUNDS = 100
PEERS = range(4)


class Sent:
    """The notes that were sent, and how often there was news."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, bytes, int | None]] = []
        self.news = 0

    def broadcast(self, topic: str, note: bytes, besides: int | None) -> None:
        self.notes.append((topic, note, besides))

    def on_news(self) -> None:
        self.news += 1


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def evaluations(sent: Sent) -> Evaluations:
    """Those of peer 0, which evaluates every 10 rounds and shares every second of these."""
    options = EvaluationOptions(every_rounds=10, share_every=2)
    return Evaluations(0, options, ROUNDS, peers=PEERS, broadcast=sent.broadcast, on_news=sent.on_news)


def record(peer: int, done: int, correct: int = 5, split: str = "test") -> EvaluationRecord:
    return EvaluationRecord(peer=peer, round=done, split=split, correct=(correct, 1), total=(10, 2))


def test_which_rounds_are_evaluated_and_which_are_shared(evaluations: Evaluations) -> None:
    assert [done for done in range(1, 45) if evaluations.is_due(done)] == [10, 20, 30, 40]
    assert [done for done in range(1, 45) if evaluations.is_shared(done)] == [20, 40]
    assert evaluations.is_due(ROUNDS)
    assert evaluations.is_shared(ROUNDS)


def test_without_regular_evaluations_only_the_last_round_counts(sent: Sent) -> None:
    options = EvaluationOptions(every_rounds=0)
    quiet = Evaluations(0, options, 7, peers=PEERS, broadcast=sent.broadcast, on_news=sent.on_news)
    assert [done for done in range(1, 8) if quiet.is_due(done)] == [7]
    assert [done for done in range(1, 8) if quiet.is_shared(done)] == [7]


def test_own_accuracies_are_told_where_they_are_shared(evaluations: Evaluations, sent: Sent) -> None:
    evaluations.share([record(0, 10)])
    assert sent.notes == []
    evaluations.share([record(0, 20), record(0, 20, split="holdout")])
    assert [(topic, besides) for topic, _, besides in sent.notes] == [("evaluation", None)] * 2
    assert evaluations.own() == record(0, 20)


def test_news_goes_to_everybody_but_where_it_came_from_and_once(evaluations: Evaluations, sent: Sent) -> None:
    note = evaluation_note(record(2, 20))
    evaluations.heard(1, note)
    evaluations.heard(3, note)
    evaluations.heard(3, evaluation_note(record(2, 10)))
    assert sent.notes == [("evaluation", note, 1)]
    assert sent.news == 1
    assert evaluations.notes() == [note]


def test_nobody_tells_a_peer_its_own_accuracy(evaluations: Evaluations, sent: Sent) -> None:
    evaluations.share([record(0, 20, correct=9)])
    evaluations.heard(1, evaluation_note(record(0, 40, correct=0)))
    assert evaluations.own() == record(0, 20, correct=9)
    assert sent.news == 1


def test_the_worst_peer_and_who_has_finished(evaluations: Evaluations) -> None:
    assert evaluations.worst() is None
    evaluations.restore([record(1, ROUNDS, 7), record(2, 40, 3), record(3, 40, 1, "holdout"), record(3, ROUNDS, 8)])
    worst = evaluations.worst()
    assert worst is not None
    assert worst.peer == 2
    assert evaluations.finished() == {1, 3}


def test_a_note_says_what_was_measured() -> None:
    told = record(3, 20)
    assert parse_evaluation(evaluation_note(told), PEERS, ROUNDS) == told


def test_of_very_many_classes_the_sum_is_told() -> None:
    many = EvaluationRecord(peer=1, round=20, split="test", correct=(1,) * 5000, total=(2,) * 5000)
    heard = parse_evaluation(evaluation_note(many), PEERS, ROUNDS)
    assert (heard.correct, heard.total, heard.accuracy) == ((5000,), (10000,), 0.5)


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"\xff\xfe",
        b"7",
        b"null",
        b'"abcde"',
        b"[" * 60_000,
        json.dumps([1, 20, "test", [1]]).encode(),
        json.dumps([1, 20, "test", 1, 2]).encode(),
        json.dumps([1, 20, "test", [1, 2], [3]]).encode(),
        json.dumps([9, 20, "test", [1], [2]]).encode(),
        json.dumps(["1", 20, "test", [1], [2]]).encode(),
        json.dumps([1, 20, "train", [1], [2]]).encode(),
        json.dumps([1, 20, ["test"], [1], [2]]).encode(),
        # Each of these ended the process, or kept it from writing its metrics.
        b'[1, 1e999, "test", [1], [2]]',
        json.dumps([1, 10**30, "test", [1], [2]]).encode(),
        json.dumps([1, 20, "test", [10**400], [1]]).encode(),
        json.dumps([1, -1, "test", [1], [2]]).encode(),
        json.dumps([1, 20, "test", [3], [2]]).encode(),
        json.dumps([1, 20, "test", [1.5], [2]]).encode(),
        json.dumps([1, 20, "test", [0] * 1001, [0] * 1001]).encode(),
    ],
)
def test_a_note_that_no_honest_peer_sends_is_refused_and_nothing_comes_of_it(
    evaluations: Evaluations, sent: Sent, note: bytes
) -> None:
    with pytest.raises(RemoteProtocolError):
        evaluations.heard(1, note)
    assert (evaluations.newest, sent.notes) == ({}, [])


class Constant:
    """Says of every model that half of it is right."""

    def evaluate(self, z: FloatArray, split: Split = "test") -> Evaluation:
        return Evaluation(loss=float(z[0]), correct=np.array([1]), total=np.array([2]))


def test_models_are_left_for_those_who_compare_them(tmp_path: Path) -> None:
    x = np.array([1.0, 2.0], np.float32)
    own = OwnEvaluation(3, Constant(), ["test", "holdout"], tmp_path / "models")
    records = own.measure(20, Models(x / 4, x, 4.0))
    assert [(each.peer, each.round, each.split, each.loss) for each in records] == [
        (3, 20, "test", 0.25),
        (3, 20, "holdout", 0.25),
    ]
    assert np.load(tmp_path / "models" / "20.npy").tolist() == [1.0, 2.0, 4.0]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["20.npy"]


def test_a_disk_that_takes_no_models_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file stands where the folder should be")
    own = OwnEvaluation(3, Constant(), ["test"], tmp_path / "models")
    x = np.zeros(2, np.float32)
    with pytest.raises(StateError, match=r"models/20\.npy: cannot be written"):
        own.measure(20, Models(x, x, 1.0))
