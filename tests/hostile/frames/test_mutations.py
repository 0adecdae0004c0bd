"""Honest frames with one thing changed, sealed again: each is refused as what it is, or decodes to something honest."""

from __future__ import annotations

import numpy as np
import pytest

from peer.errors import FrameError
from peer.wire import decode, encode
from tests.hostile.frames.forging import sealed
from tests.wire.comparing import assert_same
from tests.wire.golden import FOLDER, cases, layout_of

CASES = cases()
CHOSEN = (
    "predicted",
    "sparse-1-in-30",
    "sparse-1-in-5-levels",
    "residues-3",
    "levels-9",
    "long-runs",
    "repair",
    "dense-float16",
    "many-layers-levels",
)
pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("name", CHOSEN)
def test_a_changed_byte_is_refused_or_makes_another_honest_message(name: str) -> None:
    body = (FOLDER / f"{name}.bin").read_bytes()[:-4]
    rng = np.random.default_rng(len(body))
    # The beginning, where the fields are, and a sample of the rest.
    positions = [*range(3, 120), *rng.integers(120, len(body), 60).tolist()]
    for position in positions:
        for change in (0xFF, 1 << position % 8):
            mutated = bytearray(body)
            mutated[position] ^= change
            _check(bytes(mutated), name)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_frame_cut_anywhere_is_refused(name: str) -> None:
    body = (FOLDER / f"{name}.bin").read_bytes()[:-4]
    rng = np.random.default_rng(1)
    layout, previous = layout_of(name), CASES[name][1]
    for length in [*range(4, 80), *rng.integers(80, len(body), 60).tolist()]:
        with pytest.raises(FrameError):
            decode(sealed(body[:length]), layout, previous=previous)


@pytest.mark.parametrize("name", CHOSEN)
def test_inflated_numbers_are_refused_or_make_another_honest_message(name: str) -> None:
    body = (FOLDER / f"{name}.bin").read_bytes()[:-4]
    for position in range(4, 100):
        for spelled in (b"\xff\x7f", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01"):
            _check(body[:position] + spelled + body[position + 1 :], name)


def _check(body: bytes, name: str) -> None:
    layout, previous = layout_of(name), CASES[name][1]
    try:
        message = decode(sealed(body), layout, previous=previous)
    except FrameError:
        return
    assert_same(decode(encode(message, layout, previous=previous), layout, previous=previous), message)
