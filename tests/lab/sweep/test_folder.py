"""A sweep of 24 cells: the same results in one process, in shards, on Dask and on Ray, interrupted and resumed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from peer.errors import ConfigError, StateError
from peer.lab.sweep.folder import SweepFolder
from peer.lab.sweep.sweep import Sweep
from peer.ops.executors import Kind, Shard, open_executor
from tests.lab.sweep.small_sweep import SMALL, read, results, run_with_an_interruption


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return read(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def alone(sweep: Sweep, tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    """The sweep in one process, interrupted and resumed."""
    with open_executor() as computing:
        return run_with_an_interruption(sweep, tmp_path_factory.mktemp("alone"), computing)


def test_cells_are_runs_that_came_to_their_end(alone: SweepFolder) -> None:
    found = results(alone)
    assert len(found) == 24
    assert {row["ended"] for row in found} == {"completed"}
    assert len({json.dumps(row, sort_keys=True) for row in found}) > 12
    assert all(0 < row["payload_bytes"] <= row["frame_bytes"] for row in found)


def test_two_shards_merge_to_what_one_process_computes(alone: SweepFolder, sweep: Sweep, tmp_path: Path) -> None:
    with open_executor() as computing:
        for index in range(2):
            run_with_an_interruption(sweep, tmp_path / f"part-{index}", computing, Shard(index, 2))
    merged = SweepFolder(sweep, tmp_path / "merged")
    assert merged.merge([tmp_path / "part-0"]) == 12
    assert len(merged.grid.missing()) == 12
    assert merged.merge([tmp_path / "part-0", tmp_path / "part-1"]) == 12
    assert results(merged) == results(alone)


# Ray starts a handful of processes that import all of it: minutes on a busy machine.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "module"), [("local", "json"), ("dask", "distributed"), ("ray", "ray")])
def test_two_workers_compute_what_one_process_does(
    alone: SweepFolder, sweep: Sweep, tmp_path: Path, kind: Kind, module: str
) -> None:
    pytest.importorskip(module, reason=f"{module} is not installed: pip install 'sottovoce[{kind}]'")
    with open_executor(kind, workers=2) as computing:
        assert computing.at_once == 2
        found = run_with_an_interruption(sweep, tmp_path, computing)
    assert results(found) == results(alone)


def test_folders_that_disagree_are_not_merged(alone: SweepFolder, sweep: Sweep, tmp_path: Path) -> None:
    folder = SweepFolder(sweep, tmp_path)
    folder.merge([alone.folder])
    file = next((tmp_path / "cells").iterdir())
    content = json.loads(file.read_text())
    content["result"]["frame_bytes"] += 1
    file.write_text(json.dumps(content))
    with pytest.raises(StateError, match="differ in frame_bytes"):
        folder.merge([alone.folder])
    with pytest.raises(StateError, match="contains no cells"):
        folder.merge([tmp_path / "nothing"])


def test_results_are_tables_for_others(alone: SweepFolder) -> None:
    alone.report()
    with (alone.folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(json.loads((alone.folder / "results.json").read_text())["cells"]) == 24
    assert (rows[0]["contender"], rows[0]["graph.kind"], rows[0]["seed"]) == ("exact", "ring", "0")


def test_a_cell_that_diverges_is_a_result_and_one_that_cannot_run_is_none(tmp_path: Path) -> None:
    text = SMALL.replace("[0.05, 0.1]", "[1e30]").replace("seeds = [0, 1, 2]", "seeds = [0]")
    folder = SweepFolder(read(tmp_path, text), tmp_path / "diverging")
    with open_executor() as computing:
        assert folder.run(computing) == 0
    assert all(row["ended"].startswith("diverged: ") for row in results(folder))
    text = SMALL.replace("samples=80", "samples=-1")
    folder, said = SweepFolder(read(tmp_path, text), tmp_path / "failing"), []
    with open_executor() as computing:
        assert folder.run(computing, Shard(0, 12), say=said.append) == 2
    assert "failed: " in said[0]
    assert len(folder.grid.missing(Shard(0, 12))) == 2


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match="belongs to a cluster"), open_executor("local", address="tcp://1.2.3.4:8786"):
        pass
