"""The norms against their formulas, and what each asks of a batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from peer.train.full_precision.norms import (
    NORMS,
    EvoNormS0,
    RangeBatchNorm,
    RangeEvoNorm,
    activates,
    equal_parts,
    make_norm,
    range_scale,
)
from peer.train.models.resnet import resnet20


def drawn(norm: nn.Module) -> nn.Module:
    """Return the norm in float64 with parameters drawn at random."""
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return norm.double()


@pytest.mark.parametrize(("channels", "groups"), [(16, 32), (64, 32), (12, 4)])
def test_evonorm_follows_its_formula(channels: int, groups: int):
    torch.manual_seed(1)
    norm = drawn(EvoNormS0(channels, groups=groups))
    x = 3 + 2 * torch.randn(4, channels, 5, 5, dtype=torch.float64)
    per = channels // min(groups, channels)
    result = norm(x)
    for sample in range(4):
        for channel in range(channels):
            group = slice(channel // per * per, channel // per * per + per)
            variance = x[sample, group].var(correction=0)
            one = x[sample, channel]
            expected = one * torch.sigmoid(norm.v[channel] * one) / torch.sqrt(variance + 1e-5)
            expected = expected * norm.weight[channel] + norm.bias[channel]
            assert torch.allclose(result[sample, channel], expected, atol=1e-10)


@pytest.mark.parametrize(("channels", "groups"), [(16, 32), (64, 32), (12, 4)])
def test_range_evonorm_follows_its_formula(channels: int, groups: int):
    torch.manual_seed(1)
    norm = drawn(RangeEvoNorm(channels, groups=groups))
    x = 3 + 2 * torch.randn(4, channels, 5, 5, dtype=torch.float64)
    per = channels // min(groups, channels)
    n = per * 25
    constant = 0.175 * (1 + math.sqrt(math.pi * math.log(4))) / math.sqrt(2 * math.log(n))
    result = norm(x)
    for sample in range(4):
        for channel in range(channels):
            group = x[sample, channel // per * per : channel // per * per + per]
            one = x[sample, channel]
            gate = ((one * norm.v[channel] + 3) / 6).clamp(0, 1)
            expected = one * gate / (constant * (group.max() - group.min()) + 1e-5)
            expected = expected * norm.weight[channel] + norm.bias[channel]
            assert torch.allclose(result[sample, channel], expected, atol=1e-10)


@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (8, 8), (16, 16), (24, 12), (32, 16), (17, 1)])
def test_range_batch_norm_follows_its_formula(batch: int, parts: int):
    torch.manual_seed(1)
    norm = drawn(RangeBatchNorm(3))
    x = 3 + 2 * torch.randn(batch, 3, 4, 5, dtype=torch.float64)
    assert equal_parts(batch, 16) == parts
    for channel in range(3):
        chunks = x[:, channel].reshape(parts, -1)
        spread = (chunks.max(dim=1).values - chunks.min(dim=1).values).mean()
        scale = range_scale(chunks.shape[1]) * spread
        expected = (x[:, channel] - x[:, channel].mean()) / (scale + 1e-5) * norm.weight[channel] + norm.bias[channel]
        assert torch.allclose(norm(x)[:, channel], expected, atol=1e-10)


@pytest.mark.parametrize("n", [16, 64, 1024, 32768])
def test_the_range_estimates_the_standard_deviation_of_normal_numbers(n: int):
    torch.manual_seed(0)
    samples = torch.randn(200, n)
    estimate = range_scale(n) * (samples.max(dim=1).values - samples.min(dim=1).values)
    assert estimate.mean().item() == pytest.approx(1.0, abs=0.25)


def test_range_batch_norm_keeps_running_means_for_evaluation():
    norm = RangeBatchNorm(2)
    first, second = torch.randn(8, 2, 4, 4) + 5, 3 * torch.randn(8, 2, 4, 4)
    norm(first)
    norm(second)
    expected = 0.9 * 0.1 * first.mean(dim=(0, 2, 3)) + 0.1 * second.mean(dim=(0, 2, 3))
    assert torch.allclose(norm.running_mean, expected, atol=1e-5)
    assert norm.num_batches_tracked == 2
    norm.eval()
    before = norm.running_scale.clone()
    x = torch.randn(1, 2, 4, 4)
    expected = (x - norm.running_mean.view(2, 1, 1)) / (norm.running_scale.view(2, 1, 1) + 1e-5)
    assert torch.allclose(norm(x), expected, atol=1e-5)
    assert torch.equal(norm.running_scale, before)


def test_without_momentum_all_batches_count_alike():
    norm = RangeBatchNorm(2, momentum=None)
    batches = [torch.randn(8, 2, 4, 4) + i for i in range(3)]
    for batch in batches:
        norm(batch)
    assert torch.allclose(norm.running_mean, torch.cat(batches).mean(dim=(0, 2, 3)), atol=1e-5)
    norm.reset_running_stats()
    assert norm.running_mean.tolist() == [0, 0]
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("make", [EvoNormS0, RangeEvoNorm, RangeBatchNorm])
def test_gradients_are_the_slopes(make):
    torch.manual_seed(2)
    norm = drawn(make(4)).eval() if make is RangeBatchNorm else drawn(make(4, groups=2))
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


def test_range_batch_norm_has_the_slope_of_its_batch_statistics():
    torch.manual_seed(2)
    norm = drawn(RangeBatchNorm(2))
    x = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


def test_groups_that_do_not_divide_the_channels_are_refused():
    for make in (EvoNormS0, RangeEvoNorm):
        with pytest.raises(ValueError, match="48 channels do not make 32 equal groups"):
            make(48)


@pytest.mark.parametrize("norm", NORMS)
def test_only_batch_statistics_let_samples_see_each_other(norm):
    """What makes the others fit for skewed data."""
    torch.manual_seed(0)
    layer, x = make_norm(norm, 8), torch.randn(3, 8, 4, 4)
    alone, together = layer(x[:1]), layer(x)[:1]
    assert torch.allclose(alone, together, atol=1e-5) == (norm not in ("batch", "range-batch"))


def test_only_batch_statistics_are_buffers():
    counts = {norm: len(list(resnet20(norm=norm).buffers())) for norm in NORMS}
    assert counts == {"evonorm": 0, "range-evonorm": 0, "group": 0, "batch": 3 * 21, "range-batch": 3 * 21}


def test_the_two_evonorms_hold_the_same_parameters():
    """So that a model may go on from one to the other."""
    names = [list(dict(resnet20(norm=norm).named_parameters())) for norm in ("evonorm", "range-evonorm")]
    assert names[0] == names[1]
    assert [norm for norm in NORMS if activates(norm)] == ["evonorm", "range-evonorm"]
