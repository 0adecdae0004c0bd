"""The metrics file: rows are replaced, files of earlier versions go on, nothing is left beside it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from peer.errors import RemoteProtocolError, StateError
from peer.records import ACCURACY, Better, Criterion, RoundRecord
from peer.state import metrics
from peer.state.metrics import (
    PAGED,
    ConsensusRecord,
    EvaluationRecord,
    LinkRecord,
    MetricsStore,
    Summary,
    measured,
    page_records,
)

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


@pytest.mark.parametrize("folder", ["job #2", "what?mode=rwc", "100%", "50%23", "a;b", "日本 犬", "caf\udce9"])
def test_a_path_may_hold_what_a_uri_means_otherwise(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "metrics.sqlite"
    path.parent.mkdir()
    store = MetricsStore(path)
    store.put(RoundRecord(peer=0, round=0, time_s=0.1))
    store.close()
    reader = MetricsStore(path, read_only=True)
    assert len(reader.rounds()) == 1
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._connection.execute("DELETE FROM rounds")
    reader.close()
    assert [each.name for each in tmp_path.iterdir()] == [folder], "nothing appears beside it"


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


def test_a_resumed_run_began_when_its_first_part_did(tmp_path: Path) -> None:
    def part(command: str, started_at: str) -> Summary:
        return Summary(
            name="a", algorithm="sgp", compressor="none", graph="ring", num_peers=2, rounds=1, seed=0, parameters=3,
            seconds=1.5, commands=[command], started_at=started_at,
        )  # fmt: skip

    file = tmp_path / "summary.json"
    resumed = part("sotto up --resume a", "2026-11-23T10:00:00+00:00")
    resumed.continue_from(file)
    assert resumed.commands == ["sotto up --resume a"], "there is no earlier summary"
    part("sotto up", "2026-11-22T10:00:00+00:00").save(file)
    resumed.continue_from(file)
    assert (resumed.commands, resumed.started_at) == (["sotto up", "sotto up --resume a"], "2026-11-22T10:00:00+00:00")


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


def round_rows(peer: int, count: int) -> list[RoundRecord]:
    return [RoundRecord(peer=peer, round=t, time_s=t / 10, loss=1 / (t + 1)) for t in range(count)]


def test_rows_travel_in_pages_of_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_PAGE_CHARACTERS", 400)
    here, there = MetricsStore(None), MetricsStore(None)
    here.put(*round_rows(3, 40))
    tested = [
        EvaluationRecord(peer=p, round=t, split="test", correct=(t, p), total=(9, 9)) for t in (1, 2) for p in (3, 4)
    ]
    tested[0] = replace(tested[0], metrics={"RMSE": 0.5})
    here.put(*tested, EvaluationRecord(peer=3, round=2, split="holdout", correct=(5,), total=(9,)))
    here.put(LinkRecord(peer=3, neighbor=4, frames=7, up=True, last_offence="it lied"))
    for table in PAGED:
        after: int | None = -1
        pages = 0
        while after is not None:
            columns, rows, after = here.page(table, after=after)
            there.put(*page_records(table, columns, json.loads(json.dumps(rows)), peer=3, rounds=40))
            pages += 1
        assert (pages > 1) == (table == "rounds")
    assert there.rounds() == here.rounds()
    assert there.links() == here.links()
    # What a device measures on its hold-out stays there.
    assert there.evaluations() == tested
    assert (there.last_round(3), there.last_round(9), there.last_round(3, "evaluations")) == (39, -1, 2)


def test_a_page_never_ends_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_PAGE_CHARACTERS", 1)
    store = MetricsStore(None)
    store.put(*(EvaluationRecord(peer=p, round=1, split="test", correct=(1,), total=(1,)) for p in range(9)))
    store.put(EvaluationRecord(peer=0, round=2, split="test", correct=(1,), total=(1,)))
    _, rows, last = store.page("evaluations")
    assert (len(rows), last) == (9, 1)


def test_rows_of_another_release_are_taken_as_far_as_they_are_known() -> None:
    rows = page_records("rounds", ["peer", "round", "time_s", "mood"], [[0, 5, 1.5, "fine"]], peer=0, rounds=9)
    assert rows == [RoundRecord(peer=0, round=5, time_s=1.5)]


@pytest.mark.parametrize(
    ("table", "columns", "row"),
    [
        ("rounds", ["peer", "round", "time_s"], [1, 0, 0.0]),
        ("rounds", ["peer", "round", "time_s"], [0, 0]),
        ("rounds", ["peer", "round"], [0, 0]),
        ("rounds", ["peer", "round", "time_s", "loss"], [0, 0, 0.0, "<script>"]),
        ("rounds", ["peer", "round", "time_s", "loss"], [0, 0, 0.0, [1]]),
        ("rounds", ["peer", "round", "time_s"], [0, "0", 0.0]),
        ("links", ["peer", "neighbor", "frames"], [0, 1, None]),
        ("evaluations", ["peer", "round", "split", "correct", "total"], [0, 1, "test", "[1", "[1]"]),
        ("evaluations", ["peer", "round", "split", "correct", "total"], [0, 1, "test", '["a"]', "[1]"]),
        ("evaluations", ["peer", "round", "split", "correct", "total"], [0, 1, "test", "1", "[1]"]),
        ("evaluations", ["peer", "round", "split", "correct", "total", "metrics"], [0, 1, "test", "[1]", "[1]", "[2]"]),
        (
            "evaluations",
            ["peer", "round", "split", "correct", "total", "metrics"],
            [0, 1, "test", "[1]", "[1]", '{"a": "b"}'],
        ),
    ],
)
def test_what_is_no_metrics_is_refused(table: str, columns: list[str], row: list[object]) -> None:
    with pytest.raises(RemoteProtocolError, match=f"sent {table}"):
        page_records(table, columns, [row], peer=0, rounds=9)


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("rounds", (0, 0, "soon")),
        ("rounds", ("0", 0, 0.0)),
        ("rounds", (1 << 40, 0, 0.0)),
        ("rounds", (-5, 0, 0.0)),
        ("links", (0, 1 << 50)),
        ("evaluations", (0, 1, "test", "[NaN]", "[1]")),
        ("evaluations", (0, 1, "test", "[" * 5000, "[1]")),
        ("evaluations", (0, 1, "test", "[5]", "[1]")),
        ("evaluations", (0, 1, "test", "[1,2]", "[9]")),
        ("evaluations", (0, 1, 7, "[1]", "[9]")),
        ("consensus", (0, "x", 1.0)),
    ],
)
def test_a_file_whose_rows_are_no_metrics_is_damaged(table: str, values: tuple[object, ...], tmp_path: Path) -> None:
    MetricsStore(tmp_path / "metrics.sqlite").close()
    with closing(sqlite3.connect(tmp_path / "metrics.sqlite")) as file:
        columns = [row[1] for row in file.execute(f"PRAGMA table_info({table})")]
        record = {"split": "test", "correct": "[1]", "total": "[9]", "metrics": "{}", "up": 0}
        defaults = {name: record.get(name, 0) for name in columns}
        row = {**defaults, **dict(zip(columns, values, strict=False))}
        file.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", list(row.values()))
        file.commit()
    with closing(MetricsStore(tmp_path / "metrics.sqlite", read_only=True)) as store, pytest.raises(sqlite3.DataError):
        getattr(store, table)()


def test_a_file_that_computes_its_rows_is_no_metrics_file(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "metrics.sqlite")) as file:
        endless = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT i AS peer, i AS round FROM n"
        file.execute(f"CREATE VIEW rounds AS {endless}")
        file.commit()
    with pytest.raises(sqlite3.DataError, match="more than tables"):
        MetricsStore(tmp_path / "metrics.sqlite", read_only=True)


def test_two_standard_errors_of_a_sample_hold_the_mean_of_all_in_most_draws() -> None:
    rng = np.random.default_rng(0)
    population = rng.beta(8, 2, size=1000)
    summary = Summary(
        name="n", algorithm="sgp", compressor="none", graph="ring", num_peers=1000, rounds=1, seed=0, parameters=1,
        seconds=0.0, is_sample=True,
    )  # fmt: skip
    close = 0
    for _ in range(1000):
        summary.peer_accuracy = rng.choice(population, 64, replace=False).tolist()
        margin = summary.margin(ACCURACY)
        assert margin is not None
        close += abs(sum(summary.peer_accuracy) / 64 - population.mean()) <= margin
    assert 930 <= close <= 980
    summary.is_sample = False
    assert summary.margin(ACCURACY) is None
