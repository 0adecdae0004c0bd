"""An entropy-coded stream ends where it began, under a table that can be."""

from __future__ import annotations

import pytest

from peer.wire import decode
from peer.wire.errors import MalformedEntropyCode
from tests.hostile.frames.forging import ONE, forged, levels, refused

pytestmark = pytest.mark.usefixtures("implementation")


# One lane, a map with two tokens, and a table: both differences 0, so both tokens have 2^13 slots.
START = bytes((0, 8, 0, 1, 0b11))


def test_the_honest_stream_of_these_tests_decodes() -> None:
    # Eight tokens 0: each halves the state, so 2^16 came from 2^24.
    decode(forged(levels(START + (2**24).to_bytes(4, "little"), codec=1)), ONE)


@pytest.mark.parametrize("state", [2**16, 2**24 + 1, 2**25, 2**32 - 1])
def test_a_stream_that_ends_in_another_state_is_refused(state: int) -> None:
    refused(forged(levels(START + state.to_bytes(4, "little") + bytes(32), codec=1)), MalformedEntropyCode)


@pytest.mark.parametrize("state", [0, 1, 2**16 - 1])
def test_a_state_that_no_encoder_leaves_is_refused(state: int) -> None:
    refused(forged(levels(START + state.to_bytes(4, "little") + bytes(32), codec=1)), MalformedEntropyCode)


def test_a_stream_that_runs_out_of_words_is_refused() -> None:
    refused(forged(levels(START + (2**17).to_bytes(4, "little"), codec=1)), MalformedEntropyCode)


def test_an_unused_lane_is_as_it_began() -> None:
    sixteen = bytes((4, 8, 0, 1, 0b11))
    idle = (2**16).to_bytes(4, "little")
    busy = (2**17).to_bytes(4, "little")
    decode(forged(levels(sixteen + 8 * busy + 8 * idle, codec=1)), ONE)
    refused(forged(levels(sixteen + 8 * busy + 7 * idle + busy, codec=1)), MalformedEntropyCode)


@pytest.mark.parametrize("first", [0b001, 0b1000000])
def test_a_table_whose_weights_leave_their_range_is_refused(first: int) -> None:
    # Rice parameter 3: zigzagged differences of up to 127 either way, from 60.
    upwards = bytes((0x60, 8, 0, 1))
    code = (1 << 2 | 1 << 8) | (0b110 << 9) if first == 1 else (1 << 15 | 1 << 16) | (0b111 << 17)
    refused(forged(levels(upwards + code.to_bytes(4, "little") + bytes(32), codec=1)), MalformedEntropyCode)
