"""A study in two parts, run by two processes and merged."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from peer.errors import StateError
from peer.lab.study.folder import StudyFolder
from peer.lab.study.race_folder import RaceFolder
from peer.lab.study.row import Cell
from peer.ops.executors import Shard
from tests.lab.study.small_study import SMALL_RACE, read, result

pytestmark = pytest.mark.usefixtures("warm_python")

OURS = ("--only", "sgp", "--only", "allreduce")


def command(*words: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "peer", "lab", "study", *words],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


@pytest.mark.timeout(600)
def test_two_processes_train_halves_of_a_race_that_merge_to_the_whole(tmp_path: Path) -> None:
    (tmp_path / "race.toml").write_text(SMALL_RACE.replace("skews = [0.8]", "skews = [0.8]\nseeds = [0, 1]"))
    parts = [
        command("run", "race.toml", "--curves", *OURS, "--shard", f"{part}/2", "--out", f"part-{part}", folder=tmp_path)
        for part in range(2)
    ]
    for process in parts:
        assert "[2/2" in finished(process)
    finished(command("run", "race.toml", "--curves", *OURS, "--out", "whole", folder=tmp_path))
    finished(command("merge", "race.toml", "part-0", "part-1", "--out", "merged", folder=tmp_path))

    def points(folder: str) -> dict[str, object]:
        files = (tmp_path / folder / "curves").glob("*.json")
        return {file.name: json.loads(file.read_text())["points"] for file in files}

    assert sorted(points("whole")) == [f"{name}--0.8--{seed}.json" for name in ("allreduce", "sgp") for seed in (0, 1)]
    assert points("merged") == points("whole")
    assert not points("part-0").keys() & points("part-1").keys()
    # Nothing is left to do for either part.
    again = command(
        "run", "race.toml", "--curves", *OURS, "--shard", "0/2", "--out", "merged", "--json", folder=tmp_path
    )
    assert "[1/" not in finished(again)


def test_shards_share_the_cells_and_a_cell_counts_once(tmp_path: Path) -> None:
    study = read(tmp_path)
    halves = [StudyFolder(study, tmp_path / f"part-{part}").cells().missing(Shard(part, 2)) for part in range(2)]
    names = [[(contender.name, profile) for contender, profile, _ in half] for half in halves]
    assert [len(half) for half in names] == [2, 2]
    assert not {*names[0]} & {*names[1]}
    for part, half in enumerate(halves):
        for contender, profile, seed in half:
            measured = Cell(
                contender=contender.name, profile=profile, seed=seed, step_s=0.5, peers=4, commit="c", load=1.0,
                others_cpus=0.0, result=result(round_s=1.0 + part),
            )  # fmt: skip
            measured.write(tmp_path / f"part-{part}" / "cells" / f"{contender.name}--{profile}--{seed}.json")
    merged = StudyFolder(study, tmp_path / "merged")
    parts = [tmp_path / "part-0", tmp_path / "part-1"]
    assert merged.merge(parts) == 4
    assert merged.merge(parts) == 0
    assert merged.cells().missing() == []
    twice = next((tmp_path / "part-1" / "cells").iterdir())
    replace(Cell.read(twice), load=2.0).write(twice)
    with pytest.raises(StateError, match="two measurements of one cell"):
        merged.merge(parts)
    with pytest.raises(StateError, match="contains no cells"):
        merged.merge([tmp_path / "elsewhere"])


def test_curves_that_a_shard_has_are_not_trained_by_the_other(tmp_path: Path) -> None:
    race = RaceFolder(read(tmp_path, SMALL_RACE), tmp_path)
    halves = [[each[0].name for each in race.curves().missing(Shard(part, 2))] for part in range(2)]
    assert halves == [["sgp", "ddp", "local-sgd"], ["allreduce", "powersgd", "diloco"]]
