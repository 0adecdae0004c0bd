"""What the programs that measure share: options that follow from a description, and rows that are kept."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from peer.errors import ConfigError
from peer.lab.description import read_description
from peer.lab.grid import one_by_one
from tools.grid import Lines, Program, write_rows
from tools.robustness_study import ATTACKS

JOBS = sorted((Path(__file__).resolve().parents[2] / "tools" / "jobs").glob("*.toml"))

SMALL = """
closed = ["models"]
settings = "change the job"
job = ["run.rounds=5"]
[axes]
seeds = [0, 1]
skews = ["0", "0.8"]
[repeated]
models = ["stay", "travel"]
[options]
rate = { default = 0.5 }
limit = { kind = "int" }
out = { kind = "path" }
real = { default = false }
"""


def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> dict[str, object]:
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.setattr(sys, "argv", ["small", *words])
    return vars(read_description(Program, tmp_path / "small.toml").parse("A program."))


def test_without_options_a_program_takes_what_its_description_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert parsed(monkeypatch, tmp_path) == {
        "seeds": (0, 1),
        "skews": ("0", "0.8"),
        "models": ("stay", "travel"),
        "rate": 0.5,
        "limit": None,
        "out": None,
        "real": False,
        "set": [],
    }


def test_options_have_the_kinds_of_what_they_replace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--seeds", "3,4", "--skews", "0.5", "--models", "travel", "--rate", "1", "--limit", "7", "--out", "x"]
    assert parsed(monkeypatch, tmp_path, *words, "--real", "--set", "a=1") == {
        "seeds": (3, 4),
        "skews": ("0.5",),
        "models": ["travel"],
        "rate": 1.0,
        "limit": 7,
        "out": Path("x"),
        "real": True,
        "set": ["a=1"],
    }


@pytest.mark.parametrize("words", [("--models", "go"), ("--seeds", "many"), ("--limit", "0.5")])
def test_what_an_option_does_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, tmp_path, *words)


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.stem)
def test_every_description_can_be_read_and_its_job_is_a_configuration(file: Path) -> None:
    Program.named(file.stem).config()


def test_an_attack_on_privacy_is_one_of_the_study_of_attacks() -> None:
    assert Program.named("privacy").options["attack"].choices == ATTACKS


def test_rows_in_lines_are_not_measured_again_and_failures_are(tmp_path: Path) -> None:
    def run(cells: list[int], broken: int) -> list[str]:
        def measure(cell: int) -> dict[str, int]:
            if cell == broken:
                raise ConfigError("is broken")
            return {"key": cell, "square": cell * cell}

        said: list[str] = []
        grid = Lines(cells, tmp_path / "rows" / "rows.jsonl", lambda cell: cell, lambda row: row["key"])
        outcomes = one_by_one(grid.missing(), lambda at, cell: said.append(f"{at}: {cell}"), measure)
        failed = grid.run(outcomes, lambda _, row: str(row["square"]), lambda _, text: said.append(text))
        assert failed == ("failed: is broken" in said)
        assert [cell for cell, _ in grid.rows()] == [cell for cell in cells if cell != broken]
        return said

    assert run([2, 3], broken=3) == ["0: 2", "4", "1: 3", "failed: is broken"]
    assert run([3, 4, 2], broken=0) == ["0: 3", "9", "1: 4", "16"]
    lines = (tmp_path / "rows" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == [2, 3, 4]


def test_rows_are_written_where_a_file_is_named(tmp_path: Path) -> None:
    @dataclass
    class Row:
        figure: float

    write_rows([Row(0.5)], None)
    write_rows([Row(0.5)], tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"figure": 0.5}]
