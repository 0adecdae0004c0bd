"""A convolution and its batch norm in one call for each direction return the bits of what torch operators compose."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from peer.native import available
from peer.train.eight_bit import conv_kernels
from peer.train.eight_bit.conv_kernels import Window
from peer.train.eight_bit.norm_kernels import sum_backward
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape
from peer.train.layers import EIGHT_BIT
from tests.train.eight_bit.twins import assert_equal, assert_twins_agree, by_both

# samples, height, width, inputs, outputs, kernel, stride
SHAPES = [
    (1, 5, 5, 16, 16, 3, 1),
    (3, 9, 7, 3, 24, 3, 1),
    (33, 4, 4, 8, 36, 3, 2),
    (2, 7, 6, 40, 12, 3, 2),
    (3, 9, 9, 20, 32, 1, 2),
    (2, 8, 7, 4, 16, 3, 3),
    (1, 13, 11, 3, 8, 7, 2),
    (1, 1, 1, 8, 4, 3, 1),
    (2, 3, 3, 6, 10, 3, 1),
]
# With each output of a channel of its own.
DEPTHWISE = [(3, 5, 6, 20, 20, 3, 1), (2, 8, 7, 16, 16, 3, 2), (2, 7, 5, 12, 12, 5, 2), (2, 3, 4, 6, 6, 3, 1)]


def two_steps(shape: tuple[int, ...], *, groups: int, relu: bool, momentum: float | None) -> tuple[Any, ...]:
    """Return what two steps of a layer return and leave behind, and last the gradients of its weight: the first step
    measures the ranges, the second has them."""
    b, h, w, inputs, outputs, kernel, stride = shape
    torch.manual_seed(7)
    unit = EIGHT_BIT.conv_unit(
        inputs, outputs, kernel=kernel, stride=stride, groups=groups, norm="batch", activate=relu
    )
    assert isinstance(unit.norm, torch.nn.BatchNorm2d)
    unit.norm.momentum = momentum
    with torch.no_grad():
        unit.conv.weight[0] = 0.0
        for parameter in unit.norm.parameters():
            parameter.add_(torch.randn(outputs) * 0.3)
    found: list[Any] = []
    of_weight = []
    for seed in (1, 2):
        codes = torch.randint(0, 256, (b, inputs, h, w), dtype=torch.uint8)
        tape = Tape(recording=True, training=True, seed=seed)
        y = unit.forward_quantized(Quantized(codes, 0.03, 100, rectified=True), tape)
        found += [y.data, y.scale, y.zero_point, y.rectified, tape.saved_bytes()]
        found += [buffer.clone() for buffer in unit.buffers()]
        passed = unit.backward_quantized(Gradient(*_gradient(y.data)), tape)
        assert passed is not None
        found += [passed.data, passed.largest, *(tape.gradient_of(parameter) for parameter in unit.norm.parameters())]
        of_weight.append(tape.gradient_of(unit.conv.weight))
    return *found, *of_weight


def _gradient(like: torch.Tensor) -> tuple[torch.Tensor, float]:
    gradient = torch.randn(like.shape).to(torch.bfloat16)
    return gradient, gradient.abs().max().item()


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("shape", SHAPES + DEPTHWISE)
def test_a_layer_has_the_bits_of_its_twin(shape: tuple[int, ...], relu: bool, momentum: float | None) -> None:
    groups = shape[3] if shape in DEPTHWISE else 1
    native, plain = by_both(lambda: two_steps(shape, groups=groups, relu=relu, momentum=momentum))
    assert_equal(native[:-2], plain[:-2])
    # Weight gradients are sums in float32, in another order.
    for one, other in zip(native[-2:], plain[-2:], strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())


@pytest.mark.skipif(not available(), reason="the native kernels were not built")
def test_statistics_of_large_images_do_not_overflow() -> None:
    torch.manual_seed(3)
    unit = EIGHT_BIT.conv_unit(4, 4, kernel=1, stride=1, groups=1, norm="batch")
    with torch.no_grad():
        unit.conv.weight.copy_(torch.eye(4).view(4, 4, 1, 1))
    assert isinstance(unit.norm, torch.nn.BatchNorm2d)
    # 2^18 pixels whose codes before the norm are all 127 steps from zero: squares add up to more than 2^31.
    x = Quantized(torch.full((1, 4, 512, 512), 255, dtype=torch.uint8), 1.0, 0)
    unit.before_norm.running_largest.fill_(255.0)
    unit.output.observe_(-1.0, 1.0)
    unit.norm.momentum = 1.0
    unit.forward_quantized(x, Tape(recording=False, training=True))
    assert unit.norm.running_mean is not None
    assert unit.norm.running_var is not None
    assert torch.allclose(unit.norm.running_mean, torch.full((4,), 255.0), rtol=1e-5)
    assert unit.norm.running_var.abs().max() < 1.0


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("shape", SHAPES + DEPTHWISE)
def test_input_gradients_have_the_bits_of_their_twins(shape: tuple[int, ...], masked: bool) -> None:
    b, h, w, inputs, outputs, kernel, stride = shape
    torch.manual_seed(5)
    window = Window(kernel, stride, groups=inputs if shape in DEPTHWISE else 1)
    weight = torch.randn(outputs, inputs // window.groups, kernel, kernel)
    mask = torch.randint(0, 3, (b, h, w, conv_kernels.up_to_4(inputs)), dtype=torch.uint8), 1
    gradient = torch.randn(b, window.results(h), window.results(w), outputs).to(torch.bfloat16)
    largest, largest_weight = gradient.abs().max().item(), weight.abs().max().item()
    for of_gradient in (largest, 0.0):
        compute = partial(conv_kernels.input_gradient, gradient, of_gradient, (11, 12), weight, largest_weight, window)
        assert_twins_agree(partial(compute, (h, w), mask if masked else None))
    if window.covers and inputs % 4 == 0:
        added = torch.randn(b, h, w, inputs).to(torch.bfloat16)
        assert_twins_agree(partial(compute, (h, w), mask if masked else None, added))
        alone, _ = compute((h, w), None)
        total = sum_backward(alone, added, *(mask if masked else (None, 0)))
        assert_equal(compute((h, w), mask if masked else None, added), total)
