"""Bits, divisors, steps and maps lie in their ranges."""

from __future__ import annotations

import pytest

from peer.compress.layout import Layout
from peer.wire import decode
from peer.wire.errors import ParameterOutOfRange
from peer.wire.reader import varint
from tests.hostile.frames.forging import ONE, TWO, forged, levels, refused, residues

pytestmark = pytest.mark.usefixtures("implementation")

LARGE = Layout.of_sizes([600])


@pytest.mark.parametrize("bits", [17, 128, 256])
def test_levels_have_at_most_sixteen_bits(bits: int) -> None:
    refused(forged(levels(bytes(40), bits=bits)), ParameterOutOfRange)


@pytest.mark.parametrize(
    "tail", [b"\x00\x0d\x01", b"\x07\x0d\x00", varint(2**53 + 1) + b"\x0d\x01", varint(2**64 - 1) + b"\x0d\x01"]
)
def test_divisors_and_steps_of_zero_or_without_end_are_refused(tail: bytes) -> None:
    refused(forged(levels(bytes(4), tail=tail)), ParameterOutOfRange)


@pytest.mark.parametrize("form", [0x37, 0x87, 0xFF])
def test_unknown_roundings_and_flags_of_residues_are_refused(form: int) -> None:
    refused(forged(residues(bytes(8), form=form)), ParameterOutOfRange)


@pytest.mark.parametrize("bits", [b"\x08\x10", b"\x08\xff", b"\x40\x00", b"\x39\x07", b"\xff\x00"])
def test_repairs_of_bits_that_an_integer_has_not_are_refused(bits: bytes) -> None:
    refused(forged(b"\x00\x04" + bits + bytes(16), kind=3, count=b"\x01"), ParameterOutOfRange)


@pytest.mark.parametrize("width", [64, 255])
def test_whole_integers_have_at_most_sixty_four_bits(width: int) -> None:
    section = bytes((5, width)) + bytes(64)
    refused(forged(b"\x00" + section, kind=3, count=b"\x01"), ParameterOutOfRange)


@pytest.mark.parametrize(
    "stream",
    [
        bytes((0, 0, 0, 0)),  # e of 0
        bytes((0, 9, 0, 0)),  # e of 9
        bytes((0, 0x48, 0, 0)),  # an unknown bit in the map
        bytes((0, 0x28, 4, 0, 0)),  # as many raw bits as the integers have
        bytes((0, 8, 16, 0)),  # a centre beyond the integers
    ],
)
def test_maps_of_tokens_that_cannot_be_are_refused(stream: bytes) -> None:
    refused(forged(levels(stream + bytes(20), codec=1)), ParameterOutOfRange)


def test_a_bit_of_a_stream_without_meaning_is_refused() -> None:
    decode(forged(levels(bytes((0, 8, 0, 0)), codec=1)), ONE)
    refused(forged(levels(bytes((0x10, 8, 0, 0)), codec=1)), ParameterOutOfRange)


@pytest.mark.parametrize("tables", [1, 17, 256])
def test_several_tables_are_two_to_sixteen(tables: int) -> None:
    refused(forged(levels(bytes((8, 8, 0, tables - 1)) + bytes(300), codec=1)), ParameterOutOfRange, LARGE)


def test_a_span_cannot_name_a_table_that_is_not_there() -> None:
    # Three tables of one token each, and two layers: the honest one names tables 1 and 2, the other one table 3.
    pooled = levels(b"", codec=3), b"\xc9" + bytes(4)
    start, end = bytes((1, 8, 8, 0, 2)), bytes(3)
    decode(forged(*pooled, start + b"\x09" + end, count=b"\x02"), TWO)
    refused(forged(*pooled, start + b"\x0d" + end, count=b"\x02"), ParameterOutOfRange, TWO)
