"""A user's own task that does not work: told in seconds, before anything is started, with the line and no traceback."""

from __future__ import annotations

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
    assert told.startswith(f"sotto: error: error in your task: {sentence}{FILE}:")
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
    assert '"ended": "failed: error in your task: KeyError: ' in summary.read_text()


def arguments(command: str, where: str) -> tuple[str, ...]:
    settings = (f"training.task_options.where={where}", "training.label_adjustment=false", "data.skew=0")
    task = ("--task", "tests.train.broken_tasks:make_task", *(word for each in settings for word in ("--set", each)))
    return (command, "--peers", "2", "--no-live", "--rounds", "30", *task)
