"""Products of attention: the native kernels return the bits of torch, at every edge of a tile, padded or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from peer.errors import UsageError
from peer.train.eight_bit import attention_kernels, row_kernels
from peer.train.eight_bit.attention import Attention, scaled_dot_product_attention
from peer.train.eight_bit.attention_kernels import Attended, Operands
from peer.train.eight_bit.ranges import ANY_GRID, Grid, grid_over
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape
from tests.train.eight_bit.twins import ON_EACH_FAST_TIER, assert_twins_agree

pytestmark = ON_EACH_FAST_TIER

# samples, heads, positions, width of a head: below, at and beyond what a tile or a copy takes at a time; and heads that
# begin at odd numbers, whose draws begin in the middle of a word
SHAPES = [
    (1, 1, 1, 4), (2, 2, 1, 5), (3, 1, 5, 5), (2, 12, 5, 4), (2, 2, 17, 5), (3, 12, 17, 24), (2, 2, 33, 64),
    (2, 1, 64, 70), (1, 12, 128, 64), (2, 2, 131, 24), (1, 1, 300, 64),
]  # fmt: skip
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES)

Shape = tuple[int, int, int, int]


def codes(shape: Shape, seed: int) -> Quantized:
    b, h, n, width = shape
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(-127, 128, (b, n, h * width), dtype=torch.int8, generator=generator)
    return Quantized(data, 0.01 + seed / 300, 0)


def padding(shape: Shape) -> torch.Tensor:
    """Return the last third of each sentence, and all of the first."""
    hidden = torch.zeros(shape[0], 1, shape[2], dtype=torch.bool)
    hidden[..., shape[2] - shape[2] // 3 :] = True
    hidden[0] = True
    return hidden


def later(shape: Shape) -> torch.Tensor:
    """Return all positions after the own one."""
    return torch.ones(1, shape[2], shape[2], dtype=torch.bool).triu(1)


def drawn(shape: Shape) -> torch.Tensor:
    """Return other positions for each query of each sample."""
    return torch.rand(shape[0], shape[2], shape[2], generator=torch.Generator().manual_seed(8)) < 0.5


def operands(shape: Shape, hidden: torch.Tensor | None) -> Operands:
    return Operands(codes(shape, 1), codes(shape, 2), codes(shape, 3), shape[1], hidden)


def gradient(shape: Shape) -> Gradient:
    """Return numbers that differ in their size, as gradients do."""
    b, h, n, width = shape
    generator = torch.Generator().manual_seed(6)
    data = (torch.randn(b * n, h * width, generator=generator) ** 3).to(torch.bfloat16)
    return Gradient(data, data.abs().amax().item())


def attended(shape: Shape) -> Attended:
    """Return what was kept of scores between flat and peaked."""
    b, h, n, _ = shape
    scores = torch.randint(-999, 1000, (b, h, n, n), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    probabilities, weights = row_kernels.softmax(scores, 0.002, padding(shape))
    return Attended(codes(shape, 1), codes(shape, 2), codes(shape, 3), probabilities, weights)


def parts(gradient: Gradient) -> tuple[torch.Tensor, float]:
    return gradient.data, gradient.largest


@EACH_SHAPE
@pytest.mark.parametrize("mask", [None, padding, later, drawn])
def test_what_is_mixed_and_what_is_kept(shape: Shape, mask: Callable[[Shape], torch.Tensor] | None) -> None:
    x = operands(shape, None if mask is None else mask(shape))

    def mixed(grid: Grid) -> tuple[Any, ...]:
        found, ends, kept = attention_kernels.mix(x, grid)
        return found, ends, kept.probabilities, kept.weights

    for grid in (grid_over(-0.5, 0.7), grid_over(0.0, 0.3), Grid(0.5, 0)):
        assert_twins_agree(lambda grid=grid: mixed(grid))


@EACH_SHAPE
def test_gradients_of_values_and_of_scores(shape: Shape) -> None:
    kept = attended(shape)
    assert_twins_agree(lambda: parts(attention_kernels.gradient_of_value(gradient(shape), kept, (3, 4))))
    assert_twins_agree(lambda: parts(attention_kernels.gradient_of_scores(gradient(shape), kept, (5, 6))))


@EACH_SHAPE
def test_gradients_of_queries_and_keys(shape: Shape) -> None:
    b, h, n, _ = shape
    kept = attended(shape)
    data = torch.randn(b, h, n, n, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    of_scores = Gradient(data, data.abs().amax().item())
    assert_twins_agree(lambda: tuple(map(parts, attention_kernels.gradients_of_query_and_key(of_scores, kept, (7, 8)))))


@EACH_SHAPE
def test_a_step_of_attention(shape: Shape) -> None:
    """The range of the first batch is measured before its codes are taken; the second has it."""
    _, h, _, width = shape

    def step() -> tuple[Any, ...]:
        torch.manual_seed(1)
        attention = Attention(h * width, h)
        results: list[Any] = []
        for _ in range(2):
            tape = Tape(recording=True, training=True, seed=5, padding=padding(shape)[:, 0])
            mixed, kept = attention.mix(codes(shape, 9), tape)
            back = attention.mix_back(gradient(shape), kept, tape)
            results += [mixed.data, mixed.scale, mixed.zero_point, *map(parts, back)]
        return tuple(results)

    assert_twins_agree(step)


@EACH_SHAPE
def test_nothing_overflows_at_the_extremes(shape: Shape) -> None:
    b, h, n, width = shape
    least = Quantized(torch.full((b, n, h * width), -127, dtype=torch.int8), 1.0, 0)
    even = Attended(least, least, least, torch.full((b, h, n, n), 127, dtype=torch.int8), torch.ones(b * h * n))
    ones = Gradient(torch.full((b * n, h * width), -1.0, dtype=torch.bfloat16), 1.0)
    _, ends, kept = attention_kernels.mix(Operands(least, least, least, h, None), Grid(1.0, 0))
    assert kept.probabilities.eq(127).all()
    assert ends == pytest.approx((-127.0, -127.0))
    of_value = attention_kernels.gradient_of_value(ones, even, (1, 2))
    assert torch.equal(of_value.data, torch.full_like(of_value.data, -127.0 * n))
    of_scores = Gradient(torch.full((b, h, n, n), -1.0, dtype=torch.bfloat16), 1.0)
    for found in attention_kernels.gradients_of_query_and_key(of_scores, even, (3, 4)):
        assert torch.equal(found.data, torch.full_like(found.data, 127.0 * n / math.sqrt(width)))


def test_gradients_that_are_no_numbers_are_noticed() -> None:
    shape = (2, 2, 17, 5)
    kept, wrong = attended(shape), gradient(shape)
    wrong.data[-1, -1] = math.nan
    wrong = Gradient(wrong.data, math.nan)
    of_scores = attention_kernels.gradient_of_scores(wrong, kept, (1, 2))
    of_value = attention_kernels.gradient_of_value(wrong, kept, (1, 2))
    for found in (of_scores, of_value, *attention_kernels.gradients_of_query_and_key(of_scores, kept, (3, 4))):
        assert found.largest != found.largest
        assert found.data.isnan().any()


def test_products_that_might_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="may overflow"):
        attention_kernels.mix(operands((1, 1, 1, 2**17), None), ANY_GRID)


@EACH_SHAPE
@pytest.mark.parametrize("is_causal", [False, True])
def test_floats_take_part_with_the_same_bits(shape: Shape, is_causal: bool) -> None:
    def step() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(3)
        parts = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        mixed = scaled_dot_product_attention(*parts, is_causal=is_causal)
        return mixed.detach(), *torch.autograd.grad(mixed.square().sum(), parts)

    assert_twins_agree(step)


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_attention_up_to_the_rounding(is_causal: bool) -> None:
    """A step is 1/127 of the largest number. That of the scores' gradient is 17 times its root mean square here, so its
    noise is some hundredths."""
    torch.manual_seed(4)
    exact = [torch.randn(3, 4, 40, 16, requires_grad=True) for _ in range(3)]
    rounded = [each.detach().clone().requires_grad_() for each in exact]
    wanted = functional.scaled_dot_product_attention(*exact, is_causal=is_causal)
    found = scaled_dot_product_attention(*rounded, is_causal=is_causal)
    towards = torch.randn(wanted.shape)
    exact_all = (wanted, *torch.autograd.grad(wanted, exact, towards))
    found_all = (found, *torch.autograd.grad(found, rounded, towards))
    for one, other in zip(exact_all, found_all, strict=True):
        assert (one - other).norm() < 0.1 * one.norm()


def test_nothing_later_is_seen() -> None:
    torch.manual_seed(5)
    parts = [torch.rand(2, 3, 12, 8) - 0.5 for _ in range(3)]
    for part in parts:
        part[:, :, 0, 0] = 1.0  # the largest, whatever follows
    before = scaled_dot_product_attention(*parts, is_causal=True)
    for part in parts[1:]:
        part[:, :, 7:] = part[:, :, 7:].flip(3)
    after = scaled_dot_product_attention(*parts, is_causal=True)
    assert torch.equal(before[:, :, :7], after[:, :, :7])
    assert not torch.equal(before[:, :, 7:], after[:, :, 7:])


def test_other_shapes_are_refused() -> None:
    query, key = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 6, 4)
    with pytest.raises(UsageError, match=r"one shape .* \[1, 2, 5, 4\], \[1, 2, 6, 4\]"):
        scaled_dot_product_attention(query, key, key)
