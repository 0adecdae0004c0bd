"""Spans that share a table: the kernel and numpy choose alike, and what is unlike gets tables of its own."""

from __future__ import annotations

import numpy as np
import pytest

from peer import native
from peer.wire import grouping
from peer.wire.bits import ByteArray
from peer.wire.grouping import group_spans
from tests.wire.comparing import pure


def spans_of(seed: int) -> tuple[ByteArray, grouping.IntegerArray]:
    """Return the tokens of some spans, some of them empty, of a few kinds, and the sizes of the spans."""
    rng = np.random.default_rng(seed)
    num_tokens = int(rng.choice([2, 5, 20, 60, 256]))
    spans = [np.zeros(1, np.uint8)]
    for _ in range(int(rng.integers(1, 90))):
        share = np.exp(-np.arange(num_tokens) * rng.choice([0.0, 0.01, 0.1, 0.5, 1.0]))
        size = int(rng.choice([0, 3, 50, 1000, 60_000]))
        spans.append(rng.choice(num_tokens, size, p=share / share.sum()).astype(np.uint8))
    return np.concatenate(spans), np.array([span.size for span in spans], np.int64)


@pytest.mark.skipif(native.lib is None, reason="the kernels are not built")
def test_the_kernel_and_numpy_come_to_the_same_groups_and_bits() -> None:
    for seed in range(40):
        tokens, sizes = spans_of(seed)
        # Codes of so many bits may be spread too evenly for any table.
        for width in (0, int(tokens.max()).bit_length() or 1):
            found = group_spans(tokens, sizes, width)
            with pure():
                same = group_spans(tokens, sizes, width)
            assert (found is None) == (same is None), seed
            if found is None or same is None:
                assert width > 0
                continue
            assert found.bits == same.bits, seed
            assert np.array_equal(found.counts, same.counts), seed
            if found.groups is None or same.groups is None:
                assert found.groups is same.groups, seed
            else:
                assert np.array_equal(found.groups, same.groups), seed


def test_evenly_spread_codes_are_not_grouped(implementation: str) -> None:
    rng = np.random.default_rng(0)
    sizes = np.full(8, 4000, np.int64)
    even, skewed = rng.integers(0, 16, 32_000, dtype=np.uint8), rng.integers(0, 9, 32_000, dtype=np.uint8)
    assert group_spans(even, sizes, 4) is None
    assert group_spans(even, sizes) is not None
    assert group_spans(skewed, sizes, 4) is not None


def test_two_kinds_of_spans_get_two_tables_and_one_kind_gets_one() -> None:
    few = np.repeat(np.arange(4, dtype=np.uint8), 500)
    tokens, sizes = np.tile(np.concatenate([few, few + 200]), 20), np.full(40, 2000, np.int64)
    grouping_of_two, grouping_of_one = group_spans(tokens, sizes), group_spans(np.tile(few, 20), sizes[:20])
    assert grouping_of_two is not None
    assert grouping_of_one is not None
    groups = grouping_of_two.groups
    assert groups is not None
    assert len({*groups[::2].tolist()} | {*groups[1::2].tolist()}) == 2
    assert grouping_of_two.bits == pytest.approx(2 * tokens.size, rel=0.02)
    assert grouping_of_one.groups is None
