"""From the layers of a message to the sections and pools of a frame.

Three steps: choice of the codes of indices and residues, for all layers at once; the heads of the sections, layer by
layer, with pooled integers set aside; the pools.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from peer import native
from peer.compress.columns import Columns
from peer.compress.norms import NotFiniteError
from peer.compress.payload import (
    Dense,
    LayerPayload,
    Levels,
    MoreBits,
    Residues,
    Sparse,
    ValueType,
    WholeIntegers,
    num_values,
)
from peer.errors import LOWER_RATE, LocalProtocolError
from peer.wire import indices, integers
from peer.wire.bits import IntegerArray, UnsignedArray
from peer.wire.grouping import bits_of
from peer.wire.integers import Part, code_type
from peer.wire.plans import (
    Codec,
    CodingPlan,
    packed_plan,
    plan_change,
    plan_codes,
    plan_floats,
    plan_wide,
)
from peer.wire.reader import varint, zigzag
from peer.wire.sections import (
    CODEC,
    FORMATS,
    PREDICTED,
    SAME,
    SAME_THETA,
    PoolKey,
    Repeats,
    Tag,
    check_level_parameters,
    check_scaled,
    difference,
    predicts,
    rotated,
)
from peer.wire.tokens import counts_of_spans

LARGE = 1 << 16
"""Numbers beyond which the header and the table of a layer's own stream no longer matter, and a copy would."""


def encode(
    layers: Sequence[LayerPayload],
    sizes: Sequence[int],
    previous: Sequence[LayerPayload] | None,
    wide: bool,
    packed: bool,
) -> tuple[list[Part], bool]:
    """Return all sections and pools, and whether any is coded against `previous`, the sender's earlier payloads of the
    same layers.

    `sizes` are those of the layers. Raises `LocalProtocolError` for a payload that no section can hold.
    """
    for payload, size in zip(layers, sizes, strict=True):
        held = payload.residues.size if type(payload) is Residues else num_values(payload)
        if held != size:
            raise LocalProtocolError(f"a payload of {held} numbers was given for a layer of {size}")
    writer = _Writer(wide, pooling=len(layers) > 1, packed=packed)
    sparse = [payload for payload in layers if isinstance(payload, Sparse)]
    for payload in sparse:
        if payload.indices.dtype != np.int64 or num_values(payload.values) != payload.indices.size:
            raise LocalProtocolError("a sparse payload needs int64 indices and one value for each")
    behind: list[Part] = []
    where: Iterator[tuple[int, bytes]] = iter(())
    if sparse:
        counts = np.array([payload.indices.size for payload in sparse], np.int64)
        coded = indices.encode(
            np.concatenate([payload.indices for payload in sparse]),
            counts,
            np.array([payload.size for payload in sparse], np.int64),
            packed,
        )
        where, behind = coded.in_sections(counts), coded.behind
    changes = {} if previous is None else _changes(layers, previous)
    for number, payload in enumerate(layers):
        if isinstance(payload, Sparse):
            code, rice = next(where)
            writer.head(bytes((Tag.SPARSE | code << 3,)) + varint(payload.indices.size) + rice)
            writer.values(payload.values)
        elif isinstance(payload, (Dense, Levels)):
            writer.values(payload)
        elif isinstance(payload, Residues):
            writer.residues(payload, changes.get(number))
        elif isinstance(payload, MoreBits):
            writer.more_bits(payload)
        else:
            writer.whole_integers(payload)
    return [*writer.sections(), *behind, *writer.pooled()], bool(changes)


def needs_double(layers: Sequence[LayerPayload]) -> bool:
    """Return whether a scale or θ is not a float32 exactly, so that all of the frame's are sent as float64."""
    if isinstance(layers, Columns):
        whole = layers.scalars
        if native.lib is not None:
            return not native.lib.wire_are_singles(native.pointer(whole, "double[]"), whole.size)
    else:
        scalars: list[float] = []
        for layer in layers:
            inner = layer.values if isinstance(layer, Sparse) else layer
            if isinstance(inner, Residues):
                scalars.append(inner.theta)
            elif isinstance(inner, Levels):
                scalars.append(inner.scale)
        whole = np.array(scalars, np.float64)
    with np.errstate(over="ignore"):
        rounded = whole.astype(np.float32)
    return bool(np.any(rounded != whole))


_SINGLE, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")

Change = tuple[UnsignedArray, CodingPlan | None]
"""Replacement of residues: their difference to earlier ones, and the plan for coding it alone."""


def _changes(layers: Sequence[LayerPayload], previous: Sequence[LayerPayload]) -> dict[int, Change]:
    """Return the differences to the earlier residues, by layer, wherever they have the smaller entropy."""
    changes: dict[int, Change] = {}
    short: list[tuple[int, UnsignedArray, UnsignedArray]] = []
    for number, (now, before) in enumerate(zip(layers, previous, strict=True)):
        if not isinstance(now, Residues) or not predicts(before, now.bits, now.residues.size):
            continue
        assert isinstance(before, Residues)
        _check_residues(now)
        if now.bits <= 8 and now.residues.size <= LARGE:
            short.append((number, now.residues, difference(now.residues, before.residues, now.bits)))
            continue
        other = plan_change(now.residues, before.residues, now.bits)
        if other.bits_needed < plan_codes(now.residues, now.bits).bits_needed:
            changes[number] = difference(now.residues, before.residues, now.bits), other
    if short:
        sizes = np.array([codes.size for _, codes, _ in short], np.int64)
        alone = bits_of(counts_of_spans(np.concatenate([codes for _, codes, _ in short]), sizes))
        against = bits_of(counts_of_spans(np.concatenate([change for _, _, change in short]), sizes))
        for (number, _, change), smaller in zip(short, (against < alone).tolist(), strict=True):
            if smaller:
                changes[number] = change, None
    return changes


class _Writer:
    """The sections so far, and their pooled integers."""

    def __init__(self, wide: bool, pooling: bool, packed: bool) -> None:
        self.parts: list[Part] = []
        self._heads = bytearray()
        """Heads of sections not followed by a stream yet."""
        self._repeats = Repeats(wide)
        self._pooling, self._packed = pooling, packed
        self._pools: dict[PoolKey, list[np.ndarray]] = {}
        self._scalar = _DOUBLE.pack if wide else _SINGLE.pack

    def head(self, head: bytes | bytearray, stream: Sequence[Part] = ()) -> None:
        """Write the head of a section, and the stream that it has of its own."""
        self._heads += head
        if stream:
            self.parts += [bytes(self._heads), *stream]
            self._heads.clear()

    def values(self, payload: Dense | Levels) -> None:
        if isinstance(payload, Dense):
            self._dense(payload)
            return
        parameters = (payload.divisor, payload.base, payload.step, payload.bits)
        if parameters == self._repeats.levels:
            tag, described = Tag.LEVELS | SAME, b""
        else:
            check_level_parameters(*parameters, LocalProtocolError)
            tag = Tag.LEVELS
            described = bytes((payload.bits - 1,)) + varint(payload.divisor)
            described += varint(zigzag(payload.base)) + varint(payload.step)
            self._repeats.levels = parameters
        check_scaled(payload.scale, parameters, self._repeats.wide, LocalProtocolError)
        codec, stream = self._codes(payload.codes, payload.bits, None)
        self.head(bytes((tag | codec << CODEC,)) + described + self._scalar(payload.scale), stream)

    def _dense(self, payload: Dense) -> None:
        values, value_type = payload.values, payload.value_type
        if values.dtype != (np.float64 if value_type is ValueType.FLOAT64 else np.float32):
            raise LocalProtocolError(f"{value_type.name} values are held as {values.dtype}")
        if not math.isfinite(payload.magnitude):
            raise NotFiniteError(f"a layer holds an infinite value or one that is not a number; {LOWER_RATE}")
        tag = Tag.DENSE | value_type << 3
        if self._pooling and 0 < values.size <= LARGE:
            self._pools.setdefault((False, value_type), []).append(values)
            self.head(bytes((tag | Codec.POOLED << CODEC,)))
            return
        codec, stream = encode_reals(np.ascontiguousarray(values), value_type, packed=self._packed)
        self.head(bytes((tag | codec << CODEC,)), stream)

    def residues(self, payload: Residues, change: Change | None) -> None:
        _check_residues(payload)
        codes, plan = (payload.residues, None) if change is None else change
        codec, stream = self._codes(codes, payload.bits, plan)
        repeats, tag = self._repeats, Tag.RESIDUES | codec << CODEC
        if change is not None:
            tag |= PREDICTED
        described = b""
        parameters = (payload.bits, payload.rounding, payload.check is not None)
        if parameters == repeats.residues:
            tag |= SAME
        else:
            described = bytes((payload.bits - 1 | payload.rounding << 4 | (payload.check is not None) << 6,))
            repeats.residues = parameters
        if payload.theta == repeats.theta:
            tag |= SAME_THETA
        else:
            check_scaled(payload.theta, None, repeats.wide, LocalProtocolError)
            described += self._scalar(payload.theta)
            repeats.theta = payload.theta
        if payload.check is not None:
            described += payload.check.to_bytes(8, "little")
        self.head(bytes((tag,)) + described, stream)

    def more_bits(self, payload: MoreBits) -> None:
        if not 1 <= payload.bits <= 16 or not 0 <= payload.low <= 64 - payload.bits:
            raise LocalProtocolError(f"a repair cannot hold {payload.bits} bits from bit {payload.low} on")
        codec, stream = self._codes(payload.codes, payload.bits, None)
        head = bytearray((Tag.MORE_BITS | codec << CODEC,))
        if (payload.low, payload.bits) == self._repeats.more_bits:
            head[0] |= SAME
        else:
            head += bytes((payload.low, payload.bits - 1))
            self._repeats.more_bits = (payload.low, payload.bits)
        self.head(head, stream)

    def whole_integers(self, payload: WholeIntegers) -> None:
        whole = np.ascontiguousarray(payload.integers)
        if whole.dtype != np.int64:
            raise LocalProtocolError(f"whole integers are held as {whole.dtype}")
        folded = ((whole << 1) ^ (whole >> 63)).view(np.uint64)
        width = max(int(folded.max()).bit_length(), 1)
        plan = packed_plan(folded.size, width) if self._packed else plan_wide(folded, width)
        codec, stream = integers.encode(folded, width, plan)
        self.head(bytes((Tag.WHOLE_INTEGERS | codec << CODEC, width - 1)), stream)

    def _codes(self, codes: UnsignedArray, width: int, plan: CodingPlan | None) -> tuple[Codec, list[Part]]:
        """Return the codec and the stream of a section's codes; pooled ones are checked with their pool."""
        if codes.dtype != code_type(width) or not codes.flags.c_contiguous:
            raise LocalProtocolError(f"codes of {width} bits are held as {codes.dtype}, or not contiguously")
        if self._pooling and 0 < codes.size <= LARGE:
            self._pools.setdefault((True, width), []).append(codes)
            return Codec.POOLED, []
        check_codes(codes, width)
        return integers.encode(codes, width, plan or self._plan(codes, width))

    def _plan(self, codes: UnsignedArray, width: int, sizes: IntegerArray | None = None) -> CodingPlan:
        return packed_plan(codes.size, width) if self._packed else plan_codes(codes, width, sizes)

    def sections(self) -> list[Part]:
        """Return all sections."""
        return [*self.parts, bytes(self._heads)]

    def pooled(self) -> list[Part]:
        """Return all pools, in order."""
        parts: list[Part] = []
        for (is_codes, which), arrays in sorted(self._pools.items(), key=lambda item: item[0]):
            sizes = np.array([array.size for array in arrays], np.int64)
            joined = np.concatenate(arrays) if len(arrays) > 1 else np.ascontiguousarray(arrays[0])
            if is_codes:
                check_codes(joined, which)
                codec, stream = integers.encode(joined, which, self._plan(joined, which, sizes), sizes)
            else:
                codec, stream = encode_reals(joined, ValueType(which), sizes, packed=self._packed)
            parts += [bytes((codec,)), *stream]
        return parts


def encode_reals(
    values: np.ndarray, value_type: ValueType, sizes: IntegerArray | None = None, *, packed: bool
) -> tuple[Codec, list[Part]]:
    """Return the codec and the stream of reals in spans of `sizes`, or in one."""
    width, exponent_bits, _ = FORMATS[value_type]
    patterns = _patterns_of(values, value_type)
    plan = packed_plan(patterns.size, width) if packed else plan_floats(patterns, exponent_bits, sizes)
    if plan.codec is Codec.ENTROPY:
        codec, parts = integers.encode(rotated(patterns, 1), width, plan, sizes)
        if codec is Codec.ENTROPY:
            return codec, parts
        plan = packed_plan(patterns.size, width)
    return integers.encode(patterns, width, plan)


def _patterns_of(values: np.ndarray, value_type: ValueType) -> UnsignedArray:
    """Return the bit patterns of finite values. Raises LocalProtocolError if the value type would lose any."""
    patterns: UnsignedArray
    if value_type is ValueType.FLOAT64:
        return values.view(np.uint64)
    if value_type is ValueType.FLOAT32:
        return values.view(np.uint32)
    if value_type is ValueType.BFLOAT16:
        whole = values.view(np.uint32)
        patterns = (whole >> np.uint32(16)).astype(np.uint16)
        exact = not np.any(whole & np.uint32(0xFFFF))
    else:
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        patterns = half.view(np.uint16)
        exact = bool(np.array_equal(half.astype(np.float32).view(np.uint32), values.view(np.uint32)))
    if not exact:
        raise LocalProtocolError(f"a value is not a {value_type.name} exactly")
    return patterns


def _check_residues(payload: Residues) -> None:
    if not 1 <= payload.bits <= 16 or (payload.check is not None and not 0 <= payload.check < 2**64):
        raise LocalProtocolError("residues have 1 to 16 bits and a check of 64 bits or none")


def check_codes(codes: UnsignedArray, width: int) -> None:
    if width < 8 * codes.itemsize and codes.size and int(codes.max()) >> width:
        raise LocalProtocolError(f"a code exceeds its {width} bits")
