"""All layers at once: the payloads and the sums of layer by layer, to the bit, and the same errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peer import native
from peer.compress import build
from peer.compress.base import compress_layers
from peer.compress.columns import Columns, columns_of
from peer.compress.decompress import add_decompressed_
from peer.compress.layout import Layout
from peer.compress.modulo import Modulo, recover, recover_all, recover_checked
from peer.compress.norms import NotFiniteError
from peer.compress.payload import LayerPayload, Residues
from peer.random import PeerDraws
from tests.wire.comparing import payloads_equal

pytestmark = pytest.mark.skipif(native.lib is None, reason="the native kernels were not built")

LAYOUT = Layout.of_sizes([1, 3000, 16, 700, 1, 2, 5000, 64])
DRAWS = PeerDraws(7, 3, 11)
COMPRESSORS: list[dict[str, Any]] = [
    {"kind": "top_k", "fraction": 0.01},
    {"kind": "top_k", "fraction": 0.3, "value_type": "bfloat16"},
    {"kind": "top_k", "fraction": 1.0},
    *({"kind": "top_k", "fraction": 0.1, "value_bits": bits} for bits in (1, 2, 4, 8, 9, 16)),
    {"kind": "top_k", "fraction": 0.1, "value_bits": 2, "four_levels": True},
    *({"kind": "qsgd", "bits": bits, "unbiased": unbiased} for bits in (1, 4, 8) for unbiased in (True, False)),
    *({"kind": "none", "value_type": name} for name in (None, "bfloat16", "float16")),
    *(
        {"kind": "modulo", "bits": bits, "theta": 0.02, "rounding": rounding, "verified": verified}
        for bits in (2, 8, 11)
        for rounding in ("nearest", "stochastic", "dither")
        for verified in (False, True)
    ),
]


def vectors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    heavy = (rng.standard_normal(LAYOUT.size) ** 3 * 0.01).astype(np.float32)
    sparse = np.where(rng.random(LAYOUT.size) < 0.01, heavy, np.float32(0))
    ties = np.full(LAYOUT.size, 0.25, np.float32)
    ties[::3] *= -1
    return {
        "heavy-tailed": heavy,
        "zero": np.zeros(LAYOUT.size, np.float32),
        "mostly zero": sparse,
        "all equal": ties,
        "denormal": heavy * np.float32(1e-40),
        "negative zeros": np.full(LAYOUT.size, -0.0, np.float32),
    }


def one_by_one(compressor: Any, v: np.ndarray) -> tuple[LayerPayload, ...]:
    return tuple(compressor.compress(v[part], layer, DRAWS) for layer, part in enumerate(LAYOUT.slices))


@pytest.mark.parametrize("name", vectors())
@pytest.mark.parametrize("settings", COMPRESSORS, ids=str)
def test_all_at_once_gives_the_payloads_of_layer_by_layer(settings: dict[str, Any], name: str) -> None:
    compressor, v = build(**settings), vectors()[name]
    payload = compress_layers(compressor, v, LAYOUT, DRAWS)
    assert isinstance(payload, Columns)
    expected = one_by_one(compressor, v)
    for number, (found, layer) in enumerate(zip(payload, expected, strict=True)):
        assert payloads_equal(found, layer), f"layer {number}: {found} instead of {layer}"
    if isinstance(compressor, Modulo):
        return
    for weight in (1.0, -1.0 / 3.0):
        ours = np.linspace(-1, 1, LAYOUT.size, dtype=np.float32)
        theirs = ours.copy()
        add_decompressed_(ours, payload, LAYOUT, weight)
        add_decompressed_(theirs, expected, LAYOUT, weight)
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3.4e38])
@pytest.mark.parametrize("settings", COMPRESSORS[:: len(COMPRESSORS) // 6], ids=str)
def test_what_cannot_be_compressed_is_refused_with_the_name_of_its_layer(settings: dict[str, Any], bad: float) -> None:
    compressor, v = build(**settings), vectors()["heavy-tailed"].copy()
    v[LAYOUT.slices[3]] = bad

    def outcome(call: Any) -> str | None:
        try:
            call()
        except (NotFiniteError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    assert outcome(lambda: compress_layers(compressor, v, LAYOUT, DRAWS)) == outcome(lambda: one_by_one(compressor, v))


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither"])
def test_all_layers_of_a_modulo_code_are_recovered_at_once(rounding: str, verified: bool) -> None:
    compressor = build(kind="modulo", bits=6, theta=0.02, rounding=rounding, verified=verified)
    assert isinstance(compressor, Modulo)
    x = vectors()["heavy-tailed"]
    y = x + np.float32(0.01)
    payload = compressor.compress_all(x, LAYOUT, DRAWS)
    assert payload is not None
    out, expected = np.empty_like(x), np.empty_like(x)
    assert recover_all(payload, y, LAYOUT, DRAWS, out, verified=verified)
    for layer, (part, sent) in enumerate(zip(LAYOUT.slices, payload, strict=True)):
        assert isinstance(sent, Residues)
        omega = compressor.omega(y[part], layer, DRAWS)
        if verified:
            assert recover_checked(sent, y[part], omega, out=expected[part])[1]
        else:
            recover(sent, y[part], omega, out=expected[part])
    assert out.tobytes() == expected.tobytes()
    far = y.copy()
    far[LAYOUT.slices[1]] += 1.0
    assert recover_all(payload, far, LAYOUT, DRAWS, out, verified=verified) is not verified


def test_a_code_without_hashes_is_never_taken_for_a_verified_one() -> None:
    compressor = build(kind="modulo", bits=6, theta=0.02)
    x = vectors()["heavy-tailed"]
    payload = compress_layers(compressor, x, LAYOUT, DRAWS)
    assert not recover_all(payload, x, LAYOUT, DRAWS, np.empty_like(x), verified=True)


def test_layers_become_columns_and_come_back() -> None:
    compressor = build(kind="top_k", fraction=0.1, value_bits=4)
    layers = compress_layers(compressor, vectors()["heavy-tailed"], LAYOUT, DRAWS, whole_below=20)
    assert isinstance(layers, tuple)
    columns = columns_of(layers)
    assert columns is not None
    assert all(payloads_equal(a, b) for a, b in zip(columns, layers, strict=True))
    assert columns[1:3] == tuple(columns)[1:3]
