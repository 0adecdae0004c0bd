"""Products of linear layers: the native kernels return the bits of torch, at every edge of a tile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from peer.native import lib
from peer.train.eight_bit import kernels, linear_kernels
from peer.train.eight_bit.linear_kernels import Operands, OperandsBack
from peer.train.eight_bit.ranges import ANY_GRID, Grid, grid_over
from tests.train.eight_bit.twins import ON_EACH_FAST_TIER, assert_equal, assert_twins_agree

pytestmark = ON_EACH_FAST_TIER

# rows, inputs, outputs: below, at and beyond the 6 rows, 64 results and 4 terms of a tile; of AMX, 32, 32 and 64, and
# the 1024 terms that it sums before the next tile
SHAPES = [
    (1, 1, 1), (3, 5, 7), (6, 64, 64), (7, 66, 65), (37, 131, 150), (64, 256, 33), (500, 30, 40), (70, 1100, 520),
    (40, 50, 1100),
]  # fmt: skip
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(autouse=True)
def _rounds_as_this_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that goes on with a folder of release 0.2 changes it for its whole process, this one too."""
    monkeypatch.setattr(linear_kernels, "_rounds_as_before", False)


def random_codes(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(shape: tuple[int, int, int], *, bias: bool = False) -> Operands:
    rows, inputs, outputs = shape
    of_bias = numbers(outputs, seed=5) if bias else None
    return Operands(random_codes((rows, inputs), 1), -17, 0.1, numbers(outputs, inputs), None, of_bias)


def operands_back(shape: tuple[int, int, int], *, largest: float | None = None) -> OperandsBack:
    rows, inputs, outputs = shape
    gradient = numbers(rows, outputs, seed=6).to(torch.bfloat16)
    return OperandsBack(gradient, float(gradient.abs().max()), (3, 4), numbers(outputs, inputs), largest)


@EACH_SHAPE
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_codes_and_their_extremes(shape: tuple[int, int, int], relu: bool, bias: bool) -> None:
    for grid in (grid_over(-1.5, 2.0), grid_over(0.0, 0.3), Grid(0.5, 0)):
        assert_twins_agree(lambda grid=grid: linear_kernels.forward(operands(shape, bias=bias), grid, relu=relu))


@EACH_SHAPE
def test_floats_and_integers(shape: tuple[int, int, int]) -> None:
    assert_twins_agree(lambda: linear_kernels.accumulate(operands(shape)))
    for bias in (False, True):
        assert_twins_agree(lambda bias=bias: linear_kernels.forward_floats(operands(shape, bias=bias)))


@EACH_SHAPE
def test_input_gradients(shape: tuple[int, int, int]) -> None:
    rows, inputs, _ = shape
    codes, slopes = random_codes((rows, inputs), 2), numbers(256)

    def added() -> tuple[torch.Tensor, float]:
        gradient = numbers(rows, inputs, seed=3).to(torch.bfloat16)
        largest = linear_kernels.add_backward_(gradient, operands_back(shape))
        return gradient, largest

    assert_twins_agree(lambda: linear_kernels.backward(operands_back(shape), None, 0))
    assert_twins_agree(lambda: linear_kernels.backward(operands_back(shape), codes, -3))
    assert_twins_agree(lambda: linear_kernels.backward_table(operands_back(shape), codes, slopes))
    assert_twins_agree(added)


@EACH_SHAPE
def test_nothing_overflows_at_the_extremes(shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    weight = torch.full((outputs, inputs), -1.0)
    x = Operands(torch.full((rows, inputs), 127, dtype=torch.int8), -128, 1.0, weight, None)
    assert linear_kernels.accumulate(x)[0].eq(255 * -127 * inputs).all()


@EACH_SHAPE
def test_weights_that_are_codes_already_and_magnitudes_that_are_known(shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    codes = random_codes((outputs, inputs), 7).clamp_(min=-127)
    stored = Operands(random_codes((rows, inputs), 1), 3, 0.1, codes, 2.0)
    assert_twins_agree(lambda: linear_kernels.forward_floats(stored))
    known = linear_kernels.forward_floats(operands(shape))[1]
    assert known == numbers(outputs, inputs).abs().max()
    assert_equal(
        linear_kernels.backward(operands_back(shape, largest=known), None, 0),
        linear_kernels.backward(operands_back(shape), None, 0),
    )


@pytest.mark.parametrize("shape", [*SHAPES, (1500, 40, 25), (1101, 40, 530)])
def test_weight_gradients_are_those_of_float64(shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    gradient, codes = numbers(rows, outputs).to(torch.bfloat16), random_codes((rows, inputs), 4)
    found, sums = linear_kernels.weight_gradient(gradient, codes, 5, 0.25)
    exact = 0.25 * gradient.double().t() @ (codes.double() - 5)
    # Sums in float32; without the native kernel they are rounded to the 8 bits of bfloat16.
    bound = 1e-6 if lib.eb_linear_speed() & 2 else 2.0**-8
    assert (found - exact).norm() <= bound * exact.norm()
    assert torch.equal(sums, kernels.column_sums(gradient))


def test_a_run_that_began_under_release_0_2_rounds_as_it_did() -> None:
    gradient, codes = numbers(70, 33).to(torch.bfloat16), random_codes((70, 40), 4)
    now = linear_kernels.weight_gradient(gradient, codes, 5, 0.25)
    linear_kernels.round_weight_gradients_as_before_()
    found, sums = linear_kernels.weight_gradient(gradient, codes, 5, 0.25)
    assert torch.equal(sums, now[1])
    product = (gradient.t() @ (codes.to(torch.float32) - 5).to(torch.bfloat16)).to(torch.float32) * 0.25
    if lib.eb_linear_speed() & 4:
        assert torch.equal(found, product)
        assert not torch.equal(found, now[0])
    else:
        assert torch.equal(found, now[0])


def test_gradients_that_are_no_numbers_are_noticed() -> None:
    shape = (7, 66, 65)
    gradient, largest = linear_kernels.backward(replace(operands_back(shape), largest_gradient=math.nan), None, 0)
    assert largest != largest
    assert gradient.isnan().all()
    _, (low, high), _ = linear_kernels.forward(replace(operands(shape), scale=math.nan), ANY_GRID, relu=False)
    assert low != low
    assert high != high


def test_products_that_might_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="may overflow"):
        linear_kernels.accumulate(operands((1, 2**17, 1)))
    with pytest.raises(ValueError, match="may overflow"):
        linear_kernels.backward(operands_back((1, 1, 2**17)), None, 0)
