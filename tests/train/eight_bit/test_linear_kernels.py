"""Products of linear layers: the native kernels return the bits of torch, at every edge of a tile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from peer.errors import ConfigError
from peer.native import available, lib, use_tier
from peer.train.eight_bit import kernels, linear_kernels
from peer.train.eight_bit.linear_kernels import Operands
from peer.train.eight_bit.ranges import Grid, grid_over
from tests.train.eight_bit.twins import assert_twins_agree

pytestmark = [
    pytest.mark.skipif(
        not available() or not lib.eb_linear_speed() & 1,
        reason="needs the native kernels, and a processor for which they multiply bytes",
    ),
    pytest.mark.usefixtures("fast_tier"),
]

# rows, inputs, outputs: below, at and beyond the 6 rows, 64 results and 4 terms of a tile; of AMX, 32, 32 and 64
SHAPES = [(1, 1, 1), (3, 5, 7), (6, 64, 64), (7, 66, 65), (37, 131, 150), (64, 256, 33), (500, 30, 40)]
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES)


def tiers_here() -> list[str]:
    """Return the tiers that multiply bytes natively and that this processor has."""
    if lib is None:
        return []
    limits, found = (lib.widest_registers, lib.byte_instructions), []
    for name in ("AMX", "AVX-512 with VNNI", "AVX-512", "AVX-VNNI", "AVX2", "NEON with i8mm", "NEON with dot product"):
        with contextlib.suppress(ConfigError):
            use_tier(name)
            found.append(name)
    lib.widest_registers, lib.byte_instructions = limits
    return found


@pytest.fixture(params=tiers_here())
def fast_tier(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every tier that multiplies bytes natively, where the processor has it."""
    assert lib is not None
    limits = lib.widest_registers, lib.byte_instructions
    use_tier(request.param)
    yield
    lib.widest_registers, lib.byte_instructions = limits


def random_codes(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(shape: tuple[int, int, int], *, transposed: bool = False, bias: bool = False) -> Operands:
    rows, inputs, outputs = shape
    weights = linear_kernels.quantize_weights(numbers(outputs, inputs), transposed=transposed)
    terms, results = (outputs, inputs) if transposed else (inputs, outputs)
    return Operands(
        random_codes((rows, terms), 1), 0 if transposed else -17, weights, 2e-3, numbers(results) if bias else None
    )


@EACH_SHAPE
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_codes_and_their_extremes(shape: tuple[int, int, int], relu: bool, bias: bool) -> None:
    for grid in (grid_over(-1.5, 2.0), grid_over(0.0, 0.3), Grid(0.5, 0)):
        assert_twins_agree(lambda grid=grid: linear_kernels.forward(operands(shape, bias=bias), grid, relu=relu))
    assert_twins_agree(lambda: linear_kernels.measure(operands(shape, bias=bias), relu=relu))


@EACH_SHAPE
def test_floats_and_integers(shape: tuple[int, int, int]) -> None:
    assert_twins_agree(lambda: (linear_kernels.accumulate(operands(shape)),))
    for bias in (False, True):
        assert_twins_agree(lambda bias=bias: (linear_kernels.forward_floats(operands(shape, bias=bias)),))


@EACH_SHAPE
def test_input_gradients(shape: tuple[int, int, int]) -> None:
    rows, inputs, _ = shape
    codes, slopes = random_codes((rows, inputs), 2), numbers(256)

    def added() -> tuple[torch.Tensor, float]:
        gradient = numbers(rows, inputs, seed=3).to(torch.bfloat16)
        largest = linear_kernels.add_backward_(gradient, operands(shape, transposed=True))
        return gradient, largest

    assert_twins_agree(lambda: linear_kernels.backward(operands(shape, transposed=True), None, 0))
    assert_twins_agree(lambda: linear_kernels.backward(operands(shape, transposed=True), codes, -3))
    assert_twins_agree(lambda: linear_kernels.backward_table(operands(shape, transposed=True), codes, slopes))
    assert_twins_agree(added)


@EACH_SHAPE
def test_nothing_overflows_at_the_extremes(shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    weights = linear_kernels.quantize_weights(torch.full((outputs, inputs), -1.0))
    x = Operands(torch.full((rows, inputs), 127, dtype=torch.int8), -128, weights, 1.0)
    assert linear_kernels.accumulate(x).eq(255 * -127 * inputs).all()


@pytest.mark.parametrize("shape", [*SHAPES, (1500, 40, 25)])
def test_weight_gradients_are_those_of_float64(shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    gradient, codes = numbers(rows, outputs).to(torch.bfloat16), random_codes((rows, inputs), 4)
    found, sums = linear_kernels.weight_gradient(gradient, codes, 5, 0.25)
    exact = 0.25 * gradient.double().t() @ (codes.double() - 5)
    # Sums in float32; without the native kernel they are rounded to the 8 bits of bfloat16.
    bound = 1e-6 if lib.eb_linear_speed() & 2 else 2.0**-8
    assert (found - exact).norm() <= bound * exact.norm()
    assert torch.equal(sums, kernels.column_sums(gradient))


def test_gradients_that_are_no_numbers_are_noticed() -> None:
    x = operands((7, 66, 65), transposed=True)
    x = Operands(x.codes, 0, x.weights, float("nan"))
    gradient, largest = linear_kernels.backward(x, None, 0)
    assert largest != largest
    assert gradient.isnan().all()
    low, high = linear_kernels.measure(x, relu=False)
    assert low != low
    assert high != high


def test_products_that_might_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="may overflow"):
        linear_kernels.quantize_weights(torch.zeros(1, 2**17))
