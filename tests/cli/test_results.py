"""report, export and replay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.runner import sotto
from tests.cli.test_wrong_inputs import scenario
from tests.report.sample_run import write_sample_run


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_report_is_rendered_anew_where_wanted() -> None:
    write_sample_run(Path("runs/digits"))
    assert json.loads(sotto("report", "runs/digits", "--json").stdout) == {"report": "runs/digits/report.html"}
    assert sotto("report", "runs/digits", "-o", "page.html").stdout == "wrote page.html\n"
    assert Path("page.html").read_text() == Path("runs/digits/report.html").read_text()


def test_the_model_of_a_run_is_exported_once() -> None:
    Path("old").mkdir()
    save_file({"w": np.arange(3)}, "old/model.safetensors")
    assert sotto("export", "old", "-o", "new/m.safetensors").exit_code == 0
    assert load_file("new/m.safetensors")["w"].tolist() == [0, 1, 2]
    assert sotto("export", "old", "-o", "new/m.safetensors").exit_code == 2
    assert sotto("export", "old", "-o", "new/m.safetensors", "--force", "--json").exit_code == 0


def test_without_a_folder_the_newest_run_is_taken_and_named() -> None:
    assert "nothing was started here: no peer.toml, no ./runs; start: sotto up" in sotto("report").stderr
    for age, name in enumerate(("new", "old")):
        write_sample_run(Path("runs") / name)
        (Path("runs") / name / "config.toml").touch()
        save_file({name: np.zeros(1)}, Path("runs") / name / "model.safetensors")
        for file in (Path("runs") / name).iterdir():
            os.utime(file, (0, 1000 - age))
    Path("runs/a-sweep/cells").mkdir(parents=True)
    assert sotto("export", "-o", "m.safetensors").stderr == "runs/new, the newest run here\n"
    assert [*load_file("m.safetensors")] == ["new"]
    Path("kits/peer-0/state").mkdir(parents=True)
    Path("kits/peer-0/peer.toml").touch()
    assert sotto("export").stderr.startswith("kits/peer-0/peer.toml, the device here\n")
    result = sotto("report", "--json")
    assert (result.stderr, json.loads(result.stdout)) == (
        "runs/new, the newest run here\n",
        {"report": "runs/new/report.html"},
    )


def test_replay_prints_the_whole_trajectory_as_json() -> None:
    Path("s.json").write_bytes(scenario(rounds=2))
    answer = json.loads(sotto("lab", "replay", "s.json", "--json").stdout)
    assert set(answer) == {"x", "z", "u"}
    assert [len(answer[key]) for key in ("x", "z", "u")] == [3, 3, 3]
    # Node 1 steps toward 1 by a tenth, then both average.
    assert answer["x"][1] == [[0.05], [0.05]]


def test_replay_compares_with_what_the_file_expects() -> None:
    Path("s.json").write_bytes(scenario(expect={"x": [[[0.0], [0.0]], [[0.05], [0.05]]]}))
    result = sotto("lab", "replay", "s.json")
    assert result.exit_code == 0
    assert "sgp: 2 nodes, 1 rounds" in result.stdout
    assert "largest difference from the expected trajectory: " in result.stdout


def test_a_trajectory_that_differs_is_printed_and_fails() -> None:
    Path("s.json").write_bytes(scenario(expect={"x": [[[0.0], [0.0]], [[0.05], [0.06]]]}))
    result = sotto("lab", "replay", "s.json", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["x"][1] == [[0.05], [0.05]]
    assert "differs from the expected trajectory by 0.01" in result.stderr
