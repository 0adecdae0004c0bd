"""A user's own task that does not work: told in seconds, before anything is started, with the line and no traceback."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli.runner import sotto

FILE = Path(__file__).parents[1] / "train" / "broken_tasks.py"


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("make_task", "KeyError: 'make_task' ("),
        ("model", "KeyError: 'model' ("),
        ("loss", "KeyError: 'loss' ("),
        ("backward", "KeyError: 'backward' ("),
        ("labels", "KeyError: 'labels' ("),
        ("batch", "KeyError: 'batch' ("),
        ("correct", "KeyError: 'correct' ("),
        ("loss-vector", "loss() returned a tensor float32[3]; it must return a scalar tensor ("),
        ("loss-detached", "the loss depends on none of the parameters that are trained ("),
        ("loss-nan", "the loss of the first batch is nan ("),
    ],
)
@pytest.mark.parametrize("command", ["up", "simulate"])
def test_a_task_that_does_not_work_is_told_before_anything_is_started(
    command: str, where: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = sotto(*arguments(command, where))
    assert result.exit_code == 2, result.output
    (told,) = (line for line in result.stderr.splitlines() if line.startswith("sotto: error: "))
    assert told.startswith(f"sotto: error: in your task: {sentence}{FILE}:")
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not list(tmp_path.glob("runs/*")), "no run was begun"


def test_debug_shows_the_traceback_of_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = sotto("--debug", *arguments("simulate", "loss"))
    assert result.exit_code == 2
    assert 'raise KeyError("loss")' in result.stderr
    assert "\nKeyError: 'loss'\n" in result.stderr


def test_a_simulation_whose_task_fails_later_says_so_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = sotto(*arguments("simulate", "later"))
    assert result.exit_code == 2, result.output
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert '"ended": "failed: in your task: KeyError: ' in summary.read_text()


def test_a_loss_that_is_no_number_later_ends_the_run_as_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = sotto(*arguments("simulate", "nan-later"))
    assert result.exit_code == 4, result.output
    assert re.search(r"sotto: error: peer \d: the training loss of round \d is not finite", result.stderr)
    assert "Traceback" not in result.output


def test_a_file_that_one_device_lacks_ends_its_peer_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `sotto up`, which waits for it; a peer of its own waits for its data (test_waiting)."""
    monkeypatch.setenv("SOTTO_PARENT", str(os.getpid()))
    (tmp_path / "run.toml").write_text(
        '[training]\ntask = "tests.examples.own_task:make_task"\n[data]\ndirectory = "sensor"\npartition = "iid"\n'
    )
    kits = tmp_path / "kits"
    assert sotto("init", "cluster", str(kits), "--peers", "2", "--config", str(tmp_path / "run.toml")).exit_code == 0
    result = sotto("run", "--config", str(kits / "peer-1" / "peer.toml"))
    assert result.exit_code == 2, result.output
    nothing = f"sotto: error: data.directory: there is nothing at {kits / 'peer-1' / 'sensor'}; "
    assert f"{nothing}in your task: FileNotFoundError: " in result.stderr
    assert f"{kits / 'peer-1' / 'sensor' / 'train.csv'} not found" in result.stderr
    assert re.search(r"own_task\.py:\d+, in make_task", result.stderr)
    (tmp_path / "run.toml").write_text('[training]\ntask = "mnist"\n[data]\ndirectory = "mnist"\n')
    kits = tmp_path / "built-in"
    assert sotto("init", "cluster", str(kits), "--peers", "2", "--config", str(tmp_path / "run.toml")).exit_code == 0
    result = sotto("run", "--config", str(kits / "peer-1" / "peer.toml"))
    assert result.exit_code == 2, result.output
    assert f"sotto: error: data.directory: {kits / 'peer-1' / 'mnist'} does not exist" in result.stderr


def test_a_batch_larger_than_a_shard_is_told_and_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = ("--set", "training.batch_size=500", "--set", "data.skew=0")
    result = sotto("simulate", "--peers", "3", "--rounds", "2", "--no-live", "--no-save", "--no-baseline", *settings)
    assert result.exit_code == 0, result.output
    (told,) = (record.getMessage() for record in caplog.records if "batch_size" in record.getMessage())
    assert told.startswith("training.batch_size is 500, but peer 0 has 479 training samples")


def arguments(command: str, where: str) -> tuple[str, ...]:
    settings = (f"training.task_options.where={where}", "training.label_adjustment=false", "data.skew=0")
    task = ("--task", "tests.train.broken_tasks:make_task", *(word for each in settings for word in ("--set", each)))
    return (command, "--peers", "2", "--no-live", "--rounds", "30", *task)
