"""Spans that share a table: the kernel and numpy choose alike, and what is unlike gets tables of its own."""

from __future__ import annotations

import numpy as np
import pytest

from peer import native
from peer.wire import grouping
from peer.wire.grouping import group_spans
from tests.wire.comparing import pure


def spans_of(seed: int) -> grouping.IntegerArray:
    """Return the counts of some spans, some of them empty, of a few kinds: int64[spans, 256]."""
    rng = np.random.default_rng(seed)
    num_tokens = int(rng.choice([2, 5, 20, 60, 256]))
    table = np.zeros((int(rng.integers(1, 90)), 256), np.int64)
    for span in table:
        share = np.exp(-np.arange(num_tokens) * rng.choice([0.01, 0.1, 0.5, 1.0]))
        span[:num_tokens] = rng.multinomial(int(rng.choice([0, 3, 50, 1000, 60_000])), share / share.sum())
    table[0, 0] += 1
    return table


@pytest.mark.skipif(native.lib is None, reason="the kernels are not built")
def test_the_kernel_and_numpy_come_to_the_same_groups_and_bits() -> None:
    for seed in range(40):
        table = spans_of(seed)
        groups, needed = group_spans(table)
        with pure():
            same_groups, same_needed = group_spans(table)
        assert needed == same_needed, seed
        assert (groups is None) == (same_groups is None), seed
        assert groups is None or np.array_equal(groups, same_groups), seed


def test_two_kinds_of_spans_get_two_tables_and_one_kind_gets_one() -> None:
    table = np.zeros((40, 256), np.int64)
    table[::2, :4], table[1::2, 200:204] = 500, 500
    groups, needed = group_spans(table)
    assert groups is not None
    assert len({*groups[::2].tolist()} | {*groups[1::2].tolist()}) == 2
    assert needed == pytest.approx(2 * table.sum(), rel=0.02)
    assert group_spans(table[::2].copy())[0] is None
