"""The metrics file: rows are replaced, files of earlier versions go on, nothing is left beside it."""

from __future__ import annotations

import json
import sqlite3
from math import inf, nan
from pathlib import Path

import pytest

from peer.criterion import ACCURACY, Better, Criterion
from peer.errors import StateError
from peer.round_record import RoundRecord
from peer.state.metrics import ConsensusRecord, EvaluationRecord, LinkRecord, MetricsStore, Summary, measured

EARLIER = {
    "name": "a", "algorithm": "sgp", "compressor": "none", "graph": "ring", "num_peers": 2, "rounds": 1, "seed": 0,
    "parameters": 3, "seconds": 1.5,
}  # fmt: skip
"""A summary of an earlier version."""


def test_a_round_that_is_repeated_counts_once(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    store.put(RoundRecord(peer=1, round=3, time_s=0.5, loss=2.0))
    store.put(RoundRecord(peer=1, round=3, time_s=0.7, loss=1.0), RoundRecord(peer=0, round=3, time_s=0.7))
    assert [(r.peer, r.loss) for r in store.rounds()] == [(0, None), (1, 1.0)]


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    records = (
        RoundRecord(peer=0, round=0, time_s=0.1, payload_bytes=7, theta=0.25),
        EvaluationRecord(peer=0, round=1, split="test", correct=(1, 2), total=(3, 4), loss=0.5),
        EvaluationRecord(peer=1, round=1, split="test", correct=(0,), total=(4,), metrics={"RMSE": 0.5, "loss": inf}),
        LinkRecord(peer=0, neighbor=1, frames=2, socket_bytes=None, up=True),
        ConsensusRecord(round=1, consensus_distance=0.5, model_norm=2.0),
    )
    store = MetricsStore(path)
    store.put(*records)
    store.close()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.sqlite"]
    reader = MetricsStore(path, read_only=True)
    assert (*reader.rounds(), *reader.evaluations(), *reader.links(), *reader.consensus()) == records
    reader.close()


def test_rounds_after_a_checkpoint_are_dropped(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    store.put(*(RoundRecord(peer=0, round=t, time_s=0.0) for t in range(5)))
    store.drop_after(2)
    assert [r.round for r in store.rounds()] == [0, 1, 2]
    assert [r.round for r in store.rounds(after=1)] == [2]


def test_evaluations_of_an_earlier_version_have_no_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    with sqlite3.connect(path) as old:
        old.execute('CREATE TABLE evaluations ("peer", "round", "split", "correct", "total", "loss")')
        old.execute("INSERT INTO evaluations VALUES (0, 1, 'test', '[1]', '[2]', 0.5)")
    old.close()
    (record,) = MetricsStore(path).evaluations()
    assert record == EvaluationRecord(peer=0, round=1, split="test", correct=(1,), total=(2,), loss=0.5)


@pytest.mark.parametrize(("better", "worst"), [("higher", 0.25), ("lower", 0.75)])
def test_the_worst_peer_is_the_worst_by_the_first_criterion(better: Better, worst: float, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(EARLIER))
    summary = Summary.load(tmp_path / "summary.json")
    assert summary.criterion == ACCURACY, "as in every summary of an earlier version"
    summary.criteria = {"own": better, "accuracy": "higher"}
    summary.peer_metrics = {"own": [0.5, 0.25, 0.75]}
    assert summary.worst(summary.criterion) == worst
    summary.save(tmp_path / "summary.json")
    again = Summary.load(tmp_path / "summary.json")
    assert (again.criterion, again.peer_metrics) == (Criterion("own", better), summary.peer_metrics)
    assert json.loads((tmp_path / "summary.json").read_text())["worst_metrics"] == {"own": worst}


def test_a_figure_that_is_no_number_is_the_worst() -> None:
    for better in ("higher", "lower"):
        assert Criterion("own", better).worst([1.0, nan, 2.0]) is nan


def test_a_file_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    with sqlite3.connect(path) as old:
        old.execute('CREATE TABLE rounds ("peer", "round", "time_s", PRIMARY KEY (peer, round))')
        old.execute("INSERT INTO rounds VALUES (0, 0, 0.5)")
    old.close()
    store = MetricsStore(path)
    store.put(RoundRecord(peer=0, round=1, time_s=1.0, loss=0.25))
    assert store.rounds() == [
        RoundRecord(peer=0, round=0, time_s=0.5),
        RoundRecord(peer=0, round=1, time_s=1.0, loss=0.25),
    ]


def test_a_summary_comes_back_from_its_file(tmp_path: Path) -> None:
    summary = Summary(
        name="a", algorithm="sgp", compressor="none", graph="ring", num_peers=2, rounds=1, seed=0, parameters=3,
        seconds=1.5, peer_accuracy=[0.5, 0.25], peer_names=["a", "b"],
    )  # fmt: skip
    summary.save(tmp_path / "summary.json")
    assert Summary.load(tmp_path / "summary.json") == summary
    assert summary.worst_accuracy == 0.25


def test_a_disk_that_refuses_is_an_error_of_the_disk(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    # A file that may not grow is what a full disk is to SQLite.
    connection = store._connection
    connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
    rows = [RoundRecord(peer=0, round=round_, time_s=0.0) for round_ in range(1000)]
    with pytest.raises(StateError, match=r"metrics\.sqlite: cannot be written: database or disk is full"):
        store.put(*rows)


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(StateError, match=r"metrics\.sqlite: .*move it away"):
        MetricsStore(path)


def test_what_a_peer_measured_counts_and_not_what_others_say_of_it() -> None:
    def record(peer: int, correct: int) -> EvaluationRecord:
        return EvaluationRecord(peer=peer, round=9, split="test", correct=(correct,), total=(10,))

    def rounds(peer: int) -> list[RoundRecord]:
        return [RoundRecord(round=8, peer=peer, time_s=1.0)]

    averaged, first, second, elsewhere = record(-1, 6), record(0, 5), record(1, 6), record(2, 7)
    files = [
        ([], [averaged]),
        (rounds(0), [first, record(1, 0)]),
        (rounds(1), [second, record(0, 10), elsewhere]),
    ]
    assert measured(files) == [averaged, first, second, elsewhere]
