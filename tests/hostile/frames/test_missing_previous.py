"""A frame coded against an earlier message is of use only to who holds that message."""

from __future__ import annotations

import numpy as np
import pytest

from peer.compress.payload import Residues, Rounding
from peer.wire import Message, MessageKind, decode
from peer.wire.errors import MissingPrevious
from tests.hostile.frames.forging import ONE, forged, refused, residues

pytestmark = pytest.mark.usefixtures("implementation")


FRAME = forged(residues(bytes(8), tag=0x23), kind=0x20, earlier=b"\x01\x00")


def earlier(bits: int = 8, sender: int = 1, round_: int = 1, phase: int = 0) -> Message:
    codes = np.arange(8, dtype=np.uint8 if bits <= 8 else np.uint16)
    return Message(
        MessageKind.GOSSIP, sender, round_, phase, layers=(Residues(2.0, bits, Rounding.NEAREST, codes, None),)
    )


def test_the_holder_of_the_earlier_message_decodes() -> None:
    layer = decode(FRAME, ONE, previous=earlier()).layers[0]
    assert isinstance(layer, Residues)
    assert layer.residues.tolist() == list(range(8))


def test_who_holds_nothing_is_told_so() -> None:
    refused(FRAME, MissingPrevious)


@pytest.mark.parametrize("other", [{"sender": 2}, {"round_": 2}, {"phase": 1}, {"bits": 7}, {"bits": 9}])
def test_another_message_does_not_do(other: dict[str, int]) -> None:
    refused(FRAME, MissingPrevious, previous=earlier(**other))


def test_a_message_without_layers_does_not_do() -> None:
    refused(FRAME, MissingPrevious, previous=Message(MessageKind.NOTHING, 1, 1))


def test_a_section_cannot_refer_to_what_the_header_does_not_name() -> None:
    refused(forged(residues(bytes(8), tag=0x23)), MissingPrevious, previous=earlier())
