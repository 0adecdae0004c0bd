"""What happens between convolutions gives the same bits in C and in torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from peer.train.eight_bit import norm_kernels
from peer.train.eight_bit.norm_kernels import HARD_SIGMOID, PLAIN, SIGMOID, Addend, Ends, Gate, Slopes
from tests.train.eight_bit.twins import assert_equal, assert_twins_agree, by_both

SHAPES = [(1, 1, 4), (3, 35, 16), (2, 49, 24), (5, 4, 100)]


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate", [PLAIN, SIGMOID, HARD_SIGMOID])
def test_norms_give_the_same_bits(shape: tuple[int, int, int], gate: Gate) -> None:
    torch.manual_seed(0)
    b, _, c = shape
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    gradient = torch.randn(shape).to(torch.bfloat16)
    inner = None if gate == PLAIN else torch.randn(c) * 0.05
    factor, shift, slope = torch.rand(b, c), torch.randn(b, c) * 50 + 100, torch.randn(b, c)

    native, plain = by_both(partial(norm_kernels.statistics, codes))
    for name in ("sums", "squares", "lows", "highs"):
        assert_equal(getattr(native, name), getattr(plain, name))
    q = codes.double() - 128
    assert torch.equal(native.squares.double(), q.square().sum(dim=1))
    assert_twins_agree(partial(norm_kernels.ties, codes, native.lows, native.highs))

    addend = Addend(torch.randint(0, 256, shape, dtype=torch.uint8), (0.7, 0.4), -11.3, (3.0, 240.0))
    given = (codes, gate, inner, factor, shift, (7.0, 250.0))
    assert_twins_agree(partial(norm_kernels.forward, *given))
    assert_twins_agree(partial(norm_kernels.forward, *given, addend))
    alone, ends, _ = norm_kernels.forward(*given)
    total, of_total = norm_kernels.sum_forward(alone, addend.other, addend.factors, addend.shift, addend.cut)
    assert_equal(norm_kernels.forward(*given, addend), (total, ends, of_total))
    sums = by_both(partial(norm_kernels.backward_sums, codes, gradient, gate, inner))
    assert_equal(*(sums if gate else (found[:2] for found in sums)))
    ends = Ends(native.lows, native.highs, torch.randn(b, c), torch.randn(b, c))
    for only in [ends] if gate == HARD_SIGMOID else [None] if gate == SIGMOID else [ends, None]:
        slopes = Slopes(slope, factor, shift, only)
        assert_twins_agree(partial(norm_kernels.backward, codes, gradient, gate, inner, slopes))


@pytest.mark.parametrize("gate", [SIGMOID, HARD_SIGMOID])
def test_gates_are_close_to_float64(gate: Gate) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    inner, one = torch.full((256,), 0.07), torch.ones(1, 256)
    q = (codes.double() - 128).view(-1).requires_grad_()
    gates = {SIGMOID: torch.sigmoid, HARD_SIGMOID: torch.nn.functional.hardsigmoid}
    t = q * gates[gate](q * inner.double())
    gradient = torch.ones(1, 1, 256, dtype=torch.bfloat16)
    _, found, _ = norm_kernels.backward_sums(codes, gradient, gate, inner)
    assert (found[0] - t).abs().max() < 1e-3
    (slope,) = torch.autograd.grad(t.sum(), q)
    zeros = torch.zeros(1, 256)
    lows = torch.zeros(1, 256, dtype=torch.uint8)
    ends = Ends(lows, lows, zeros, zeros) if gate == HARD_SIGMOID else None
    backward, _ = norm_kernels.backward(codes, gradient, gate, inner, Slopes(one, zeros, zeros, ends))
    assert (backward.view(-1).double() - slope).abs().max() < 0.01


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("size", [1, 16, 1000])
def test_sums_give_the_same_bits(size: int) -> None:
    torch.manual_seed(0)
    a, b = (torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(2))
    assert_twins_agree(partial(norm_kernels.sum_forward, a, b, (0.37, 0.81), -9.3, (20.0, 255.0)))
    g, h = (torch.randn(size).to(torch.bfloat16) for _ in range(2))
    for mask in (None, a):
        assert_twins_agree(partial(norm_kernels.sum_backward, g, h, mask, int(a[0])))


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 1)])
def test_pooling_is_that_of_torch(kernel: int, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    # No two alike in a window, so that who is greatest is no question of order.
    values = torch.randperm(7 * 9 * 3).view(1, 7, 9, 3).to(torch.uint8)
    codes = torch.cat((values, torch.randperm(7 * 9 * 3).view(1, 7, 9, 3).to(torch.uint8)))
    native, plain = by_both(partial(norm_kernels.max_pool_forward, codes, kernel, stride, padding))
    assert_equal(native, plain)
    x = codes.permute(0, 3, 1, 2).double().requires_grad_()
    y = torch.nn.functional.max_pool2d(x, kernel, stride, padding)
    assert torch.equal(native[0].double(), y.permute(0, 2, 3, 1))
    gradient = torch.randint(-8, 9, tuple(native[0].shape)).to(torch.bfloat16)
    passed = by_both(partial(norm_kernels.max_pool_backward, native[1], gradient, (7, 9), kernel, stride, padding))
    assert_equal(*passed)
    (expected,) = torch.autograd.grad(y, x, gradient.permute(0, 3, 1, 2).double())
    assert torch.equal(passed[0][0].double(), expected.permute(0, 2, 3, 1))
    assert passed[0][1] == expected.abs().max()


def test_of_equal_codes_the_first_is_the_greatest() -> None:
    codes = torch.full((1, 4, 4, 5), 9, dtype=torch.uint8)
    native, plain = by_both(partial(norm_kernels.max_pool_forward, codes, 2, 2, 0))
    assert_equal(native, plain)
    assert not native[1].any()


def test_the_sums_of_the_largest_image_fit_and_larger_ones_are_refused() -> None:
    codes = torch.zeros((1, norm_kernels.MAX_POSITIONS, 1), dtype=torch.uint8)
    found = norm_kernels.statistics(codes)
    assert found.squares.item() == 128**2 * norm_kernels.MAX_POSITIONS
    with pytest.raises(ValueError, match="may overflow"):
        norm_kernels.statistics(torch.zeros((1, norm_kernels.MAX_POSITIONS + 1, 1), dtype=torch.uint8))
