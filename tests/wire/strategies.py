"""Hypothesis strategies for every message that the format can carry."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

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

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite64 = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
weights = st.one_of(st.just(0.0), st.integers(1, 100_000).map(lambda m: 1 / m), st.floats(0, 1), finite64)


@st.composite
def code_arrays(draw: st.DrawFn, size: int, bits: int) -> npt.NDArray[Any]:
    """Codes below 2**bits: arbitrary, constant, or heaped around one value."""
    dtype = np.uint8 if bits <= 8 else np.uint16
    kind = draw(st.sampled_from(["any", "constant", "heap", "runs"]))
    top = 2**bits - 1
    if kind == "any":
        return draw(hnp.arrays(dtype, size, elements=st.integers(0, top)))
    centre = draw(st.integers(0, top))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if kind == "constant":
        return np.full(size, centre, dtype)
    if kind == "runs":
        return np.sort(rng.integers(0, 2**bits, size)).astype(dtype)
    spread = draw(st.sampled_from([0.3, 2.0, 30.0]))
    return np.clip(np.rint(rng.normal(centre, spread, size)), 0, top).astype(dtype)


@st.composite
def dense(draw: st.DrawFn, size: int, value_types: tuple[ValueType, ...] = tuple(ValueType)) -> Dense:
    value_type = draw(st.sampled_from(value_types))
    if draw(st.booleans()):
        # As a model's numbers are distributed, so that the entropy coder takes part.
        values = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(size)
    else:
        values = draw(hnp.arrays(np.float64, size, elements=finite64))
    if value_type is ValueType.FLOAT64:
        return Dense(values, value_type)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
        single[~np.isfinite(single)] = -0.0
        if value_type is ValueType.BFLOAT16:
            single = (single.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        elif value_type is ValueType.FLOAT16:
            single = single.astype(np.float16).astype(np.float32)
            single[~np.isfinite(single)] = 65504.0
    return Dense(single, value_type)


@st.composite
def levels(draw: st.DrawFn, size: int, scalars: st.SearchStrategy[float] = finite32) -> Levels:
    bits = draw(st.integers(1, 16))
    base = draw(st.one_of(st.integers(-(2**16), 2**16), st.integers(-(2**52), 2**52)))
    step = draw(st.one_of(st.integers(1, 3), st.integers(1, 2**35)))
    # scale · level has to stay finite.
    scale = draw(scalars.filter(lambda s: abs(s) * 2**53 < 3e38))
    return Levels(scale, draw(st.integers(1, 2**53)), base, step, bits, draw(code_arrays(size, bits)))


@st.composite
def sparse(draw: st.DrawFn, size: int, scalars: st.SearchStrategy[float] = finite32) -> Sparse:
    count = draw(st.one_of(st.integers(0, size), st.integers(0, min(size, 3))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        where = rng.choice(size, count, replace=False)
    else:
        where = rng.integers(0, size - count + 1) + np.arange(count)
    values = draw(st.one_of(dense(count), levels(count, scalars)))
    return Sparse(size, np.sort(where).astype(np.int64), values)


@st.composite
def residues(draw: st.DrawFn, size: int, scalars: st.SearchStrategy[float] = finite32) -> Residues:
    bits = draw(st.integers(1, 16))
    check = draw(st.one_of(st.none(), st.integers(0, 2**64 - 1)))
    rounding = draw(st.sampled_from(Rounding))
    return Residues(draw(scalars), bits, rounding, draw(code_arrays(size, bits)), check)


@st.composite
def more_bits(draw: st.DrawFn, size: int) -> MoreBits:
    bits = draw(st.integers(1, 16))
    return MoreBits(draw(st.integers(0, 64 - bits)), bits, draw(code_arrays(size, bits)))


@st.composite
def whole_integers(draw: st.DrawFn, size: int) -> WholeIntegers:
    top = draw(st.sampled_from([1, 100, 2**31, 2**63 - 1]))
    return WholeIntegers(draw(hnp.arrays(np.int64, size, elements=st.integers(-top - 1, top))))


def gossiped(size: int, scalars: st.SearchStrategy[float]) -> st.SearchStrategy[LayerPayload]:
    return st.one_of(dense(size), levels(size, scalars), sparse(size, scalars), residues(size, scalars))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = st.one_of(st.integers(1, 40), st.integers(1, 2000))
    return Layout.of_sizes(draw(st.lists(sizes, min_size=1, max_size=4)))


@st.composite
def messages(draw: st.DrawFn) -> tuple[Message, Layout]:
    layout = draw(layouts())
    kind = draw(st.sampled_from(MessageKind))
    layers: tuple[LayerPayload, ...] = ()
    layer_ids: tuple[int, ...] | None = None
    wanted: tuple[RepairWish, ...] = ()
    subset = draw(st.sets(st.integers(0, layout.num_layers - 1)).map(sorted))
    if kind is MessageKind.REPAIR_REQUEST:
        wanted = tuple(RepairWish(i, draw(st.integers(0, 64)), draw(st.integers(0, 16))) for i in subset)
    elif kind is MessageKind.REPAIR:
        layer_ids = tuple(subset)
        layers = tuple(draw(st.one_of(more_bits(layout.sizes[i]), whole_integers(layout.sizes[i]))) for i in layer_ids)
    elif kind is MessageKind.PART:
        is_long = draw(st.booleans())
        left = layout.size * (1 + is_long)
        for _ in range(draw(st.integers(0, layout.num_layers + 1))):
            if left:
                size = draw(st.integers(1, left))
                layers += (draw(levels(size) if is_long else st.one_of(dense(size), levels(size), sparse(size))),)
                left -= size
    elif kind not in (MessageKind.NOTHING, MessageKind.PAIR_BUSY):
        scalars = draw(st.sampled_from([finite32, finite64]))
        layers = tuple(draw(gossiped(size, scalars)) for size in layout.sizes)
    message = Message(
        kind,
        sender=draw(numbers),
        round=draw(numbers),
        phase=draw(numbers),
        mixing_weight=draw(weights),
        push_weight=abs(draw(weights)),
        layers=layers,
        layer_ids=layer_ids,
        wanted=wanted,
    )
    return message, layout
