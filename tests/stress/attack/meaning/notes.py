"""Notes as bytes (`proto/sottovoce/v1/note.proto`), with nothing of the real writer's honesty."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

EVALUATION, DIVERGED, JOIN, REVOKED = "evaluation", "diverged", "join", "revoked"


class Encoding:
    """How a release writes notes."""

    def __init__(self, protocol: int) -> None:
        """`protocol`: the version of the protocol that it speaks."""
        self.protocol = protocol

    def evaluation(self, peer: int, round_: int, correct: Sequence[int], total: Sequence[int]) -> bytes:
        counts = b"".join(field(4, each) for each in correct) + b"".join(field(5, each) for each in total)
        return field(1, peer) + field(2, round_) + field(3, 1) + counts

    def diverged(self, peer: int, round_: int, reason: str) -> bytes:
        return field(1, peer) + field(2, round_) + b"\x1a" + varint(len(reason.encode())) + reason.encode()

    def nested(self) -> bytes:
        # Groups of an unknown field, each within the one before.
        return b"\x7b" * 30_000 + b"\x7c" * 30_000


def encoding_of(release: Path) -> Encoding:
    """Return the encoding that an installation speaks. The attacker says that it speaks what the others do: until all
    do, members believe what the release before said."""
    newest = re.search(r"^NEWEST = (\d+)", (release / "peer" / "protocol.py").read_text(), re.MULTILINE)
    assert newest is not None
    return Encoding(int(newest[1]))


def field(number: int, value: int) -> bytes:
    """Return an integer field of protobuf; of a larger one than fits, what fits."""
    return varint(number << 3) + varint(min(value, (1 << 64) - 1))


def varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
