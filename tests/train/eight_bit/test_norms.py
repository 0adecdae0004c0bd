"""Norms in 8 bits are those of float64 on the codes that they read, and so are their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from peer.train.eight_bit.norms import norm_in_8_bits
from peer.train.eight_bit.ranges import RunningRange
from peer.train.eight_bit.tensors import Tape
from peer.train.full_precision.norms import NORMS, Norm, RangeBatchNorm, RangeEvoNorm, activates, make_norm

CHANNELS = 64


def module_of(name: Norm) -> nn.Module:
    torch.manual_seed(4)
    module = make_norm(name, CHANNELS)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(CHANNELS) * 0.3)
    return module


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_values_and_gradients_are_those_of_float64(name: Norm, training: bool) -> None:
    module = module_of(name)
    exact_module = copy.deepcopy(module).double().train(training)
    relu = not activates(name)
    codes = (torch.randn(4, 30, CHANNELS) * 30 + torch.randn(CHANNELS) * 10 + 128).round().clamp(1, 255)
    # One number is the greatest and one the least of each sample's channel, so that a range has one gradient.
    codes = codes.clamp(20, 230)
    for sample in range(4):
        codes[sample, sample, :], codes[sample, sample + 5, :] = 15 - sample, 240 + sample
    steps = torch.rand(CHANNELS) * 0.05 + 0.01

    x = ((codes.double() - 128) * steps).requires_grad_()
    y = exact_module(x.permute(0, 2, 1).unsqueeze(3)).squeeze(3).permute(0, 2, 1)
    y = torch.relu(y) if relu else y

    norm, output = norm_in_8_bits(module), RunningRange()
    tape = Tape(recording=True, training=training)
    found, _ = norm.forward(codes.to(torch.uint8), steps, output, tape, relu=relu)
    assert found.data.dtype == torch.uint8
    assert (found.dequantize() - y).abs().max() < 0.501 * found.scale
    for (_, buffer), (_, expected) in zip(module.named_buffers(), exact_module.named_buffers(), strict=True):
        assert torch.allclose(buffer.double(), expected.double(), rtol=1e-5)
    assert all(tensor.dtype == torch.uint8 or tensor.numel() <= 4 * CHANNELS for tensor in tape.tensors())

    gradient = torch.randn(codes.shape).to(torch.bfloat16)
    if relu:
        gradient.masked_fill_(y <= 0, 0)
    passed = norm.backward(gradient, tape)
    expected = torch.autograd.grad(y, (x, *exact_module.parameters()), gradient.double())
    assert passed.data.dtype == torch.bfloat16
    error = (passed.data.double() - expected[0]).abs()
    assert (error < 0.005 * expected[0].abs() + 1e-4 * expected[0].abs().max()).all()
    assert passed.largest == passed.data.abs().max()
    for parameter, gradient_of in zip(module.parameters(), expected[1:], strict=True):
        assert torch.allclose(tape.gradient_of(parameter).double(), gradient_of, rtol=1e-3, atol=1e-3)


def test_equal_extremes_share_the_gradient_of_a_range() -> None:
    module = RangeEvoNorm(1)
    codes = torch.tensor([[[10], [200], [200], [150]]], dtype=torch.uint8)
    steps = torch.ones(1)
    norm, tape = norm_in_8_bits(module), Tape(recording=True, training=True)
    norm.forward(codes, steps, RunningRange(), tape, relu=False)
    passed = norm.backward(torch.tensor([[[0.0], [0.0], [0.0], [8.0]]]).to(torch.bfloat16), tape)
    low, high, equal, _ = passed.data.view(-1).tolist()
    assert high == equal < 0.0
    assert low == pytest.approx(-2 * high, rel=0.01)


def test_the_range_of_a_batch_is_the_mean_of_its_parts() -> None:
    module = RangeBatchNorm(1)
    codes = torch.full((32, 2, 1), 128, dtype=torch.uint8)
    codes[0, 0] = 255
    norm = norm_in_8_bits(module)
    norm.forward(codes, torch.ones(1), RunningRange(), Tape(recording=False, training=True), relu=False)
    plain = RangeBatchNorm(1)
    plain(codes.float().view(32, 1, 2, 1) - 128)
    assert module.running_scale == pytest.approx(plain.running_scale.item())


def test_a_norm_without_counterpart_is_refused() -> None:
    with pytest.raises(TypeError, match="LayerNorm"):
        norm_in_8_bits(nn.LayerNorm(3))
