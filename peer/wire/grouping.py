"""Grouping of a stream's spans by the frequency table that they share.

Bits are counted in integers, in units of 2^-16, from a table of logarithms, so that the kernel and numpy agree on every
choice, whatever the order in which they add.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from peer import native
from peer.wire.bits import ByteArray, IntegerArray, pointer
from peer.wire.rice import pointer64
from peer.wire.tokens import counts_of_spans

MOST_GROUPS = 16
"""Most tables in a stream of this writer."""
_HEADER_BITS = 48
"""Approximate bits of the header of an entropy-coded stream."""

_ONE_BIT = 1 << 16
_INDEX_BITS = 13
_LOGS = np.rint(np.log2(np.maximum(np.arange((1 << _INDEX_BITS) + 1), 1)) * _ONE_BIT).astype(np.int32)
_TABLE_BITS, _TOKEN_BITS = 8 * _ONE_BIT, 157286
_ROUNDS, _SMOOTHING = 3, 50


def overhead_bits(num_tokens: int) -> float:
    """Return the approximate bits of the header of an entropy-coded stream and of one table of so many tokens."""
    return _HEADER_BITS + (_TABLE_BITS + _TOKEN_BITS * num_tokens) / _ONE_BIT


def logarithms() -> native.CData:
    """Return the address of the table of logarithms for kernels."""
    return native.pointer(_LOGS, "int32_t[]")


class Grouping(NamedTuple):
    """Groups of spans that share a frequency table, and their bits."""

    groups: npt.NDArray[np.uint8] | None
    """The table of each span, uint8[spans]; None: one for all."""
    bits: float
    """Approximate bits of the tokens and the tables."""
    counts: IntegerArray
    """Occurrences of each token: int64[256]."""


def group_spans(tokens: ByteArray, sizes: IntegerArray, width: int = 0) -> Grouping | None:
    """Return groups of spans that share a frequency table; `sizes: int64[spans]` divides `tokens: uint8[n]` into spans.

    The spans begin in order of their cost under one common table, cut into a few groups; each then moves to the group
    whose table suits it best, a few times over; and groups that do not earn their table are merged. `width`, unless 0:
    the tokens are codes of so many bits; None if these are spread so evenly that they are better packed.
    """
    if native.lib is not None:
        groups, counts, needed = np.empty(sizes.size, np.uint8), np.empty(256, np.int64), np.empty(1, np.int64)
        found = native.lib.wire_group_spans(
            pointer(tokens), pointer64(sizes), sizes.size, width, logarithms(),
            pointer64(counts), pointer(groups), pointer64(needed),
        )  # fmt: skip
        if found >= 0:
            return Grouping(groups if found > 1 else None, int(needed[0]) / _ONE_BIT, counts) if found else None
    table = counts_of_spans(tokens, sizes)
    if width and _are_spread_evenly(table, sizes, width):
        return None
    in_units = _group_spans(table)
    return Grouping(in_units[0], in_units[1] / _ONE_BIT, table.sum(axis=0))


def _are_spread_evenly(table: IntegerArray, sizes: IntegerArray, width: int) -> bool:
    """Return whether the spans with enough codes to tell use all codes alike, and make up nearly the whole stream."""
    telling = sizes >= 4 << width
    count = int(sizes[telling].sum())
    if 16 * count < 15 * int(sizes.sum()):
        return False
    return float(bits_of(table[telling, : 1 << width]).sum()) > 0.99 * width * count


def bits_of(counts: npt.NDArray[np.float64] | IntegerArray) -> npt.NDArray[np.float64]:
    """Return the bits of the tokens of each row, float64[rows, tokens], by their entropy: float64[rows]."""
    totals = counts.sum(axis=1)
    inner = np.einsum("ij,ij->i", counts, np.log2(np.maximum(counts, 1.0)))
    bits_needed: npt.NDArray[np.float64] = totals * np.log2(np.maximum(totals, 1.0)) - inner
    return bits_needed


def _group_spans(table: IntegerArray) -> tuple[npt.NDArray[np.uint8] | None, int]:
    present = table[:, table.any(axis=0)]
    spans, num_tokens = present.shape
    sizes, total = present.sum(axis=1), present.sum(axis=0)
    whole = int(total.sum())
    header = _HEADER_BITS * _ONE_BIT
    alone = _needs(total) + header
    if spans < 2 or alone < 8 * (header + _TABLE_BITS + _TOKEN_BITS * num_tokens):
        return None, alone
    common = present @ (_logs(np.array([whole])) - _logs(total)) // np.maximum(sizes, 1)
    order = np.argsort(common, kind="stable")
    twice_the_middle = 2 * np.cumsum(sizes[order]) - sizes[order]
    groups = np.empty(spans, np.int64)
    groups[order] = np.minimum(twice_the_middle * MOST_GROUPS // (2 * whole), MOST_GROUPS - 1)
    member = np.arange(MOST_GROUPS)
    for _ in range(_ROUNDS):
        sums = (groups == member[:, None]).astype(np.int64) @ present
        most = _logs(_SMOOTHING * sums.sum(axis=1, keepdims=True) + num_tokens)
        share = _logs(_SMOOTHING * sums + 1) - most
        groups = np.argmax(present @ share.T, axis=1)
    sums = (groups == member[:, None]).astype(np.int64) @ present
    merged, needed = _merged(groups, sums)
    needed += header + _TABLE_BITS
    return (None, alone) if needed >= alone else (merged.astype(np.uint8) if merged.any() else None, needed)


def _merged(groups: IntegerArray, sums: IntegerArray) -> tuple[IntegerArray, int]:
    """Return the groups, numbered without holes, and their bits. Neighbours are merged, one pair after another, down to
    the number of groups that needs the fewest bits. `sums: int64[groups, tokens]` counts the tokens of each group."""
    names = np.flatnonzero(sums.any(axis=1)).tolist()
    rows = [sums[name] for name in names]
    needs = [_needs(row) for row in rows]
    renamed = np.arange(MOST_GROUPS)
    least, best, chosen = -1, renamed, names
    while True:
        # Bits that name a table weigh on every span, so between two powers of two there may be a hill to cross.
        needed = sum(needs) + groups.size * (len(names) - 1).bit_length() * _ONE_BIT
        if least < 0 or needed < least:
            least, best, chosen = needed, renamed.copy(), names.copy()
        if len(names) == 1:
            break
        joined = [_needs(row + following) for row, following in itertools.pairwise(rows)]
        losses = [both - one - other for both, one, other in zip(joined, needs, needs[1:], strict=False)]
        at = losses.index(min(losses))
        renamed[renamed == names.pop(at + 1)] = names[at]
        rows[at : at + 2] = [rows[at] + rows[at + 1]]
        needs[at : at + 2] = [joined[at]]
    numbers = np.zeros(MOST_GROUPS, np.int64)
    numbers[chosen] = np.arange(len(chosen))
    return numbers[best[groups]], least


def _needs(counts: IntegerArray) -> int:
    """Return the approximate bits of tokens with these counts, with their table."""
    total = counts.sum(keepdims=True)
    inner = int(counts @ _logs(counts))
    return int(total[0] * _logs(total)[0]) - inner + _TABLE_BITS + _TOKEN_BITS * int(np.count_nonzero(counts))


def _logs(counts: IntegerArray) -> IntegerArray:
    """Return about 2^16 log₂ of each count, and 0 of 0."""
    lengths = np.frexp(counts.astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(lengths - _INDEX_BITS, 0)
    index = np.where(shift > 0, counts + (1 << np.maximum(shift - 1, 0)) >> shift, counts)
    logs: IntegerArray = _LOGS[index] + shift * _ONE_BIT
    return logs
