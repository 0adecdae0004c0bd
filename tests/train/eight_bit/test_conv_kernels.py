"""Convolutions of codes: the same integers from every kernel as from float64, at odd sizes and all strides."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from peer.train.eight_bit import conv_kernels
from peer.train.eight_bit.conv_kernels import Weights, Window

# samples, height, width, inputs, outputs, kernel, stride
SHAPES = [
    (1, 5, 5, 16, 16, 3, 1),
    (3, 9, 7, 3, 24, 3, 1),
    (2, 7, 6, 40, 12, 3, 2),
    (5, 2, 3, 64, 80, 3, 2),
    (2, 6, 7, 32, 130, 1, 1),
    (3, 9, 9, 20, 33, 1, 2),
    (1, 13, 11, 3, 8, 7, 2),
    (2, 1, 1, 8, 4, 3, 1),
    (1, 8, 7, 4, 16, 3, 3),
    (2, 5, 6, 3, 20, 23, 1),
    # More samples than are worked on at a time, and some left over, in rows that are narrower than registers.
    (35, 8, 8, 128, 40, 3, 1),
    (50, 7, 5, 64, 33, 3, 2),
    (18, 2, 2, 64, 64, 1, 1),
    (33, 4, 4, 64, 64, 3, 2),
    # Taps that fill no registers, of channels that do not either.
    (2, 5, 6, 35, 34, 5, 1),
    (2, 6, 5, 21, 20, 3, 1),
    (2, 4, 5, 37, 17, 1, 1),
]


def image(shape: tuple[int, ...], zero_point: int) -> torch.Tensor:
    b, h, w, inputs = shape[:4]
    codes = torch.full((b, h, w, conv_kernels.up_to_4(inputs)), zero_point, dtype=torch.uint8)
    codes[..., :inputs] = torch.randint(0, 256, (b, h, w, inputs), generator=torch.Generator().manual_seed(1))
    return codes


def weights_of(inputs: int, outputs: int, kernel: int) -> tuple[torch.Tensor, Weights]:
    weight = torch.randn(outputs, inputs, kernel, kernel, generator=torch.Generator().manual_seed(2))
    return weight, conv_kernels.quantize_weights(weight)


def of_whole_numbers(
    g: torch.Tensor,
    weight: torch.Tensor,
    weights: Weights,
    window: Window,
    size: tuple[int, int],
    mask: tuple[torch.Tensor, int] | None,
) -> tuple[torch.Tensor, float]:
    """Return the input gradient for a layer gradient of int8, of which nothing is rounded on the way."""
    return conv_kernels.input_gradient(g.to(torch.bfloat16), 127.0, (1, 2), weight, weights.largest, window, size, mask)


def plain(codes: torch.Tensor) -> torch.Tensor:
    return codes.double().permute(0, 3, 1, 2)


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_products_are_those_of_float64(shape: tuple[int, ...]) -> None:
    _, _, _, inputs, outputs, kernel, stride = shape
    weight, weights = weights_of(inputs, outputs, kernel)
    levels = torch.round(weight * (127.0 / weight.abs().max().item()))
    assert torch.equal(weights.codes[..., :inputs].permute(0, 3, 1, 2), levels.to(torch.int8))
    assert torch.equal(weights.sums, levels.sum(dim=(1, 2, 3)).to(torch.int32))

    x = image(shape, 77)
    expected = functional.conv2d(
        plain(x)[:, :inputs] - 77, levels.double(), stride=stride, padding=kernel // 2
    ).permute(0, 2, 3, 1)
    scale, shift = torch.rand(outputs) * 0.01, torch.rand(outputs) * 200
    window = Window(kernel, stride)
    codes, lows, highs = conv_kernels.forward(x, 77, weights, window, (scale, shift, (3.0, 250.0)))
    assert torch.equal(lows, expected.amin(dim=(0, 1, 2)).to(torch.int32))
    assert torch.equal(highs, expected.amax(dim=(0, 1, 2)).to(torch.int32))
    assert torch.equal(codes, torch.round((expected.float() * scale + shift).clamp(3, 250)).to(torch.uint8))
    assert torch.equal(conv_kernels.product(x, 77, weights, window), expected.to(torch.int32))
    measured = conv_kernels.extremes(x, 77, weights, window)
    assert torch.equal(measured[0], lows)
    assert torch.equal(measured[1], highs)


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("shape", SHAPES)
def test_input_gradients_are_those_of_float64(shape: tuple[int, ...]) -> None:
    b, h, w, inputs, outputs, kernel, stride = shape
    window = Window(kernel, stride)
    weight, weights = weights_of(inputs, outputs, kernel)
    g = torch.randint(-127, 128, (b, window.results(h), window.results(w), outputs), dtype=torch.int8)
    exact = torch.nn.grad.conv2d_input(
        (b, weights.codes.shape[3], h, w), plain(weights.codes), plain(g), stride=stride, padding=kernel // 2
    ).permute(0, 2, 3, 1)
    assert torch.equal(conv_kernels.input_product(g, weights, window, (h, w)), exact.to(torch.int32))
    x = image(shape, 10)
    for mask in (None, (x, 10)):
        found, largest = of_whole_numbers(g, weight, weights, window, (h, w), mask)
        expected = (exact.float() * weights.scale).to(torch.bfloat16)
        if mask is not None:
            expected.masked_fill_(x == 10, 0)
        assert torch.equal(found, expected)
        assert largest == expected.abs().max()


def of_width(width: int) -> tuple[int, ...]:
    """Return a shape of this width, in which the others are as good as drawn: rows of results that fill registers and
    that do not, odd and even numbers of samples, channels and results at, below and beyond sixteens."""
    samples, inputs = (1, 2, 3, 7, 16, 31, 33)[width % 7], (3, 4, 8, 16, 20, 32, 36, 64, 80)[width % 9]
    return samples, 1 + width % 4, width, inputs, 1 + 37 * width % 80, (1, 3, 7)[width % 3], 1 + width // 2 % 2


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("shape", [*SHAPES, *map(of_width, range(1, 34))])
def test_weight_gradients_take_codes_and_bfloat16(shape: tuple[int, ...]) -> None:
    b, h, w, inputs, outputs, kernel, stride = shape
    window = Window(kernel, stride)
    x = image(shape, 99)
    g = torch.randn(b, window.results(h), window.results(w), outputs).to(torch.bfloat16)
    found = conv_kernels.weight_gradient(x, 99, g, inputs, window, 0.5)
    exact = torch.nn.grad.conv2d_weight(
        plain(x)[:, :inputs] - 99, [outputs, inputs, kernel, kernel], plain(g), stride=stride, padding=kernel // 2
    )
    assert found.dtype == torch.float32
    assert (found - 0.5 * exact).abs().max() < 1e-5 * exact.abs().max() + 1e-3


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize(
    ("b", "h", "w", "channels", "kernel", "stride"),
    [
        (2, 7, 5, 8, 3, 2),
        (1, 4, 40, 32, 3, 1),
        (3, 6, 6, 20, 3, 1),
        (2, 8, 8, 48, 3, 2),
        (2, 9, 6, 16, 3, 3),
        (1, 5, 6, 36, 5, 1),
        (2, 4, 4, 16, 5, 2),
        (2, 3, 3, 16, 1, 1),
        (2, 5, 7, 6, 3, 1),
    ],
)
def test_channels_one_at_a_time(b: int, h: int, w: int, channels: int, kernel: int, stride: int) -> None:
    window = Window(kernel, stride, groups=channels)
    sizes = {"stride": stride, "padding": kernel // 2, "groups": channels}
    x = image((b, h, w, channels), 50)
    weight, weights = weights_of(1, channels, kernel)
    levels = weights.codes[..., :1].permute(0, 3, 1, 2).double()
    expected = functional.conv2d(plain(x)[:, :channels] - 50, levels, **sizes).permute(0, 2, 3, 1)
    scale, shift = torch.rand(channels) * 0.01, torch.rand(channels) * 200
    codes, lows, highs = conv_kernels.forward(x, 50, weights, window, (scale, shift, (3.0, 250.0)))
    assert torch.equal(codes, torch.round((expected.float() * scale + shift).clamp(3, 250)).to(torch.uint8))
    assert torch.equal(lows, expected.amin(dim=(0, 1, 2)).to(torch.int32))
    assert torch.equal(highs, expected.amax(dim=(0, 1, 2)).to(torch.int32))
    measured = conv_kernels.extremes(x, 50, weights, window)
    assert torch.equal(torch.stack(measured), torch.stack((lows, highs)))

    g = torch.randint(-127, 128, tuple(expected.shape), dtype=torch.int8)
    exact = torch.nn.grad.conv2d_input((b, channels, h, w), levels, plain(g), **sizes).permute(0, 2, 3, 1)
    for mask in (None, (x, int(x[0, 0, 0, 0]))):
        wanted = (exact.float() * weights.scale).to(torch.bfloat16)
        if mask is not None:
            wanted.masked_fill_(x[..., :channels] == mask[1], 0)
        found, largest = of_whole_numbers(g, weight, weights, window, (h, w), mask)
        assert torch.equal(found[..., :channels], wanted)
        assert largest == wanted.abs().max()

    gradient = torch.randn(b, window.results(h), window.results(w), channels).to(torch.bfloat16)
    by_weight = torch.nn.grad.conv2d_weight(
        plain(x)[:, :channels] - 50, [channels, 1, kernel, kernel], plain(gradient), **sizes
    )
    found = conv_kernels.weight_gradient(x, 50, gradient, channels, window, 0.5)
    # A sum of n float32 products is off by at most n roundings of the sum of their magnitudes.
    terms = b * gradient.shape[1] * gradient.shape[2]
    magnitudes = torch.nn.grad.conv2d_weight(
        (plain(x)[:, :channels] - 50).abs(), [channels, 1, kernel, kernel], plain(gradient).abs(), **sizes
    )
    assert ((found - 0.5 * by_weight).abs() <= (terms + 2) * 2.0**-24 * magnitudes).all()


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(16, 8, 8), (8, 16, 8), (16, 16, 4)])
def test_groups_of_several_channels(inputs: int, outputs: int, groups: int) -> None:
    window = Window(3, 1, groups=groups)
    sizes = {"stride": 1, "padding": 1, "groups": groups}
    x = image((2, 5, 4, inputs), 50)
    weight, weights = weights_of(inputs // groups, outputs, 3)
    levels = weights.codes[..., : inputs // groups].permute(0, 3, 1, 2).double()
    expected = functional.conv2d(plain(x) - 50, levels, **sizes).permute(0, 2, 3, 1)
    lows, highs = conv_kernels.extremes(x, 50, weights, window)
    assert torch.equal(lows, expected.amin(dim=(0, 1, 2)).to(torch.int32))
    assert torch.equal(highs, expected.amax(dim=(0, 1, 2)).to(torch.int32))
    g = torch.randint(-127, 128, tuple(expected.shape), dtype=torch.int8)
    exact = torch.nn.grad.conv2d_input((2, inputs, 5, 4), levels, plain(g), **sizes).permute(0, 2, 3, 1)
    found, _ = of_whole_numbers(g, weight, weights, window, (5, 4), None)
    assert torch.equal(found, (exact.float() * weights.scale).to(torch.bfloat16))
    gradient = g.to(torch.bfloat16)
    by_weight = torch.nn.grad.conv2d_weight(plain(x) - 50, list(weight.shape), plain(gradient), **sizes)
    assert torch.equal(conv_kernels.weight_gradient(x, 50, gradient, inputs, window, 1.0), by_weight.float())
