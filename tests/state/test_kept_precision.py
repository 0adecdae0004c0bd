"""The file with the precision that a device chose."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.errors import StateError
from peer.precision_choice import PrecisionChoice
from peer.state.disk import RealDisk
from peer.state.kept_precision import FILE, keep, read
from tests.state.failing_disk import FailingDisk

CHOICE = PrecisionChoice("int8", {"float32": 0.002, "int8": 0.001})


def test_a_choice_is_kept(tmp_path: Path) -> None:
    assert read(RealDisk(tmp_path)) is None
    keep(RealDisk(tmp_path), CHOICE)
    assert read(RealDisk(tmp_path)) == CHOICE


def test_a_power_cut_leaves_all_of_it() -> None:
    disk = FailingDisk()
    keep(disk, CHOICE)
    disk.lose_power()
    assert read(disk) == CHOICE


@pytest.mark.parametrize("text", ["", "[]", '{"precision": "int4"}', '{"precision": "int8", "step_s": {"int8": -1.0}}'])
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(StateError, match=r"precision\.json cannot be read or is damaged.*restore it"):
        read(RealDisk(tmp_path))


def test_what_the_sentence_tells_to_write_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"precision": "bfloat16"}')
    assert read(RealDisk(tmp_path)) == PrecisionChoice("bfloat16")


def test_a_full_disk_is_named() -> None:
    disk = FailingDisk()
    disk.full = True
    with pytest.raises(StateError, match=r"precision\.json: cannot be written"):
        keep(disk, CHOICE)
