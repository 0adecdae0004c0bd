"""The default averaging rate: what it follows, and what it must not follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peer import compress
from peer.compress.payload import FloatArray
from peer.compress.top_k import TopK
from peer.gossip import ALGORITHMS
from peer.gossip.averaging_rate import default_averaging_rate
from tests.compress.test_decompress import decompressed
from tests.compress.vectors import GivenDraws

QUANT_SGP = ALGORITHMS["quant-sgp"].spec


@pytest.mark.parametrize(("fraction", "rate"), [(0.01, 0.024), (0.02, 0.048), (0.05, 0.12), (0.1, 0.24), (0.9, 1.0)])
@pytest.mark.parametrize("value_bits", [None, 1, 4, 8])
def test_the_rate_with_replicas_follows_the_fraction_alone(
    fraction: float, rate: float, value_bits: int | None
) -> None:
    for size in (1_000, 10_000, 1_000_000):
        chosen = default_averaging_rate(QUANT_SGP, TopK(fraction=fraction, value_bits=value_bits), size)
        assert chosen == pytest.approx(rate)


@pytest.mark.parametrize(
    ("algorithm", "kind", "settings", "rate"),
    [
        ("choco-sgd", "qsgd", {"bits": 2}, 0.073),
        ("quant-sgp", "ternary", {}, 0.05),
        ("choco-sgd", "random_k", {"fraction": 0.1, "unbiased": True}, 0.25),
        ("sparse-push", "top_k", {"fraction": 0.1, "value_bits": 4}, 0.02),
        ("d2", "none", {}, 0.5),
    ],
)
def test_rates_stay_what_they_were(algorithm: str, kind: str, settings: dict[str, Any], rate: float) -> None:
    assert default_averaging_rate(ALGORITHMS[algorithm].spec, compress.build(kind, **settings)) == rate


@pytest.mark.parametrize("value_bits", range(1, 9))
@pytest.mark.parametrize("fraction", [0.01, 0.02, 0.1])
@pytest.mark.parametrize("draw", ["normal", "laplace"])
def test_rounding_the_kept_values_leaves_nine_tenths_of_their_energy(
    value_bits: int, fraction: float, draw: str
) -> None:
    for seed, size in enumerate((1_000, 37_000)):
        v = getattr(np.random.default_rng(seed), draw)(size=size).astype(np.float32)
        lost = _squared_error(v, TopK(fraction=fraction, value_bits=value_bits)) - _squared_error(
            v, TopK(fraction=fraction)
        )
        kept = np.sort(v.astype(np.float64) ** 2)[-round(fraction * size) :].sum()
        assert lost < 0.1 * kept


def _squared_error(v: FloatArray, compressor: TopK) -> float:
    error = decompressed(compressor.compress(v, 0, GivenDraws(np.zeros(1))), np.float64) - v
    return float((error**2).sum())
