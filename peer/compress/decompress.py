"""From payloads back to numbers: the values that every peer, the sender included, must agree on to the bit.

One value is computed as in `levels.level_values`, or was sent as it is; it is then multiplied by the weight, rounded,
and added, rounded again (no fused operations), all in the vector's own float type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.columns import Columns
from peer.compress.float_types import KEPT_AT_ONCE, are_floats, floats_of, store_
from peer.compress.layout import Layout
from peer.compress.levels import add_levels_, are_safe, greatest_level, level_values
from peer.compress.payload import Dense, FloatArray, Kept, LayerPayload, Levels, Payload, Sparse, num_values
from peer.errors import RemoteProtocolError
from peer.native import lib, pointer
from peer.random import Stream


def decompress_layers(payload: Payload, layout: Layout, dtype: npt.DTypeLike) -> FloatArray:
    """Return the flat vector of all layers, float[layout.size].

    Raises TypeError for payloads that need a reference (`compress.modulo` reads those), and RemoteProtocolError for
    values that `dtype` cannot hold.
    """
    vector: FloatArray = np.zeros(layout.size, dtype)
    for part, layer in zip(layout.slices, _checked(payload, layout), strict=True):
        if isinstance(layer, Sparse):
            _check_indices(layer)
            vector[part][layer.indices] = _values(layer.values, vector.dtype)
        else:
            vector[part] = _values(layer, vector.dtype)
    return vector


def add_decompressed_(out: FloatArray, payload: Payload, layout: Layout, scale: float = 1.0) -> None:
    """Add `scale` times the decompressed payload to the flat vector `out`, in place.

    A sparse layer touches only its k coordinates. The result is bit for bit that of adding all of its values, but for a
    −0.0 in `out`, which stays −0.0 where nothing was sent.
    """
    if isinstance(payload, Columns) and _add_columns_(out, payload, layout, scale):
        return
    for part, layer in zip(layout.slices, _checked(payload, layout), strict=True):
        target = out[part]
        if isinstance(layer, Sparse):
            _check_indices(layer)
            _add_sparse_(target, layer.indices, _values(layer.values, out.dtype), scale)
        elif isinstance(layer, Levels):
            add_levels_(target, layer, scale)
        else:
            add_dense_(target, _values(layer, out.dtype), scale)


def add_kept_(out: Kept, payload: Payload, layout: Layout, stream: Stream, scale: float = 1.0) -> None:
    """Do as `add_decompressed_` does. In bfloat16, each number that the payload names is read, changed in float32, and
    rounded as `store_` does: the p-th of layer l by half p of the l-th stream from the given one on."""
    if are_floats(out):
        add_decompressed_(out, payload, layout, scale)
        return
    for number, (part, layer) in enumerate(zip(layout.slices, _checked(payload, layout), strict=True)):
        draws, values = replace(stream, layer=stream.layer + number), layer
        if isinstance(layer, Sparse):
            _check_indices(layer)
            values = layer.values
        for start in range(0, num_values(values), KEPT_AT_ONCE):
            block = slice(start, start + KEPT_AT_ONCE)
            if isinstance(values, Levels):
                few: LayerPayload = replace(values, codes=values.codes[block])
            else:
                few = replace(values, values=values.values[block]) if isinstance(values, Dense) else values
            where = layer.indices[block] if isinstance(layer, Sparse) else block
            sums = floats_of(out[part][where])
            add_dense_(sums, _values(few, sums.dtype), scale)
            rounded = np.empty(sums.size, np.uint16)
            store_(rounded, sums, draws, start)
            out[part][where] = rounded


def add_all_decompressed_(out: FloatArray, terms: Sequence[tuple[Payload, float]], layout: Layout) -> None:
    """Add each payload times its scale to `out`, in order: to the bit what `add_decompressed_` does one by one.

    If whole large layers were sent, part after part gets all of its terms while it is in the cache.
    """
    blocks = _dense_blocks([payload for payload, _ in terms], layout, out.dtype)
    if blocks is None:
        for payload, scale in terms:
            add_decompressed_(out, payload, layout, scale)
        return
    for block, values in blocks:
        for each, (_, scale) in zip(values, terms, strict=True):
            add_dense_(out[block], each, scale)


def add_sum_decompressed_(out: FloatArray, payloads: Sequence[Payload], layout: Layout, scale: float) -> None:
    """Add `scale` times the sum of the payloads to `out`. If whole large layers were sent, no sum of the size of `out`
    is held."""
    blocks = _dense_blocks(payloads, layout, out.dtype)
    if blocks is None:
        total = np.zeros_like(out)
        for payload in payloads:
            add_decompressed_(total, payload, layout)
        add_dense_(out, total, scale)
        return
    for block, values in blocks:
        total = np.zeros_like(out[block])
        for each in values:
            add_dense_(total, each, 1.0)
        add_dense_(out[block], total, scale)


def _dense_blocks(
    payloads: Sequence[Payload], layout: Layout, dtype: np.dtype[Any]
) -> Iterator[tuple[slice, list[FloatArray]]] | None:
    """Return the parts of whole large layers as they fit into the cache, with the values of each payload there; None
    if anything else was sent."""
    if not all(type(each) is tuple and all(isinstance(layer, Dense) for layer in each) for each in payloads):
        return None
    for payload in payloads:
        _checked(payload, layout)
    # All of them before the first is added: values that `dtype` cannot hold are refused.
    layers = [[_values(payload[number], dtype) for payload in payloads] for number in range(layout.num_layers)]
    return (
        (
            slice(start, stop := min(start + _IN_CACHE, part.stop)),
            [each[start - part.start : stop - part.start] for each in values],
        )
        for part, values in zip(layout.slices, layers, strict=True)
        for start in range(part.start, part.stop, _IN_CACHE)
    )


def _add_columns_(out: FloatArray, payload: Columns, layout: Layout, weight: float) -> bool:
    """Add all layers in one call of a kernel, or return False and add nothing."""
    divisor, base, step, bits = payload.levels or (1, 0, 0, 0)
    if (
        lib is None
        or payload.residues is not None
        or out.dtype != np.float32
        or not out.flags.c_contiguous
        or payload.reals.dtype != np.float32
        or not payload.fits(layout.size_array)
        or not are_safe(divisor, base, step, bits, 0.0)
    ):
        return False
    # The kernel checks every index itself: memory must not depend on what was promised.
    outside = lib.add_columns(
        pointer(out, "float[]"), pointer(payload.sizes, "int64_t[]"), pointer(payload.forms, "uint8_t[]"),
        pointer(payload.counts, "int64_t[]"), pointer(payload.scalars, "double[]"), len(payload),
        pointer(payload.indices, "int64_t[]"), pointer(payload.reals, "float[]"), pointer(payload.codes, "uint8_t[]"),
        payload.codes.itemsize, base, step, divisor, greatest_level(base, step, bits), weight,
    )  # fmt: skip
    if outside == 2**64 - 1:  # A level would not be finite in float32; nothing was added.
        return False
    if outside:
        raise RemoteProtocolError(f"{outside} indices lie outside of their layers")
    return True


def _add_sparse_(out: FloatArray, indices: npt.NDArray[np.int64], values: FloatArray, weight: float) -> None:
    arrays = (out, indices, values)
    native = lib if all(array.flags.c_contiguous for array in arrays) else None
    if native is None or out.dtype != np.float32 or indices.dtype != np.int64:
        out[indices] += values if weight == 1.0 else values * out.dtype.type(weight)
        return
    # The kernel checks every index itself: memory must not depend on what was promised.
    outside = native.add_sparse(
        pointer(out, "float[]"), out.size, pointer(indices, "int64_t[]"),
        pointer(values, "float[]"), min(values.size, indices.size), weight,
    )  # fmt: skip
    if outside:
        raise RemoteProtocolError(f"{outside} indices lie outside of a layer of {out.size}")


_CHUNK = 1 << 14
_IN_CACHE = 1 << 17
"""Numbers that a second-level cache of a small processor holds, with as many to be added."""


def add_dense_(out: FloatArray, values: FloatArray, weight: float) -> None:
    """Add `weight` times `values` to `out`, in place, in its dtype and without a temporary of full size."""
    if values.shape != out.shape:
        raise ValueError(f"{values.shape} numbers cannot be added to {out.shape}")
    arrays = (out, values)
    if weight == 1.0:
        out += values
    elif lib is not None and all(array.dtype == np.float32 and array.flags.c_contiguous for array in arrays):
        lib.add_scaled(pointer(out, "float[]"), pointer(values, "float[]"), out.size, weight)
    else:
        for start in range(0, out.size, _CHUNK):
            out[start : start + _CHUNK] += values[start : start + _CHUNK] * out.dtype.type(weight)


def _values(payload: LayerPayload, dtype: np.dtype[Any]) -> FloatArray:
    if isinstance(payload, Levels):
        return level_values(payload, dtype)
    if not isinstance(payload, Dense):
        raise TypeError(f"{type(payload).__name__} can only be read against the receiver's own vector")
    with np.errstate(over="ignore"):
        values: FloatArray = payload.values.astype(dtype, copy=False)
    if values.dtype.itemsize < payload.values.dtype.itemsize and not np.isfinite(values).all():
        raise RemoteProtocolError(f"values exceed the range of {dtype}")
    return values


def _checked(payload: Payload, layout: Layout) -> Payload:
    sizes = tuple(num_values(layer) for layer in payload)
    if sizes != layout.sizes:
        raise RemoteProtocolError(f"a payload of {len(sizes)} layers does not have the shape of this model")
    return payload


def _check_indices(payload: Sparse) -> None:
    # Ascending is the wire's promise; the two ends then bound all of them.
    if payload.indices.size and not 0 <= payload.indices[0] <= payload.indices[-1] < payload.size:
        raise RemoteProtocolError(f"an index lies outside of a layer of {payload.size}")
