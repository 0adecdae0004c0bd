"""The row kernels of transformers: native ones return the bits of their torch twins, and what they compute is right."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from peer.train.eight_bit import kernels, row_kernels
from peer.train.eight_bit.ranges import ANY_GRID, grid_over, symmetric_grid_over
from tests.train.eight_bit.test_kernels import accumulators, codes, needs_native, values
from tests.train.eight_bit.twins import assert_twins_agree

ROWS = [(3, 5), (7, 64), (4, 130), (2, 768)]
EACH_SHAPE = pytest.mark.parametrize("shape", ROWS)


def positive(count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(9)) + 0.1


def calm(shape: tuple[int, ...], seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_native
@EACH_SHAPE
def test_gradients_by_table_and_by_row(shape: tuple[int, int]) -> None:
    slopes = torch.linspace(-0.1, 1.1, 256)
    assert_twins_agree(partial(row_kernels.finish_backward_table, accumulators(shape), 1e-6, codes(shape), slopes))
    assert_twins_agree(partial(row_kernels.look_up, codes(shape), codes((256,))))
    gradient = values(shape).to(torch.bfloat16)
    assert_twins_agree(partial(row_kernels.scale_rows, gradient, positive(shape[0])))

    def added() -> tuple[torch.Tensor, float]:
        total = gradient.clone()
        largest = row_kernels.add_backward_(total, accumulators(shape), 1e-6)
        return total, largest

    assert_twins_agree(added)


@needs_native
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 2, 4, 128), (3, 1, 2, 70)])
@pytest.mark.parametrize("padded", [False, True])
def test_softmax_and_its_backward_pass(shape: tuple[int, int, int, int], padded: bool) -> None:
    hidden = None
    if padded:
        hidden = torch.zeros(shape[0], 1, shape[3], dtype=torch.bool)
        hidden[..., -2:] = True
        hidden[0, :] = True  # nothing at all to attend to
    scores = accumulators(shape)
    assert_twins_agree(partial(row_kernels.softmax, scores, 1e-6, hidden))
    probabilities, weights = row_kernels.softmax(scores, 1e-6, hidden)
    assert_twins_agree(partial(row_kernels.softmax_backward, accumulators(shape, 6), 1e-7, probabilities, weights))


@needs_native
@EACH_SHAPE
@pytest.mark.parametrize("whole", [False, True])
def test_layer_norm_and_its_backward_pass(shape: tuple[int, int], whole: bool) -> None:
    columns = shape[1]
    if whole:
        x = row_kernels.LayerNormOperands(
            accumulator=accumulators(shape), factor=1e-7, bias=calm((columns,)),
            residual=codes(shape), residual_zero=-7, residual_scale=0.02,
        )  # fmt: skip
    else:
        x = row_kernels.LayerNormOperands(floats=calm(shape))
    gamma, beta = calm((columns,), 6), calm((columns,), 7)
    grids = symmetric_grid_over(-3.0, 2.0), grid_over(-2.0, 3.0)
    assert_twins_agree(partial(row_kernels.layer_norm, x, gamma, beta, 1e-12, *grids))
    gradient = calm(shape, 8).to(torch.bfloat16)
    deviations = positive(shape[0])
    assert_twins_agree(partial(row_kernels.layer_norm_backward, gradient, codes(shape), 0.03, deviations, gamma))


def test_the_exponential_is_close_to_exact() -> None:
    x = torch.linspace(-20.0, 0.0, 100_001)
    found, exact = row_kernels.exponential(x).double(), x.double().exp()
    assert ((found - exact).abs() <= 5e-6 * exact).all()
    assert row_kernels.exponential(torch.tensor([-1e9])).item() == 2.0**-30


def test_softmax_rows_add_up_to_one_and_are_within_a_step_of_the_exact_ones() -> None:
    scores = accumulators((2, 2, 9, 33))
    factor = 3.0 / 2**24
    probabilities, weights = row_kernels.softmax(scores, factor, None)
    found = probabilities.view(-1, 33).double() * weights[:, None].double()
    exact = (scores.double() * factor).softmax(dim=-1).view(-1, 33)
    assert torch.allclose(found.sum(dim=1), torch.ones(len(found), dtype=torch.float64), atol=1e-6)
    assert ((found - exact).abs() <= exact.amax(dim=1, keepdim=True) / 127).all()


def test_layer_norm_is_that_of_torch_within_a_step() -> None:
    x, gamma, beta = calm((50, 100)), calm((100,), 6), calm((100,), 7)
    exact = torch.nn.functional.layer_norm(x, (100,), gamma, beta)
    _, normal_ends, _, ends, _ = row_kernels.layer_norm(
        row_kernels.LayerNormOperands(floats=x), gamma, beta, 1e-5, ANY_GRID, ANY_GRID
    )
    grid = grid_over(*ends)
    _, _, found, _, _ = row_kernels.layer_norm(
        row_kernels.LayerNormOperands(floats=x), gamma, beta, 1e-5, symmetric_grid_over(*normal_ends), grid
    )
    assert (((found.double() - grid.zero_point) * grid.scale) - exact).abs().max() <= 0.51 * grid.scale


def test_gelu_is_that_of_torch_within_a_step() -> None:
    grid, result = grid_over(-4.0, 5.0), grid_over(row_kernels.GELU_LEAST, 5.0)
    table, slopes = row_kernels.gelu_tables(grid, result)
    x = ((torch.arange(-128, 128) - grid.zero_point).double() * grid.scale).requires_grad_()
    exact = torch.nn.functional.gelu(x)
    (slope,) = torch.autograd.grad(exact.sum(), x)
    assert ((table.double() - result.zero_point) * result.scale - exact).abs().max() <= 0.51 * result.scale
    assert torch.allclose(slopes.double(), slope, atol=1e-6)


def test_kernels_without_a_native_library_are_the_torch_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "lib", None)
    assert not kernels.native_for(torch.zeros(1))
    assert math.isnan(kernels.extremes(torch.tensor([math.nan, 1.0]))[0])
