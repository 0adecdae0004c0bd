"""How rivals train, against the same computed here for all workers at once, with NumPy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

pytestmark = pytest.mark.usefixtures("warm_python")

Vector: TypeAlias = npt.NDArray[np.float32]

SIZE = 3010
"""Numbers of the model: more than two blocks of 8-bit codes, and no multiple of one."""
STEPS = 12
WEIGHT_DECAY = 0.01
METHODS: dict[str, tuple[str, dict[str, float | str]]] = {
    "ddp": ("ddp", {}),
    "accumulated": ("ddp", {"accumulate": 4}),
    "fp16": ("ddp-fp16", {}),
    "powersgd": ("ddp-powersgd", {"rank": 2}),
    "local-sgd": ("local-sgd", {"period": 4}),
    "local-sgd-8": ("local-sgd", {"period": 4, "bits": 8}),
    "diloco": ("diloco", {"period": 4, "rate": 0.7}),
    "diloco-8": ("diloco", {"period": 3, "rate": 0.4, "bits": 8}),
}


def rate(step: int) -> float:
    """Return the learning rate of a step."""
    return 0.05 / (1 + step)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Vector, Vector]]:
    """Return the models of both workers, by method."""
    folder = tmp_path_factory.mktemp("workers")
    root = Path(__file__).resolve().parents[3]
    subprocess.run(
        [sys.executable, "-m", "tests.lab.study.two_workers", str(folder)], check=True, cwd=root, timeout=300
    )
    both = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: (as_vector(both[0][name]), as_vector(both[1][name])) for name in both[0]}


def as_vector(numbers: list[float]) -> Vector:
    return np.array(numbers, np.float32)


class Nesterov:
    """SGD with Nesterov momentum, as torch defines it."""

    def __init__(self, beta: float) -> None:
        self._beta, self._velocity = beta, np.zeros(SIZE)

    def step(self, w: npt.NDArray[np.float64], gradient: npt.NDArray[np.float64], rate: float) -> None:
        self._velocity = self._beta * self._velocity + gradient
        w -= rate * (gradient + self._beta * self._velocity)


def start() -> npt.NDArray[np.float64]:
    return np.linspace(-1.0, 1.0, SIZE)


def gradient(w: npt.NDArray[np.float64], worker: int) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = w - np.sin(np.arange(SIZE) * (worker + 1.0)) + WEIGHT_DECAY * w
    return found


def averaged_gradients(accumulate: int = 1) -> npt.NDArray[np.float64]:
    w, descent = start(), Nesterov(0.9)
    for step in range(accumulate - 1, STEPS, accumulate):
        descent.step(w, (gradient(w, 0) + gradient(w, 1)) / 2, rate(step))
    return w


def averaged_models(period: int, outer_rate: float, outer_beta: float, bits: int = 32) -> npt.NDArray[np.float64]:
    """Train both workers alone for a period at a time; then the common model takes a step along their mean."""
    common, outer = start(), Nesterov(outer_beta)
    workers, descents = [common.copy(), common.copy()], [Nesterov(0.9), Nesterov(0.9)]
    for step in range(STEPS):
        for worker, w in enumerate(workers):
            descents[worker].step(w, gradient(w, worker), rate(step))
        if (step + 1) % period == 0:
            moved = [common - w for w in workers]
            mean = (moved[0] + moved[1]) / 2 if bits == 32 else coded((coded(moved[0]) + coded(moved[1])) / 2)
            outer.step(common, mean, outer_rate)
            workers = [common.copy(), common.copy()]
    return common


def coded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return values in 8 bits, with a scale for each block."""
    padded = np.zeros(-(-SIZE // 1024) * 1024)
    padded[:SIZE] = values
    blocks = padded.reshape(-1, 1024)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    found: npt.NDArray[np.float64] = (np.round(blocks / np.maximum(scales, 1e-38)) * scales).reshape(-1)[:SIZE]
    return found


@pytest.mark.parametrize("method", METHODS)
def test_workers_hold_one_model(trained: dict[str, tuple[Vector, Vector]], method: str) -> None:
    first, second = trained[method]
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - start()).max() > 0.01


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("ddp", averaged_gradients()),
        ("accumulated", averaged_gradients(4)),
        ("local-sgd", averaged_models(4, 1.0, 0.0)),
        ("diloco", averaged_models(4, 0.7, 0.9)),
    ],
)
def test_methods_without_loss_are_those_of_their_papers(
    trained: dict[str, tuple[Vector, Vector]], method: str, expected: npt.NDArray[np.float64]
) -> None:
    np.testing.assert_allclose(trained[method][0], expected, atol=2e-6)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("local-sgd-8", averaged_models(4, 1.0, 0.0, bits=8)),
        ("diloco-8", averaged_models(3, 0.4, 0.9, bits=8)),
    ],
)
def test_averages_in_8_bits_round_to_the_nearest_of_255_levels(
    trained: dict[str, tuple[Vector, Vector]], method: str, expected: npt.NDArray[np.float64]
) -> None:
    # A number that lies between two levels may round either way.
    differs = np.abs(trained[method][0] - expected) > 2e-6
    assert differs.mean() < 0.01
    exact = averaged_models(4, 1.0, 0.0) if method == "local-sgd-8" else averaged_models(3, 0.4, 0.9)
    assert 0 < np.abs(trained[method][0] - exact).max() < 0.02


def test_lossy_gradients_end_near_the_exact_ones(trained: dict[str, tuple[Vector, Vector]]) -> None:
    exact, moved = averaged_gradients(), np.linalg.norm(averaged_gradients() - start())
    assert np.linalg.norm(trained["fp16"][0] - exact) < 1e-3 * moved
    # Two factors of a matrix of 200 × 15 do not hold all of it.
    assert 0.01 * moved < np.linalg.norm(trained["powersgd"][0] - exact) < 0.9 * moved


def test_the_8_bit_mean_is_that_of_both_workers(trained: dict[str, tuple[Vector, Vector]]) -> None:
    first, second = trained["eight bits"]
    np.testing.assert_array_equal(first, second)
    exact = (np.sin(np.arange(SIZE)) + np.sin(2.0 * np.arange(SIZE))) / 2
    assert 0 < np.abs(first - exact).max() <= 1.01 / 127
