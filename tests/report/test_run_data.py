"""Run folders: whole, half written, damaged."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from peer.errors import StateError
from peer.report.run_data import load_run, metrics_files
from peer.state.metrics import MetricsStore
from tests.report.sample_run import write_sample_run


def test_metrics_of_all_peers_and_of_the_run_are_put_together(tmp_path: Path) -> None:
    data = load_run(write_sample_run(tmp_path / "run"))
    assert data.peers == [0, 1, 2, 3]
    assert len(data.rounds) == 4 * 120
    assert [record.round for record in data.rounds_of(2)] == list(range(120))
    assert {record.peer for record in data.evaluations} == {-1, 0, 1, 2, 3}
    assert len(data.links) == 4
    assert data.consensus[-1].round == 120
    assert data.notes == []
    assert data.name == "digits"


def test_the_metrics_of_a_simulation_are_one_file(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run")
    (run / "peers" / "peer-0" / "state" / "metrics.sqlite").replace(run / "metrics.sqlite")
    assert load_run(run).peers == [0, 1, 2, 3]


def test_a_run_without_summary_is_still_going_on(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run")
    (run / "summary.json").unlink()
    data = load_run(run)
    assert data.summary is None
    assert data.name == "run"
    assert "still going on" in data.notes[0]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"name": "x"}', "\udcff"])
def test_a_damaged_summary_is_noted(text: str, tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run")
    (run / "summary.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    data = load_run(run)
    assert data.summary is None
    assert any(note.startswith("summary.json cannot be read") for note in data.notes)


def test_a_damaged_metrics_file_is_noted_and_the_others_are_read(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run")
    (run / "peers" / "peer-1" / "state" / "metrics.sqlite").write_bytes(b"no database" * 100)
    data = load_run(run)
    assert data.peers == [0, 2, 3]
    assert any("peer-1" in note for note in data.notes)


def test_a_run_of_which_no_metrics_can_be_read_is_refused(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run")
    for file in metrics_files(run):
        file.write_bytes(b"no database" * 100)
    with pytest.raises(StateError, match=r"metrics\.sqlite cannot be read"):
        load_run(run)


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_what_is_no_run_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError, match=name):
        load_run(tmp_path / name)


def test_rows_that_only_a_writable_folder_gives_are_an_error_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process was killed, and its folder copied without one of the files beside the metrics, or mounted read-only."""
    (tmp_path / "metrics.sqlite").write_bytes(b"")
    (tmp_path / "metrics.sqlite-wal").write_bytes(b"rows")

    def refused(path: Path, *, read_only: bool) -> MetricsStore:
        # A new file in a folder that is not there: the same error, also as root.
        sqlite3.connect(f"file:{path.parent}/away/{path.name}?mode=ro", uri=True).close()
        raise AssertionError

    monkeypatch.setattr("peer.report.run_data.MetricsStore", refused)
    with pytest.raises(StateError, match=r"unable to open .*metrics.sqlite-wal, which SQLite reads only where it may"):
        load_run(tmp_path)
    (tmp_path / "metrics.sqlite-wal").write_bytes(b"")
    with pytest.raises(StateError, match=r"unable to open database file$"):
        load_run(tmp_path)
    (tmp_path / "metrics.sqlite-wal").unlink()
    with pytest.raises(StateError, match=r"unable to open database file$"):
        load_run(tmp_path)
