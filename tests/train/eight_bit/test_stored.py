"""Layers whose weights are codes and nothing else compute what they computed with the same numbers in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from peer.train.eight_bit.layer import Layer
from peer.train.eight_bit.stored import store_
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape
from peer.train.eight_bit.transformer import TokenEmbedding
from peer.train.int8_file import quantized
from peer.train.layers import EIGHT_BIT


def images() -> Quantized:
    return Quantized(torch.randint(0, 256, (2, 8, 5, 5), dtype=torch.uint8), 0.03, 100)


def pieces() -> Quantized:
    return Quantized(torch.randint(0, 20, (2, 6)), 1.0, 0)


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda: EIGHT_BIT.linear(5, 7), images),
        (lambda: EIGHT_BIT.conv_unit(8, 12, kernel=3, stride=2, groups=1), images),
        (lambda: EIGHT_BIT.conv_unit(8, 12, kernel=3, stride=1, groups=1, norm="batch"), images),
        (lambda: EIGHT_BIT.conv_unit(8, 8, kernel=3, stride=1, groups=8, norm="range-evonorm"), images),
        (lambda: TokenEmbedding(20, 9, 16), pieces),
    ],
)
def test_codes_stand_for_their_numbers(make: Callable[[], Layer], read: Callable[[], Quantized]) -> None:
    torch.manual_seed(3)
    layer, x = make(), read()
    layer.forward_quantized(x, Tape(recording=False, training=True))
    layer.eval()
    matrices = [
        (module, name, parameter)
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    ]
    assert matrices
    stored: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
    for module, name, parameter in matrices:
        codes, scale = quantized(parameter.detach())
        stored.append((module, name, codes, torch.tensor([scale])))
        parameter.data = codes.to(torch.float32) * scale
    expected = layer.forward_quantized(x, Tape(recording=False, training=False))
    twin = copy.deepcopy(layer)
    for each in stored:
        store_(*each)
    found = layer.forward_quantized(x, Tape(recording=False, training=False))
    assert torch.equal(found.data, expected.data)
    assert (found.scale, found.zero_point) == (expected.scale, expected.zero_point)
    assert not any(parameter.ndim > 1 for parameter in layer.parameters())
    # Whoever trains it all the same trains what is left, and gets the gradient of the input.
    passed = [_step(each.train(), x) for each in (twin, layer)]
    assert torch.equal(passed[0], passed[1])


def _step(layer: Layer, x: Quantized) -> torch.Tensor:
    tape = Tape(recording=True, training=True, seed=5)
    y = layer.forward_quantized(x, tape)
    gradient = torch.randn(y.data.shape, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    passed = layer.backward_quantized(Gradient(gradient, gradient.abs().max().item()), tape)
    return torch.zeros(0) if passed is None else passed.data
