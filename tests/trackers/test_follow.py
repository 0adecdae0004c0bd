"""What is new in the metrics of a run: each figure once, whoever writes meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peer.errors import StateError
from peer.state.metrics import ConsensusRecord, EvaluationRecord, MetricsStore
from peer.trackers.follow import MOST_PEERS, Follower, Point
from tests.report.sample_run import evaluation, round_record, write_sample_run


def points(follower: Follower, whose: str, figure: str) -> list[tuple[int, float]]:
    return [(p.done, p.figures[figure]) for p in follower.new() if p.whose == whose and figure in p.figures]


def test_every_figure_of_a_run_is_handed_over_once(tmp_path: Path) -> None:
    follower = Follower(write_sample_run(tmp_path / "run", rounds=40))
    name, settings = follower.describe()
    assert name == "digits"
    assert settings["algorithm.name"] == "quant-sgp"
    found = list(follower.new())
    assert {point.whose for point in found} == {"peer-0", "peer-1", "peer-2", "peer-3", "average", "all"}
    losses = [(p.done, p.figures["loss"]) for p in found if p.whose == "peer-2" and "loss" in p.figures]
    assert losses == [(t + 1, round_record(2, t, 40).loss) for t in range(40)]
    tested = [(p.done, p.figures["accuracy"]) for p in found if p.whose == "peer-2" and "accuracy" in p.figures]
    # The hold-out stays where it is.
    assert tested == [(done, evaluation(2, done, "test", offset=2).accuracy) for done in (20, 40)]
    assert [p.figures["consensus_distance"] for p in found if p.whose == "all"] == [5 / 20, 5 / 40]
    assert list(follower.new()) == []
    follower.close()


def test_times_are_those_of_the_run(tmp_path: Path) -> None:
    follower = Follower(write_sample_run(tmp_path / "run", rounds=10))
    first = next(p for p in follower.new() if p.whose == "peer-1")
    # It began at 10:05:00, and the first round ended 40 ms later.
    assert first.at == pytest.approx(1795341900.0 + 0.04)


def test_what_is_written_while_it_follows_comes_next(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    follower = Follower(tmp_path)
    assert follower.has_begun
    assert list(follower.new()) == []
    # A peer that is behind writes rounds that lie before those of another one.
    for peer, rounds in ((0, range(5)), (1, range(2)), (1, range(2, 5))):
        store.put(*(round_record(peer, t, 9) for t in rounds))
        store.flush()
        assert points(follower, f"peer-{peer}", "rate") == [(t + 1, 0.1) for t in rounds]
    store.put(EvaluationRecord(peer=-1, round=5, split="test", correct=(1,), total=(2,)))
    store.flush()
    assert points(follower, "average", "accuracy") == [(5, 0.5)]


def test_a_peer_has_the_same_name_before_there_is_a_summary(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    store.put(round_record(1, 0, 9))
    store.flush()
    (tmp_path / "config.toml").write_text('[[peers]]\nname = "attic"\n[[peers]]\nname = "cellar"\n')
    assert [p.whose for p in Follower(tmp_path).new()] == ["cellar"]


def test_rounds_that_a_peer_repeats_are_not_handed_over_again(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    follower = Follower(tmp_path)
    store.put(*(round_record(0, t, 9) for t in range(6)))
    store.flush()
    assert len(points(follower, "peer-0", "rate")) == 6
    store.drop_after(2)
    store.put(*(round_record(0, t, 9) for t in range(3, 8)))
    store.flush()
    assert points(follower, "peer-0", "rate") == [(7, 0.1), (8, 0.1)]


def test_what_a_peer_was_told_of_others_does_not_count(tmp_path: Path) -> None:
    for peer in (0, 1):
        folder = tmp_path / "peers" / f"peer-{peer}" / "state"
        folder.mkdir(parents=True)
        store = MetricsStore(folder / "metrics.sqlite")
        store.put(round_record(peer, 0, 9))
        for of in (0, 1):
            store.put(EvaluationRecord(peer=of, round=1, split="test", correct=(10 * peer + of,), total=(20,)))
        store.close()
    found = [p for p in Follower(tmp_path).new() if "accuracy" in p.figures]
    assert [(p.whose, p.figures["accuracy"]) for p in found] == [("peer-0", 0.0), ("peer-1", 0.55)]


def test_metrics_of_a_task_are_handed_over_and_no_accuracy_where_it_counts_none(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    store.put(round_record(0, 0, 9))
    store.put(EvaluationRecord(peer=0, round=1, split="test", correct=(), total=(), metrics={"RMSE": 0.25}))
    store.close()
    assert list(Follower(tmp_path).new())[-1].figures == {"RMSE": 0.25}


def test_only_some_rounds_and_some_peers_are_wanted(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    store.put(*(round_record(peer, t, 9) for t in range(20) for peer in (0, MOST_PEERS)))
    store.put(ConsensusRecord(round=7, consensus_distance=1.0, model_norm=2.0))
    store.close()
    found = list(Follower(tmp_path, every=5).new())
    assert [(p.whose, p.done) for p in found] == [("peer-0", done) for done in (5, 10, 15, 20)] + [("all", 7)]


def test_what_is_not_finite_or_not_there_is_left_out(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    store.put(replace(round_record(0, 0, 9), loss=float("inf"), theta=None, error_norm=0.0))
    store.close()
    (point,) = Follower(tmp_path).new()
    assert isinstance(point, Point)
    assert {"loss", "theta"}.isdisjoint(point.figures)
    assert point.figures["error_norm"] == 0.0


def test_a_file_that_is_no_metrics_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(StateError, match=r"metrics\.sqlite: cannot be read"):
        list(Follower(tmp_path).new())
