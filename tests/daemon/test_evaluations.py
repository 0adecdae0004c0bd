"""What a peer knows of everybody's accuracy, without a peer: what is news, what is passed on, what is made up."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from peer.compress.payload import FloatArray
from peer.config.options import EvaluationOptions
from peer.daemon.notes.evaluations import Evaluations, Models, OwnEvaluation, SampleCounts, parse_stored, stored
from peer.daemon.notes.notes import Hearsay, decode_evaluation, encode_evaluation
from peer.errors import StateError
from peer.node.statements import Statements, Unsigned, counter_of, sealed
from peer.proto.sottovoce.v1.statement_pb2 import Proof
from peer.records import ACCURACY, Criterion
from peer.state.metrics import EvaluationRecord
from peer.train.evaluation import Evaluation
from peer.train.local_step import Split
from peer.train.metrics import UNDECLARED

ROUNDS = 100
PEERS = range(4)


class Sent:
    """The notes that were sent, how often there was news, who is connected, and the time."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, bytes, int | None]] = []
        self.news = 0
        self.up: set[int] = set()
        self.now = 0.0

    def evaluations(
        self,
        options: EvaluationOptions,
        rounds: int = ROUNDS,
        samples: SampleCounts | None = None,
        criteria: tuple[Criterion, ...] = (ACCURACY,),
        *,
        former: Container[int] = (),
        statements: Statements | None = None,
    ) -> Evaluations:
        """Return those of peer 0. The test set has 12 samples of two classes, the training data 40."""
        return Evaluations(
            Hearsay(0, PEERS, statements or Unsigned(), self.up.__contains__, lambda: self.now),
            options,
            rounds,
            is_former=lambda peer: peer in former,
            samples=samples or SampleCounts((10, 2), 40),
            broadcast=self.broadcast,
            on_news=self.on_news,
            criteria=criteria,
        )

    def broadcast(self, topic: str, note: bytes, besides: int | None) -> None:
        self.notes.append((topic, note, besides))

    def on_news(self, record: EvaluationRecord) -> None:
        self.news += 1


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def evaluations(sent: Sent) -> Evaluations:
    """Those of peer 0, which evaluates every 10 rounds and shares every second of these."""
    return sent.evaluations(EvaluationOptions(every_rounds=10, share_every=2))


def record(peer: int, done: int, correct: int = 5, split: str = "test") -> EvaluationRecord:
    return EvaluationRecord(peer=peer, round=done, split=split, correct=(correct, 1), total=(10, 2))


def test_which_rounds_are_evaluated_and_which_are_shared(evaluations: Evaluations) -> None:
    assert [done for done in range(1, 45) if evaluations.is_due(done)] == [10, 20, 30, 40]
    assert [done for done in range(1, 45) if evaluations.is_shared(done)] == [20, 40]
    assert evaluations.is_due(ROUNDS)
    assert evaluations.is_shared(ROUNDS)


def test_without_regular_evaluations_only_the_last_round_counts(sent: Sent) -> None:
    quiet = sent.evaluations(EvaluationOptions(every_rounds=0), 7)
    assert [done for done in range(1, 8) if quiet.is_due(done)] == [7]
    assert [done for done in range(1, 8) if quiet.is_shared(done)] == [7]


def test_own_accuracies_are_told_where_they_are_shared(evaluations: Evaluations, sent: Sent) -> None:
    evaluations.share([record(0, 10)])
    assert sent.notes == []
    evaluations.share([record(0, 20), record(0, 20, split="holdout")])
    assert [(topic, besides) for topic, _, besides in sent.notes] == [("evaluation", None)] * 2
    assert evaluations.own() == record(0, 20)


def test_news_goes_to_everybody_but_where_it_came_from_and_once(evaluations: Evaluations, sent: Sent) -> None:
    note = encode_evaluation(record(2, 20))
    evaluations.heard(1, note)
    evaluations.heard(3, note)
    evaluations.heard(3, encode_evaluation(record(2, 10)))
    assert sent.notes == [("evaluation", note, 1)]
    assert sent.news == 1
    assert evaluations.notes() == [note]


def test_nobody_tells_a_peer_its_own_accuracy(evaluations: Evaluations, sent: Sent) -> None:
    evaluations.share([record(0, 20, correct=9)])
    evaluations.heard(1, encode_evaluation(record(0, 40, correct=0)))
    assert evaluations.own() == record(0, 20, correct=9)
    assert sent.news == 1


def test_the_worst_peer_is_that_of_the_largest_error_where_lower_values_are_better(sent: Sent) -> None:
    evaluations = sent.evaluations(EvaluationOptions(), criteria=(Criterion("RMSE", "lower"), ACCURACY))
    for peer, error in ((1, 0.25), (2, 0.75), (3, 0.5)):
        evaluations.heard(peer, encode_evaluation(replace(record(peer, 40, correct=peer), metrics={"RMSE": error})))
    worst = evaluations.worst()
    assert worst is not None
    assert (worst.peer, worst.metrics) == (2, {"RMSE": 0.75})
    assert parse_stored(stored(worst)) == worst


def test_models_are_compared_by_what_the_script_here_tells(sent: Sent) -> None:
    """Whatever others say: one that tells an accuracy where nobody else does must not take the place of the loss."""
    evaluations = sent.evaluations(EvaluationOptions(), criteria=UNDECLARED, samples=SampleCounts((0,), None))
    assert evaluations.told == UNDECLARED
    evaluations.heard(1, encode_evaluation(replace(record(1, ROUNDS), correct=(3,), total=(4,))))
    assert evaluations.told == (ACCURACY,), "a device without test data shows the figures of the others"
    for peer, loss in ((0, 0.5), (2, math.inf), (3, 0.25)):
        measured = replace(record(peer, ROUNDS), correct=(0,), total=(0,), metrics={"test loss": loss})
        if peer:
            evaluations.heard(peer, encode_evaluation(measured))
        else:
            evaluations.share([measured])
    assert [criterion.name for criterion in evaluations.told] == ["test loss"]
    worst = evaluations.worst()
    assert worst is not None
    assert worst.peer == 2


@pytest.mark.parametrize("figures", [(), (0.5, 0.5), (0.5,) * 10_000], ids=len)
def test_another_number_of_figures_than_here_is_left_out(figures: tuple[float, ...], sent: Sent) -> None:
    evaluations = sent.evaluations(EvaluationOptions(), criteria=UNDECLARED)
    told = {str(number): value for number, value in enumerate(figures)}
    evaluations.heard(1, encode_evaluation(replace(record(1, 40, correct=3), metrics=told)))
    assert evaluations.newest[1, "test"] == record(1, 40, correct=3)


def test_the_worst_peer_and_who_has_finished(evaluations: Evaluations) -> None:
    assert evaluations.worst() is None
    evaluations.restore([record(1, ROUNDS, 7), record(2, 40, 3), record(3, 40, 1, "holdout"), record(3, ROUNDS, 8)])
    worst = evaluations.worst()
    assert worst is not None
    assert worst.peer == 2
    assert evaluations.finished() == {1, 3}


def test_what_a_device_came_to_before_it_was_lost_is_not_the_worst(sent: Sent) -> None:
    evaluations = sent.evaluations(EvaluationOptions(), former=(2,))
    for peer, correct in ((1, 7), (2, 1), (3, 8)):
        evaluations.heard(peer, encode_evaluation(record(peer, 40, correct)))
    assert evaluations.newest[2, "test"] == record(2, 40, 1)
    assert evaluations.worst() == record(1, 40, 7)
    nobody = sent.evaluations(EvaluationOptions(), former=(2,))
    nobody.restore([record(2, 40, 1)])
    assert nobody.worst() is None


class Counted(Unsigned):
    """Counts what it signs."""

    def __init__(self) -> None:
        self.count = 0

    def sign(self, topic: str, statement: bytes) -> bytes:
        self.count += 1
        return sealed(statement, Proof(counter=self.count, certificate=b"certificate", signature=b"signature"))


def test_only_what_is_sent_is_signed(sent: Sent) -> None:
    statements = Counted()
    samples = SampleCounts((10, 2), None)
    evaluations = sent.evaluations(
        EvaluationOptions(every_rounds=1, share_every=1), 100, samples=samples, statements=statements
    )
    # Nobody is told of a hold-out of data of one's own.
    evaluations.share([record(0, 1, split="holdout")])
    assert (statements.count, sent.notes) == (0, [])
    for done in range(1, 50):
        evaluations.share([record(0, done)])
    assert statements.count == len(sent.notes) == 20
    assert counter_of(sent.notes[-1][1]) == 20
    # A neighbour that was away hears of the newest, under a number that was not used before.
    (note,) = evaluations.notes()
    assert (decode_evaluation(note, 100), counter_of(note)) == (record(0, 49), 21)
    assert evaluations.notes() == [note]
    assert statements.count == 21
    # The last word is always sent.
    evaluations.share([record(0, 100)])
    assert (statements.count, counter_of(sent.notes[-1][1])) == (22, 22)


def test_of_a_connected_neighbour_only_its_own_word_counts(evaluations: Evaluations, sent: Sent) -> None:
    sent.up.add(2)
    evaluations.heard(1, encode_evaluation(record(2, ROUNDS, correct=0)))
    assert evaluations.newest == {}
    evaluations.heard(2, encode_evaluation(record(2, 20)))
    assert evaluations.newest == {(2, "test"): record(2, 20)}
    assert evaluations.told_by(record(2, 20)) == 2
    # The word of others while it was away gives way to its own, and not the other way round.
    sent.up.clear()
    evaluations.heard(1, encode_evaluation(record(2, ROUNDS, correct=0)))
    assert evaluations.told_by(record(2, ROUNDS)) == 1
    sent.up.add(2)
    evaluations.heard(2, encode_evaluation(record(2, 40)))
    assert evaluations.newest == {(2, "test"): record(2, 40)}
    evaluations.heard(2, encode_evaluation(record(2, 20)))
    assert evaluations.newest == {(2, "test"): record(2, 40)}


def test_nothing_is_believed_of_peers_that_nobody_knows(evaluations: Evaluations, sent: Sent) -> None:
    evaluations.heard(1, encode_evaluation(record(9, 20)))
    assert (evaluations.newest, sent.notes) == ({}, [])


@pytest.mark.parametrize(
    "total",
    [(10, 3), (11, 1), (12,), (10, 2, 0), (0, 0)],
    ids=["too-many", "other-classes", "a-sum", "three-classes", "none"],
)
def test_an_evaluation_on_another_test_set_is_not_shown_and_said_once(
    evaluations: Evaluations, sent: Sent, caplog: pytest.LogCaptureFixture, total: tuple[int, ...]
) -> None:
    for done in (20, 40, ROUNDS):
        alien = EvaluationRecord(peer=2, round=done, split="test", correct=(0,) * len(total), total=total)
        evaluations.heard(1, encode_evaluation(alien))
    assert (evaluations.newest, sent.notes) == ({}, [])
    assert caplog.text.count("peer 1 told of an evaluation of peer 2") == 1


def test_a_hold_out_is_part_of_the_training_data(evaluations: Evaluations) -> None:
    for total in ((41, 0), (40,)):
        alien = EvaluationRecord(peer=2, round=20, split="holdout", correct=(0,) * len(total), total=total)
        evaluations.heard(1, encode_evaluation(alien))
    assert evaluations.newest == {}
    held_out = EvaluationRecord(peer=2, round=20, split="holdout", correct=(0, 3), total=(30, 10))
    evaluations.heard(1, encode_evaluation(held_out))
    assert evaluations.newest == {(2, "holdout"): held_out}


def test_of_very_many_classes_the_sum_has_to_be_that_of_the_test_set() -> None:
    samples = SampleCounts((2,) * 5000, 40_000)
    assert samples.fit(EvaluationRecord(peer=1, round=20, split="test", correct=(1,) * 5000, total=(2,) * 5000))
    assert samples.fit(EvaluationRecord(peer=1, round=20, split="test", correct=(5000,), total=(10_000,)))
    assert not samples.fit(EvaluationRecord(peer=1, round=20, split="test", correct=(5000,), total=(10_001,)))


def test_devices_with_data_of_their_own_may_have_test_sets_of_any_size() -> None:
    samples = SampleCounts((10, 2), None)
    for split in ("test", "holdout"):
        assert samples.fit(EvaluationRecord(peer=1, round=20, split=split, correct=(1, 0), total=(400, 0)))
        assert not samples.fit(EvaluationRecord(peer=1, round=20, split=split, correct=(1,), total=(12,)))


def test_nobody_is_told_of_a_hold_out_of_data_of_ones_own(sent: Sent) -> None:
    held_out = EvaluationRecord(peer=0, round=100, split="holdout", correct=(3, 4), total=(30, 10))
    for samples, expected in (
        (SampleCounts((10, 2), 40), {"test", "holdout"}),
        (SampleCounts((10, 2), None), {"test"}),
    ):
        sent.notes.clear()
        evaluations = sent.evaluations(EvaluationOptions(every_rounds=10, share_every=1), samples=samples)
        evaluations.share([record(0, 100), held_out])
        again = evaluations.notes()
        for told in ([note for _, note, _ in sent.notes], again):
            assert {decode_evaluation(note, ROUNDS).split for note in told} == expected
        assert evaluations.newest[0, "holdout"] == held_out


def test_a_flood_of_news_of_one_peer_is_not_passed_on_but_its_last_word_is(sent: Sent) -> None:
    evaluations = sent.evaluations(EvaluationOptions(), 10_000)
    for done in range(1, 10_001):
        evaluations.heard(1, encode_evaluation(record(2, done)))
    assert len(sent.notes) == 21
    assert evaluations.finished() == {2}


def test_own_evaluations_keep_to_the_same_pace(sent: Sent) -> None:
    evaluations = sent.evaluations(EvaluationOptions(every_rounds=1, share_every=1), 50)
    for done in range(1, 51):
        evaluations.share([record(0, done)])
    assert len(sent.notes) == 21
    assert evaluations.own() == record(0, 50)


def test_what_a_checkpoint_holds_is_known_again_as_far_as_it_is_of_this_run(evaluations: Evaluations) -> None:
    known = [record(1, 40), record(2, ROUNDS + 1), record(9, 40)]
    evaluations.restore(parse_stored(stored(each)) for each in known)
    assert evaluations.newest == {(1, "test"): record(1, 40)}
    assert evaluations.told_by(record(1, 40)) is None
    # As the first release wrote it.
    assert parse_stored('[1,40,"test",[5,1],[10,2]]') == record(1, 40)


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
