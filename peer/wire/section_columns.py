"""Sections of a message held by columns, all layers in one call of a kernel, where no stream belongs to one layer.

`section_writer` and `section_reader` are the twins: for whatever they can write and this cannot, this returns None
before anything was written; and whatever is wrong with a frame is for the reader to say, which knows every error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from peer import native
from peer.compress.columns import DENSE, SPARSE, Columns, columns_of
from peer.compress.payload import FloatArray, LayerPayload, Rounding, ValueType, num_values
from peer.errors import FrameError, LocalProtocolError
from peer.wire import indices, integers
from peer.wire.bits import UnsignedArray, check_padding, pointer
from peer.wire.grouping import bits_of
from peer.wire.integers import Part, code_type
from peer.wire.plans import Codec, IntegerArray, packed_plan, plan_codes
from peer.wire.reader import Reader, varint, zigzag
from peer.wire.rice import pointer64
from peer.wire.section_reader import decode_reals
from peer.wire.section_writer import LARGE, check_codes, encode_reals
from peer.wire.sections import GREATEST, check_level_parameters, difference, greatest_level, keep_low_bits
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
    if described is None or not _are_scalars(columns, wide) or not math.isfinite(columns.magnitude):
        return None
    has_codes = ~columns.has_reals
    spans = columns.counts[has_codes]
    codes, predicted = columns.codes, np.zeros(0, np.uint8)
    if previous is not None and columns.residues is not None:
        changes = _changes(columns, spans, previous)
        if changes is None:
            return None
        codes, is_predicted = changes
        predicted = np.zeros(len(columns), np.uint8)
        predicted[has_codes] = is_predicted
    coded = indices.Coded(np.zeros(0, np.uint8), np.zeros(0, np.int64), [])
    if columns.is_sparse.any():
        where = columns.is_sparse
        every = bool(where.all())
        counts, of = (columns.counts, sizes) if every else (columns.counts[where], sizes[where])
        coded = indices.encode(columns.indices, counts, of, packed)
    parts: list[Part] = [_sections(columns, coded, described, wide, predicted), *coded.behind]
    if columns.reals.size:
        held = columns.counts[columns.has_reals]
        codec, stream = encode_reals(columns.reals, columns.value_type, held[held > 0], packed=packed)
        parts += [bytes((codec,)), *stream]
    if codes.size:
        check_codes(codes, columns.bits)
        spans = spans[spans > 0]
        plan = packed_plan(codes.size, columns.bits) if packed else plan_codes(codes, columns.bits, spans)
        codec, stream = integers.encode(codes, columns.bits, plan, spans)
        parts += [bytes((codec,)), *stream]
    return parts, bool(predicted.any())


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


def _are_scalars(columns: Columns, wide: bool) -> bool:
    """Whether `check_scaled` lets all scales and θ by."""
    with np.errstate(over="ignore"):
        largest = np.abs(columns.scalars) * float(greatest_level(columns.levels))
    return bool((largest <= GREATEST[wide]).all())


def _sections(columns: Columns, coded: indices.Coded, described: bytes, wide: bool, predicted: np.ndarray) -> bytes:
    assert native.lib is not None
    # Tags, a count, a scalar and a check for each; and no best Rice code takes 64 bits a gap.
    room = (len(columns) + 2) * (28 + len(described)) + 8 * coded.gaps.size
    out = np.empty(room, np.uint8)
    written = native.lib.wire_write_sections(
        len(columns), pointer(columns.forms), pointer64(columns.counts), pointer(coded.codes), pointer64(coded.gaps),
        columns.value_type, native.ffi.from_buffer("uint8_t[]", described), len(described),
        native.pointer(columns.scalars, "double[]"), wide, native.pointer(columns.checks, "uint64_t[]"),
        pointer(predicted) if predicted.size else native.ffi.NULL, pointer(out), room,
    )  # fmt: skip
    assert written >= 0, "every section has room"
    return out[:written].tobytes()


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


(
    _VALUE_TYPE, _DIVISOR, _BASE, _STEP, _BITS, _RESIDUE_BYTE, _NUM_INDICES, _NUM_REALS, _NUM_CODES, _NUM_FIXED,
    _NUM_ENTROPY, _FIXED_BITS, _LARGEST_ENTROPY, _NUM_PREDICTED, _SUMMARY,
) = range(15)  # fmt: skip


def _decode(
    reader: Reader, sizes: IntegerArray, earlier: Sequence[LayerPayload] | None, *, wide: bool, single: bool
) -> Columns | None:
    if native.lib is None:
        return None
    num_layers = sizes.size
    forms, codes_of, predicted = np.empty((3, num_layers), np.uint8)
    counts, places = np.empty((2, num_layers), np.int64)
    scalars, checks = np.empty(num_layers, np.float64), np.empty(num_layers, np.uint64)
    summary = np.empty(_SUMMARY, np.int64)
    frame = reader.data[reader.position : reader.end]
    data = pointer(frame)
    read = native.lib.wire_read_sections(
        data, len(frame), pointer64(sizes), num_layers, wide, single, pointer(forms), pointer64(counts),
        pointer(codes_of), pointer64(places), native.pointer(scalars, "double[]"),
        native.pointer(checks, "uint64_t[]"), pointer(predicted), pointer64(summary),
    )  # fmt: skip
    if read < 0:
        return None
    reader.take(read)
    totals = summary.tolist()
    is_sparse, has_reals = forms >= SPARSE, (forms & 3) == DENSE
    fixed = reader.take((totals[_FIXED_BITS] + 7) // 8)
    check_padding(fixed, totals[_FIXED_BITS])
    gaps = np.zeros(0, np.int64)
    if totals[_NUM_ENTROPY]:
        of_sparse = counts[is_sparse]
        spans = of_sparse[codes_of[: of_sparse.size] == indices.ENTROPY]
        width = indices.gap_width(totals[_LARGEST_ENTROPY])
        gaps = integers.decode(reader, Codec.ENTROPY, width, np.uint64, spans).view(np.int64)
    where = np.empty(totals[_NUM_INDICES], np.int64)
    if where.size and native.lib.wire_read_indices(
        data, len(frame), pointer64(sizes), num_layers, pointer(forms), pointer64(counts), pointer(codes_of),
        pointer64(places), pointer(fixed), len(fixed), pointer64(gaps), pointer64(where),
    ):  # fmt: skip
        return None
    value_type = ValueType(totals[_VALUE_TYPE]) if totals[_VALUE_TYPE] >= 0 else ValueType.FLOAT32
    reals: FloatArray = np.zeros(0, np.float64 if value_type is ValueType.FLOAT64 else np.float32)
    magnitude = 0.0
    if totals[_NUM_REALS]:
        held = counts[has_reals]
        reals, magnitude = decode_reals(reader, reader.byte(), value_type, held[held > 0])
    levels = (totals[_DIVISOR], totals[_BASE], totals[_STEP], totals[_BITS]) if totals[_BITS] else None
    byte = totals[_RESIDUE_BYTE]
    residues = ((byte & 15) + 1, Rounding(byte >> 4 & 3)) if byte >= 0 else None
    bits = totals[_BITS] or (0 if residues is None else residues[0])
    codes: UnsignedArray = np.zeros(0, code_type(bits))
    held = counts[~has_reals]
    if totals[_NUM_CODES]:
        codes = integers.decode(reader, reader.byte(), bits, code_type(bits), held[held > 0])
    columns = Columns(
        sizes=sizes, forms=forms, counts=counts, scalars=scalars, indices=where, reals=reals, value_type=value_type,
        codes=codes, levels=levels, residues=residues, checks=checks if byte >= 0 and byte & 64 else None,
    ).reaching(magnitude)  # fmt: skip
    if totals[_NUM_PREDICTED]:
        before = None if earlier is None else columns_of(earlier)
        if before is None or not _same_places(before, columns):
            return None
        codes += before.codes * np.repeat(predicted[~has_reals], held)
        keep_low_bits(codes, bits)
    return columns
