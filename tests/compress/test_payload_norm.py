"""The norm of a payload is that of the numbers that it stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peer.compress import build
from peer.compress.base import compress_layers
from peer.compress.columns import columns_of
from peer.compress.decompress import decompress_layers
from peer.compress.layout import Layout
from peer.compress.payload import Dense, ValueType
from peer.compress.payload_norm import norm, norm_at_most
from peer.random import PeerDraws

LAYOUTS = [Layout.of_sizes([1, 3000, 16, 2]), Layout.of_sizes([40_000, 7, 70_000])]
COMPRESSORS: list[dict[str, Any]] = [
    {"kind": "none"},
    {"kind": "none", "value_type": "bfloat16"},
    {"kind": "top_k", "fraction": 0.1},
    {"kind": "top_k", "fraction": 0.9, "value_bits": 4},
    {"kind": "random_k", "fraction": 0.3},
    {"kind": "qsgd", "bits": 8},
    {"kind": "top_k", "fraction": 0.5, "value_bits": 12},
    {"kind": "sign"},
    {"kind": "ternary"},
    {"kind": "grid", "bits": 7, "range": 6.0},
]


@pytest.mark.parametrize("whole_below", [0, 10])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["small", "large"])
@pytest.mark.parametrize("settings", COMPRESSORS, ids=str)
def test_norm_is_that_of_the_decompressed_vector(settings: dict[str, Any], layout: Layout, whole_below: int) -> None:
    values = np.random.default_rng(3).normal(size=layout.size).astype(np.float32)
    payload = compress_layers(build(**settings), values, layout, PeerDraws(7, 3, 11), whole_below=whole_below)
    expected = float(np.linalg.norm(decompress_layers(payload, layout, np.float64)))
    assert norm(payload) == pytest.approx(expected, rel=1e-5)
    assert norm(tuple(payload)) == pytest.approx(expected, rel=1e-5)
    # None where reals of several types occur.
    assert norm(columns_of(tuple(payload)) or payload) == pytest.approx(expected, rel=1e-5)
    assert all(norm_at_most(each) >= (1.0 - 1e-5) * expected for each in (payload, tuple(payload)))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_has_no_finite_norm(value: float) -> None:
    assert not np.isfinite(norm((Dense(np.array([1.0, value], np.float32), ValueType.FLOAT32),)))
