"""What a section repeats has been said before, in the same frame."""

from __future__ import annotations

import pytest

from peer.wire.errors import NothingToRepeat
from tests.hostile.frames.forging import TWO, ZEROS, forged, levels, refused, residues, sparse

pytestmark = pytest.mark.usefixtures("implementation")


def test_levels_cannot_repeat_parameters_that_nobody_gave() -> None:
    refused(forged(b"\x09" + bytes(40)), NothingToRepeat)
    refused(forged(ZEROS, b"\x09" + bytes(40)), NothingToRepeat, TWO)


def test_sparse_levels_cannot_either() -> None:
    refused(forged(sparse(31, b"\x08", b"\x09" + bytes(40))), NothingToRepeat)


def test_residues_cannot_repeat_the_parameters_of_levels() -> None:
    refused(forged(levels(bytes(4)), b"\x0b" + bytes(44)), NothingToRepeat, TWO)


def test_a_theta_that_nobody_gave_cannot_be_repeated() -> None:
    refused(forged(residues(bytes(8), tag=0x13)), NothingToRepeat)


def test_a_repair_cannot_repeat_bits_that_nobody_gave() -> None:
    refused(forged(b"\x00\x0c" + bytes(8), kind=3, count=b"\x01"), NothingToRepeat)
