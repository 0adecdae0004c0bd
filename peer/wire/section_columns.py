"""Sections of a message held by columns, all layers in one call of a kernel, where no stream belongs to one layer.

`section_writer` and `section_reader` are the twins: for whatever they can write and this cannot, this returns None
before anything was written; and whatever is wrong with a frame is for the reader to say, which knows every error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from peer import native
from peer.compress.columns import DENSE, NO_REALS, SPARSE, Columns, columns_of
from peer.compress.payload import FloatArray, LayerPayload, Rounding, ValueType, num_values
from peer.errors import FrameError, LocalProtocolError
from peer.wire import indices, integers
from peer.wire.bits import UnsignedArray, pointer
from peer.wire.grouping import bits_of
from peer.wire.integers import Part, code_type
from peer.wire.plans import Codec, IntegerArray, packed_plan, plan_codes
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
    """Return what `section_writer.encode` returns, or None for what is left to it. `sizes: int64[layers]`."""
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
    # What is large would be copied, and gains nothing.
    return columns_of(layers) if max(map(num_values, layers)) <= LARGE else None


def _described(columns: Columns) -> bytes | None:
    """Return how the first section that has codes gives their parameters, or None for parameters that cannot be."""
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
    """Return all sections, or None where `check_scaled` would not let a scale or θ by."""
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
    """Return the residues or, of layers where it has the smaller entropy, their difference to the earlier ones, and in
    which of the `spans` it is; None where the earlier message does not have the same codes in the same places."""
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


def decode(
    reader: Reader, sizes: IntegerArray, earlier: Sequence[LayerPayload] | None, *, wide: bool, single: bool
) -> Columns | None:
    """Return the layers that the reader is at, of which there are several, and leave it behind what follows them; or
    None, with the reader where it was, for what is left to `section_reader`: any error, too."""
    start = reader.position
    try:
        columns = _decode(reader, sizes, earlier, wide=wide, single=single)
    except FrameError:
        columns = None
    if columns is None:
        reader.position = start
    return columns


_NO_DOUBLES: FloatArray = np.zeros(0, np.float64)

(
    _VALUE_TYPE, _DIVISOR, _BASE, _STEP, _BITS, _RESIDUE_BYTE, _NUM_INDICES, _NUM_REALS, _NUM_CODES, _NUM_FIXED,
    _NUM_ENTROPY, _FIXED_BITS, _LARGEST_ENTROPY, _NUM_PREDICTED, _SUMMARY,
) = range(15)  # fmt: skip


def _decode(
    reader: Reader, sizes: IntegerArray, earlier: Sequence[LayerPayload] | None, *, wide: bool, single: bool
) -> Columns | None:
    if native.lib is None:
        return None
    layers = sizes.size
    of_layers, numbers, scalars = np.empty((3, layers), np.uint8), np.empty((3, layers), np.int64), np.empty(layers)
    summary = np.empty(_SUMMARY, np.int64)
    frame = reader.data[reader.position : reader.end]
    ahead = pointer(frame), len(frame)
    tables = pointer(of_layers), pointer64(numbers)
    sizes_at, summary_at = pointer64(sizes), pointer64(summary)
    read = native.lib.wire_read_sections(
        *ahead, sizes_at, layers, wide, single, *tables, native.pointer(scalars, "double[]"), summary_at
    )
    if read < 0:
        return None
    reader.take(read)
    totals = summary.tolist()
    levels = (totals[_DIVISOR], totals[_BASE], totals[_STEP], totals[_BITS]) if totals[_BITS] else None
    byte = totals[_RESIDUE_BYTE]
    residues = ((byte & 15) + 1, Rounding(byte >> 4 & 3)) if byte >= 0 else None
    bits = totals[_BITS] or (0 if residues is None else residues[0])
    value_type = ValueType(totals[_VALUE_TYPE]) if totals[_VALUE_TYPE] >= 0 else ValueType.FLOAT32
    real_width, _, pattern_type = FORMATS[value_type]
    where: IntegerArray = np.empty(totals[_NUM_INDICES], np.int64)
    codes: UnsignedArray = np.empty(totals[_NUM_CODES], code_type(bits))
    patterns: UnsignedArray = np.empty(totals[_NUM_REALS], pattern_type)
    first, width = (patterns, real_width) if totals[_NUM_REALS] else (codes, bits)
    for pool in (first if first.size else None, None):
        used = native.lib.wire_read_behind(
            *ahead, read, sizes_at, layers, *tables, summary_at, pointer64(where), width,
            native.pointer(pool, "uint8_t[]"), first.itemsize,
        )  # fmt: skip
        if used >= 0:
            break
    else:
        return None
    reader.take(used)
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
    columns = Columns(
        sizes=sizes, forms=forms, counts=counts, scalars=scalars, indices=where, reals=reals, value_type=value_type,
        codes=codes, levels=levels, residues=residues,
        checks=numbers[2].view(np.uint64) if byte >= 0 and byte & 64 else None,
    ).reaching(magnitude)  # fmt: skip
    if totals[_NUM_PREDICTED]:
        before = None if earlier is None else columns_of(earlier)
        if before is None or not _same_places(before, columns):
            return None
        has_codes = ~columns.has_reals
        codes += before.codes * np.repeat(of_layers[2][has_codes], counts[has_codes])
        keep_low_bits(codes, bits)
    return columns


def _pool(
    reader: Reader,
    forms: npt.NDArray[np.uint8],
    counts: IntegerArray,
    of_reals: bool,
    width: int,
    count: int,
    dtype: type[np.unsignedinteger[Any]],
) -> UnsignedArray:
    """Return the integers of the pool that the reader is at: the bit patterns of all reals, or all codes."""
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
