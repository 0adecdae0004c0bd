"""The metrics file: what is written is read back, also by another process while the writer is at it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from peer import metrics
from peer.metrics import ConsensusRecord, EvaluationRecord, MetricsStore


def test_a_file_has_its_tables_from_the_moment_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader polls for the file and must never meet one that is half made."""
    path = tmp_path / "metrics.sqlite"
    create, seen = metrics._create, []

    def watch(each: Path) -> sqlite3.Connection:
        seen.append(path.exists())
        connection = create(each)
        seen.append(path.exists())
        return connection

    monkeypatch.setattr(metrics, "_create", watch)
    writer = MetricsStore(path)
    assert seen == [False, False, True, True]
    reader = MetricsStore(path, read_only=True)
    assert reader.rounds() == reader.evaluations() == reader.links() == reader.consensus() == []
    reader.close()
    writer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.sqlite"]


def test_what_is_flushed_is_read_back_and_a_repeated_round_counts_once(tmp_path: Path) -> None:
    writer = MetricsStore(tmp_path / "metrics.sqlite")
    reader = MetricsStore(tmp_path / "metrics.sqlite", read_only=True)
    evaluation = EvaluationRecord(peer=1, round=10, split="test", correct=(3, 4), total=(5, 5))
    first, repeated = (ConsensusRecord(round=10, consensus_distance=each, model_norm=2.0) for each in (1.0, 0.5))
    writer.put(evaluation, first)
    assert reader.evaluations() == []
    writer.flush()
    assert reader.evaluations() == [evaluation]
    writer.put(repeated)
    writer.flush()
    assert reader.consensus() == [repeated]
    writer.drop_after(9)
    assert reader.consensus() == reader.evaluations() == []
    writer.close()
    reader.close()


def test_an_old_file_is_written_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    record = ConsensusRecord(round=1, consensus_distance=0.5, model_norm=2.0)
    for _ in range(2):
        store = MetricsStore(path)
        store.put(record)
        store.close()
    again = MetricsStore(path, read_only=True)
    assert again.consensus() == [record]
    again.close()


def test_metrics_in_memory_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = ConsensusRecord(round=1, consensus_distance=0.5, model_norm=2.0)
    store = MetricsStore(None)
    store.put(record)
    store.flush()
    assert store.consensus() == [record]
    store.close()
    assert list(tmp_path.iterdir()) == []
