"""Sections of a message held by columns: all layers in one call of a kernel, if no stream belongs to one layer.

`section_writer` and `section_reader` are the twins. For layers that only they can write, this returns None before
anything is written; errors of a frame are left to the reader, which knows all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from peer import native
from peer.compress.columns import DENSE, NO_CODES, NO_REALS, SPARSE, Columns, columns_of
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray, LayerPayload, Rounding, ValueType, num_values
from peer.errors import FrameError, LocalProtocolError
from peer.wire import checksum, indices, integers
from peer.wire.bits import IntegerArray, UnsignedArray, pointer
from peer.wire.grouping import bits_of
from peer.wire.integers import Part, code_type
from peer.wire.message import Message, MessageKind
from peer.wire.plans import Codec, packed_plan, plan_codes
from peer.wire.reader import Reader, varint, zigzag
from peer.wire.rice import pointer64
from peer.wire.section_reader import reals_of
from peer.wire.section_writer import LARGE, check_codes, encode_reals
from peer.wire.sections import FORMATS, check_level_parameters, difference, greatest_level, keep_low_bits, rotated
from peer.wire.tokens import counts_of_spans


def encode(
    layers: Sequence[LayerPayload],
    sizes: IntegerArray,
    previous: Sequence[LayerPayload] | None,
    wide: bool,
    packed: bool,
) -> tuple[list[Part], bool] | None:
    """Return the result of `section_writer.encode`, or None for layers left to it. `sizes: int64[layers]`."""
    columns = _small_columns(layers)
    if native.lib is None or columns is None or not columns.fits(sizes):
        return None
    described = _described(columns)
    if described is None or (columns.reals.size and not math.isfinite(columns.magnitude)):
        return None
    codes, predicted = columns.codes, None
    if previous is not None and columns.residues is not None:
        has_codes = ~columns.has_reals
        changes = _changes(columns, columns.counts[has_codes], previous)
        if changes is None:
            return None
        codes, is_predicted = changes
        predicted = np.zeros(len(columns), np.uint8)
        predicted[has_codes] = is_predicted
    coded = _NO_INDICES
    if int(columns.forms.min()) >= SPARSE:
        coded = indices.encode(columns.indices, columns.counts, sizes, packed)
    elif int(columns.forms.max()) >= SPARSE:
        where = columns.is_sparse
        coded = indices.encode(columns.indices, columns.counts[where], sizes[where], packed)
    sections = _sections(columns, coded, described, wide, predicted)
    if sections is None:
        return None
    parts: list[Part] = [sections, *coded.behind]
    if columns.reals.size:
        held = columns.counts[columns.has_reals]
        codec, stream = encode_reals(columns.reals, columns.value_type, held[held > 0], packed=packed)
        parts += [bytes((codec,)), *stream]
    if codes.size:
        check_codes(codes, columns.bits)
        held = columns.counts[~columns.has_reals] if columns.reals.size else columns.counts
        spans = held[held > 0]
        plan = packed_plan(codes.size, columns.bits) if packed else plan_codes(codes, columns.bits, spans)
        codec, stream = integers.encode(codes, columns.bits, plan, spans)
        parts += [bytes((codec,)), *stream]
    return parts, predicted is not None and bool(predicted.any())


_NO_INDICES = indices.Coded(np.zeros(0, np.uint8), np.zeros(0, np.int64), [])


def _small_columns(layers: Sequence[LayerPayload]) -> Columns | None:
    """Return columns of several layers none of which has a stream of its own, or None."""
    if len(layers) < 2:
        return None
    if isinstance(layers, Columns):
        return layers if int(layers.counts.max()) <= LARGE else None
    # Large layers would be copied, and gain nothing.
    return columns_of(layers) if max(map(num_values, layers)) <= LARGE else None


def _described(columns: Columns) -> bytes | None:
    """Return the parameters of codes as in the first section that has codes, or None for impossible ones."""
    if columns.levels is not None:
        divisor, base, step, bits = columns.levels
        check_level_parameters(divisor, base, step, bits, LocalProtocolError)
        return bytes((bits - 1,)) + varint(divisor) + varint(zigzag(base)) + varint(step)
    if columns.residues is None:
        return b""
    bits, rounding = columns.residues
    return bytes((bits - 1 | rounding << 4 | (columns.checks is not None) << 6,)) if 1 <= bits <= 16 else None


def _sections(
    columns: Columns, coded: indices.Coded, described: bytes, wide: bool, predicted: np.ndarray | None
) -> Part | None:
    """Return all sections, or None if `check_scaled` would refuse a scale or θ."""
    assert native.lib is not None
    # Tags, a count, a scalar and a check for each; and no best Rice code takes 64 bits a gap.
    room = (len(columns) + 2) * (28 + len(described)) + 8 * coded.gaps.size
    out = np.empty(room, np.uint8)
    written = native.lib.wire_write_sections(
        len(columns), pointer(columns.forms), pointer64(columns.counts), pointer(coded.codes), pointer64(coded.gaps),
        columns.value_type, native.ffi.from_buffer("uint8_t[]", described), len(described),
        native.pointer(columns.scalars, "double[]"), float(greatest_level(columns.levels)), wide,
        native.pointer(columns.checks, "uint64_t[]"), native.pointer(predicted, "uint8_t[]"), pointer(out), room,
    )  # fmt: skip
    assert written != -1, "every section has room"
    return out[:written].data if written >= 0 else None


def _changes(
    columns: Columns, spans: IntegerArray, previous: Sequence[LayerPayload]
) -> tuple[UnsignedArray, np.ndarray] | None:
    """Return the residues or, in layers where it has the smaller entropy, their difference to the earlier ones, and the
    `spans` in which it is; None if the earlier message does not have the same codes in the same places."""
    before = columns_of(previous)
    if columns.bits > 8 or before is None or not _same_places(before, columns):
        return None
    change = difference(columns.codes, before.codes, columns.bits)
    smaller = bits_of(counts_of_spans(change, spans)) < bits_of(counts_of_spans(columns.codes, spans))
    if smaller.all():
        return change, smaller
    return np.where(np.repeat(smaller, spans), change, columns.codes), smaller


def _same_places(before: Columns, now: Columns) -> bool:
    """Whether both have residues of as many bits in the same places."""
    return (
        before.residues is not None
        and before.bits == now.bits
        and np.array_equal(before.forms, now.forms)
        and np.array_equal(before.sizes, now.sizes)
    )


def decode(data: memoryview, layout: Layout, previous: Message | None, *, single: bool) -> Message | None:
    """Return the message of a frame that has all layers of the layout, of which there are several; or None for frames
    left to `frame` and `section_reader`, all errors among them. `data: uint8[n]`, no longer than a frame may be."""
    try:
        return _decode(data, layout, previous, single=single)
    except FrameError:
        return None


_NO_DOUBLES: FloatArray = np.zeros(0, np.float64)
_KINDS, _VALUE_TYPES, _ROUNDINGS = tuple(MessageKind), tuple(ValueType), tuple(Rounding)

(
    _VALUE_TYPE, _DIVISOR, _BASE, _STEP, _BITS, _RESIDUE_BYTE, _NUM_INDICES, _NUM_REALS, _NUM_CODES, _NUM_FIXED,
    _NUM_ENTROPY, _FIXED_BITS, _LARGEST_ENTROPY, _NUM_PREDICTED, _KIND, _HAS_EARLIER, _SENDER, _ROUND, _PHASE,
    _EARLIER_ROUND, _EARLIER_PHASE, _SUMMARY,
) = range(22)  # fmt: skip


def _decode(data: memoryview, layout: Layout, previous: Message | None, *, single: bool) -> Message | None:
    layers = layout.num_layers
    if native.lib is None or layers < 2 or not (checksum.IS_FAST or checksum.is_right(data)):
        return None
    of_layers, numbers, scalars = np.empty((3, layers), np.uint8), np.empty((3, layers), np.int64), np.empty(layers)
    summary, weights = native.ffi.new("int64_t[]", _SUMMARY), native.ffi.new("double[2]")
    frame, sizes, tables = pointer(data), pointer64(layout.size_array), (pointer(of_layers), pointer64(numbers))
    end = len(data) - checksum.BYTES
    read = native.lib.wire_read_frame(
        frame, len(data), sizes, layers, single, *tables, native.pointer(scalars, "double[]"), weights, summary
    )
    if read < 0:
        return None
    totals = cast("list[int]", native.ffi.unpack(summary, _SUMMARY))
    levels = (totals[_DIVISOR], totals[_BASE], totals[_STEP], totals[_BITS]) if totals[_BITS] else None
    byte = totals[_RESIDUE_BYTE]
    residues = ((byte & 15) + 1, _ROUNDINGS[byte >> 4 & 3]) if byte >= 0 else None
    bits = totals[_BITS] or (0 if residues is None else residues[0])
    value_type = _VALUE_TYPES[totals[_VALUE_TYPE]] if totals[_VALUE_TYPE] >= 0 else ValueType.FLOAT32
    real_width, _, pattern_type = FORMATS[value_type]
    where: IntegerArray = np.empty(totals[_NUM_INDICES], np.int64)
    codes: UnsignedArray = np.empty(totals[_NUM_CODES], code_type(bits)) if bits else NO_CODES
    patterns: UnsignedArray = np.empty(totals[_NUM_REALS], pattern_type) if totals[_NUM_REALS] else NO_CODES
    first, width = (patterns, real_width) if totals[_NUM_REALS] else (codes, bits)
    indices_at = pointer64(where)
    for pool in (first if first.size else None, None):
        used = native.lib.wire_read_behind(
            frame, end, read, sizes, layers, *tables, summary, indices_at, width,
            native.pointer(pool, "uint8_t[]"), first.itemsize,
        )  # fmt: skip
        if used >= 0:
            break
    else:
        return None
    reader = Reader(data, read + used, end)
    forms, counts = of_layers[0], numbers[0]
    reals, magnitude = NO_REALS, 0.0
    if patterns.size:
        if pool is None:
            patterns = _pool(reader, forms, counts, True, real_width, patterns.size, pattern_type)
        reals, magnitude = reals_of(patterns, value_type)
    elif value_type is ValueType.FLOAT64:
        reals = _NO_DOUBLES
    if codes.size and pool is not codes:
        codes = _pool(reader, forms, counts, False, bits, codes.size, code_type(bits))
    if reader.left:
        return None
    columns = Columns(
        sizes=layout.size_array, forms=forms, counts=counts, scalars=scalars, indices=where, reals=reals,
        value_type=value_type, codes=codes, levels=levels, residues=residues,
        checks=numbers[2].view(np.uint64) if byte >= 0 and byte & 64 else None,
    ).reaching(magnitude)  # fmt: skip
    sender = totals[_SENDER]
    if totals[_HAS_EARLIER] or totals[_NUM_PREDICTED]:
        named = sender, totals[_EARLIER_ROUND], totals[_EARLIER_PHASE]
        if not totals[_HAS_EARLIER] or not _undo_changes_(columns, of_layers[2], previous, named):
            return None
    return Message(_KINDS[totals[_KIND]], sender, totals[_ROUND], totals[_PHASE], weights[0], weights[1], columns)


def _undo_changes_(
    columns: Columns, predicted: npt.NDArray[np.uint8], previous: Message | None, named: tuple[int, int, int]
) -> bool:
    """Turn differences to the codes of the earlier message, in layers that are `predicted`, into codes; or return False
    if the earlier message is not that named by sender, round and phase, or has other codes."""
    if previous is None or (previous.sender, previous.round, previous.phase) != named:
        return False
    before = None if previous.layer_ids is not None else columns_of(previous.layers)
    if before is None or not _same_places(before, columns):
        return False
    has_codes = ~columns.has_reals
    codes = columns.codes
    codes += before.codes * np.repeat(predicted[has_codes], columns.counts[has_codes])
    keep_low_bits(codes, columns.bits)
    return True


def _pool(
    reader: Reader,
    forms: npt.NDArray[np.uint8],
    counts: IntegerArray,
    of_reals: bool,
    width: int,
    count: int,
    dtype: type[np.unsignedinteger[Any]],
) -> UnsignedArray:
    """Return the integers of the pool at the reader's position: the bit patterns of all reals, or all codes."""
    assert native.lib is not None
    out: UnsignedArray = np.empty(count, dtype)
    ahead = reader.data[reader.position : reader.end]
    used = native.lib.wire_read_pool(
        pointer(ahead), len(ahead), pointer(forms), pointer64(counts), forms.size, of_reals, width, count, pointer(out),
        out.itemsize,
    )  # fmt: skip
    if used >= 0:
        reader.take(used)
        return out
    codec = reader.byte()
    held = counts[((forms & 3) == DENSE) == of_reals]
    integers_of = integers.decode(reader, codec, width, dtype, held[held > 0])
    return rotated(integers_of, width - 1) if of_reals and codec == Codec.ENTROPY else integers_of
