"""Passes over whole vectors, block by block: what they return is what one pass over everything would."""

from __future__ import annotations

import math

import numpy as np
import pytest

from peer.gossip.mixing import BLOCK, add_scaled_, debiased_step_rate, distance

SIZES = (1, BLOCK - 1, BLOCK, 2 * BLOCK + 5)


def _vectors(size: int, dtype: type[np.floating]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    return rng.standard_normal(size).astype(dtype), rng.standard_normal(size).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_the_distance_of_two_weighted_vectors_is_the_norm_of_their_difference(size: int) -> None:
    a, b = _vectors(size, np.float64)
    assert distance(a, b) == pytest.approx(float(np.linalg.norm(a - b)), rel=1e-12)
    assert distance(a, b, 0.25, 1.5) == pytest.approx(float(np.linalg.norm(a / 0.25 - b / 1.5)), rel=1e-12)
    assert distance(a, a) == 0.0


def test_the_distance_to_what_is_not_finite_is_not_finite() -> None:
    a, b = _vectors(BLOCK + 3, np.float32)
    for value in (np.inf, np.nan):
        b[-1] = value
        assert not math.isfinite(distance(a, b))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_a_scaled_sum_is_rounded_after_the_product_and_after_the_sum(size: int, dtype: type[np.floating]) -> None:
    out, values = _vectors(size, dtype)
    for scale in (-0.0123, 1.0, 3e-39):
        expected = out + dtype(scale) * values
        add_scaled_(out, scale, values)
        assert out.dtype == dtype
        assert out.tobytes() == expected.tobytes()


def test_a_vector_of_another_length_is_not_added() -> None:
    out, values = np.zeros(4, np.float32), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="cannot be added"):
        add_scaled_(out, 0.5, values)


def test_the_step_in_z_is_that_of_x_divided_by_the_push_weight_above_the_guard():
    assert debiased_step_rate(0.1, 0.8, 0.5) == 0.1 / 0.8
    # Below it the step in z stays at that of the guard, however little weight is left.
    assert debiased_step_rate(0.1, 0.001, 0.5) == pytest.approx(0.1 / 0.5)
    assert debiased_step_rate(0.1, 0.001, 0.0) == 0.1 / 0.001
