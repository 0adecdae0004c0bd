"""The file of a sweep and its cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.errors import ConfigError
from peer.lab.sweep.sweep import cells
from tests.lab.sweep.small_sweep import SMALL, read


def test_every_combination_is_a_cell(tmp_path: Path) -> None:
    found = cells(read(tmp_path))
    assert len(found) == len({cell.key for cell in found}) == 3 * 2 * 2 * 2
    assert found[1].describe() == "exact, kind ring, learning_rate 0.1, seed 0"


def test_a_cell_that_the_file_means_otherwise_has_another_key(tmp_path: Path) -> None:
    before = cells(read(tmp_path))
    after = cells(read(tmp_path, SMALL.replace("run.rounds=4", "run.rounds=5")))
    assert not {cell.key for cell in before} & {cell.key for cell in after}
    more = cells(read(tmp_path, SMALL.replace("[0.05, 0.1]", "[0.05, 0.1, 0.2]")))
    assert {cell.key for cell in before} < {cell.key for cell in more}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("peers = 4", "peers = 0", "peers"),
        ("peers = 4", "peers = 4\nprofiles = []", "profiles"),
        ("[0.05, 0.1]", "[0.05, -1.0]", "learning_rate"),
        ("[0.05, 0.1]", "[0.05, 0.05]", "is the same run as exact, kind ring, learning_rate 0.05, seed 0"),
        ('"graph.kind"', '"graph.sort"', "sort"),
        ('"run.rounds=4"', '"run.rounds=4", "training.precision=fastest"', "cells could not be compared"),
        ("peers = 4", "peers = ", "TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        cells(read(tmp_path, SMALL.replace(old, new)))
