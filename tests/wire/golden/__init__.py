"""Frames that must decode for ever, and the messages that they hold.

Each `<name>.bin` was written once by version 1; the message is rebuilt here with integer arithmetic alone, so that no
generator of random numbers has to stay as it is. `python -m tests.wire.golden` writes the files that do not exist yet;
it never changes one that does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from peer.compress.layout import Layout
from peer.compress.payload import (
    Dense,
    LayerPayload,
    Levels,
    MoreBits,
    Residues,
    Rounding,
    Sparse,
    ValueType,
    WholeIntegers,
)
from peer.wire import Message, MessageKind, RepairWish
from tests.wire.fuzzing import as_type

FOLDER = Path(__file__).parent
LAYOUT = Layout.of_sizes([2000, 300, 33, 1, 600])

MANY = Layout.of_sizes([700, 20, 1500, 64, 9, 400, 3000, 64, 1, 900, 64, 2500])
"""Enough layers for several tables in one stream."""

Case = tuple[Message, Message | None]
"""The message, and the earlier one that it is coded against."""


def noise(size: int, seed: int) -> npt.NDArray[np.int64]:
    """Return integers of 24 bits that look random (the middle of a linear congruential sequence)."""
    state = (np.arange(size, dtype=np.uint64) + np.uint64(1 + 7919 * seed)) * np.uint64(0x9E3779B97F4A7C15)
    state ^= state >> np.uint64(29)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    return (state >> np.uint64(40)).astype(np.int64)


def heaped(size: int, bits: int, seed: int) -> npt.NDArray[np.unsignedinteger]:
    """Return codes of `bits` bits in a bell around the middle."""
    total = sum(noise(size, 10 * seed + i) for i in range(6))
    spread = 2**bits
    return codes(total * spread // (6 << 24), bits)


def codes(values: npt.NDArray[np.int64], bits: int) -> npt.NDArray[np.unsignedinteger]:
    return (values % 2**bits).astype(np.uint8 if bits <= 8 else np.uint16)


def reals(size: int, seed: int) -> npt.NDArray[np.float64]:
    """Return numbers of either sign and many magnitudes, with zeros of both signs and a subnormal of every type."""
    values = (noise(size, seed) - 2**23) / 2.0 ** (10 + noise(size, seed + 1) % 20)
    values[::17] = 0.0
    values[5::17] = -0.0
    values[9::170] = 5e-324
    return values


def dense(size: int, value_type: ValueType, seed: int) -> Dense:
    return as_type(reals(size, seed), value_type)


def some(size: int, one_in: int, seed: int) -> npt.NDArray[np.int64]:
    where = np.flatnonzero(noise(size, seed) % one_in == 0)
    return where if where.size else np.array([size // 2])


def sparse(size: int, one_in: int, seed: int, bits: int | None = None) -> Sparse:
    where = some(size, one_in, seed)
    if bits is None:
        return Sparse(size, where, dense(where.size, ValueType.FLOAT32, seed))
    top = 2 ** (bits - 1) - 1
    return Sparse(size, where, Levels(0.25, top, -top, 1, bits, heaped(where.size, bits, seed)))


def four_levels(size: int, seed: int) -> Sparse:
    where = some(size, 30, seed)
    return Sparse(size, where, Levels(0.25, 1, -3, 2, 2, codes(1 + noise(where.size, seed) % 5 // 2, 2)))


def residues(size: int, bits: int, seed: int, *, theta: float = 2.0, check: int | None = None) -> Residues:
    return Residues(theta, bits, Rounding.DITHER, codes(noise(size, seed), bits), check)


def gossip(*layers: LayerPayload, round_: int = 300) -> Message:
    return Message(MessageKind.GOSSIP, 5, round_, 1, 1 / 3, 0.8437219, layers)


def cases() -> dict[str, Case]:
    """Return every golden message by the name of its file."""
    sizes = LAYOUT.sizes
    found: dict[str, Case] = {}
    for value_type in ValueType:
        layers = (dense(size, value_type, 3 + i) for i, size in enumerate(sizes))
        found[f"dense-{value_type.name.lower()}"] = gossip(*layers), None
    for bits in range(1, 17):
        scale = 0.1 if bits == 7 else 0.75
        layers = (Levels(scale, 3, -1, 1, bits, heaped(size, bits, bits + i)) for i, size in enumerate(sizes))
        found[f"levels-{bits}"] = gossip(*layers), None
        layers = (residues(size, bits, bits + i, check=12345678901234567890 - i) for i, size in enumerate(sizes))
        found[f"residues-{bits}"] = gossip(*layers), None
    for one_in in (200, 30, 5, 2, 1):
        found[f"sparse-1-in-{one_in}"] = gossip(*(sparse(size, one_in, 7) for size in sizes)), None
        found[f"sparse-1-in-{one_in}-levels"] = gossip(*(sparse(size, one_in, 8, 4) for size in sizes)), None
    found["sparse-four-levels"] = gossip(*(four_levels(size, 9) for size in sizes)), None
    nothing = (Sparse(size, np.zeros(0, np.int64), dense(0, ValueType.FLOAT32, 1)) for size in sizes)
    found["sparse-empty"] = gossip(*nothing), None
    clustered = (Sparse(s, np.arange(s // 3, s // 2 + 1), residual_levels(s // 2 + 1 - s // 3)) for s in sizes)
    found["sparse-clustered"] = gossip(*clustered), None
    runs = (Levels(1.0, 1, 0, 1, 9, codes(np.arange(size) // 300 * 37, 9)) for size in (20000,))
    found["long-runs"] = gossip(*runs), None
    many = (Levels(1.0, 1, 0, 1, 8, heaped(size, 8, 3)) for size in (20000,))
    found["many-lanes"] = gossip(*many), None
    one = tuple(residues(size, 8, 40 + i) for i, size in enumerate(sizes))
    step = [heaped(size, 4, 60 + i).astype(np.int64) - 8 for i, size in enumerate(sizes)]
    other = tuple(
        Residues(1.5, 8, r.rounding, codes(r.residues.astype(np.int64) + s, 8), None)
        for r, s in zip(one, step, strict=True)
    )
    found["predicted"] = gossip(*other, round_=301), gossip(*one, round_=299)
    spread = [codes(heaped(size, 8, i).astype(np.int64) // (1 + 20 * (i % 3)), 8) for i, size in enumerate(MANY.sizes)]
    found["many-layers-levels"] = gossip(*(Levels(0.5, 3, -1, 1, 8, held) for held in spread)), None
    several = (sparse(size, (4, 40)[i % 2], 3 + i, 4) for i, size in enumerate(MANY.sizes))
    found["many-layers-sparse"] = gossip(*several), None
    scaled = (dense(size, ValueType.FLOAT32, i).values * 8.0 ** -(i % 5) for i, size in enumerate(MANY.sizes))
    found["many-layers-dense"] = gossip(*(Dense(v.astype(np.float32), ValueType.FLOAT32) for v in scaled)), None
    found["nothing"] = Message(MessageKind.NOTHING, 2, 70000, mixing_weight=0.25), None
    found["pair-busy"] = Message(MessageKind.PAIR_BUSY, 2**40, 2**63, 7, 0.1, 0.0), None
    wishes = (RepairWish(0, 8, 4), RepairWish(1, 64, 0), RepairWish(4, 0, 16))
    found["repair-request"] = Message(MessageKind.REPAIR_REQUEST, 2, 12, wanted=wishes), None
    repairs = (MoreBits(8, 4, heaped(2000, 4, 1)), MoreBits(8, 4, heaped(33, 4, 2)), whole(600))
    found["repair"] = Message(MessageKind.REPAIR, 2, 12, layers=repairs, layer_ids=(0, 2, 4)), None
    found["pair-request"] = Message(MessageKind.PAIR_REQUEST, 0, 0, layers=tuple(map(whole_range, sizes))), None
    found["pair-reply"] = Message(MessageKind.PAIR_REPLY, 1, 1, layers=tuple(map(whole_range, sizes))), None
    exponents = Levels(1.0, 1, -128, 1, 8, codes(118 + noise(30, 4) % 7, 8))
    found["part"] = Message(MessageKind.PART, 3, 40, 1, 1 / 8, layers=(exponents, factors(700, 8))), None
    shared = Levels(1.0, 1, -128, 1, 8, codes(np.array([117] * 17 + [121] * 12 + [110]), 8))
    found["part-of-layers"] = Message(MessageKind.PART, 3, 42, 1, 1 / 8, layers=(shared, factors(700, 6))), None
    wider = Levels(1.0, 1, -128, 1, 8, codes(118 + noise(3, 5) % 7, 8))
    found["part-of-another-width"] = Message(MessageKind.PART, 3, 41, 0, 1 / 7, layers=(wider, factors(90, 5))), None
    of_pieces = (sparse(700, 10, 21, 2), sparse(80, 9, 22, 2), dense(7, ValueType.FLOAT32, 23))
    found["part-of-compressed"] = Message(MessageKind.PART, 3, 43, 1, 1 / 4, layers=of_pieces), None
    found["part-of-nothing"] = Message(MessageKind.PART, 0, 1), None
    return found


def factors(size: int, bits: int) -> Levels:
    """Return signed integers in codes of `bits` bits."""
    return Levels(1.0, 1, -(1 << (bits - 1)), 1, bits, heaped(size, bits, 21))


def layout_of(name: str) -> Layout:
    if name.startswith("many-layers"):
        return MANY
    return Layout.of_sizes([20000]) if name in ("long-runs", "many-lanes") else LAYOUT


def residual_levels(size: int) -> Levels:
    return Levels(1 / 3, 255, -255, 1, 9, heaped(size, 9, 5))


def whole(size: int) -> WholeIntegers:
    integers = noise(size, 9) - 2**23
    integers[:2] = (2**63 - 1, -(2**63))
    return WholeIntegers(integers)


def whole_range(size: int) -> Residues:
    return Residues(0.1, 3, Rounding.NEAREST, codes(np.arange(size), 3), None)
