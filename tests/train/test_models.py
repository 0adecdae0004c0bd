"""The models: sizes that the papers give, and EvoNorm against its formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from peer.train.models import MODELS, Quadratic, logistic, mlp, resnet20, vgg11
from peer.train.models.evonorm import EvoNormS0
from peer.train.models.resnet import NORMS


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_model_is_described():
    assert all(info.summary.endswith(".") for info in MODELS.values())
    assert MODELS["resnet20"].make is resnet20


def test_sizes_are_those_of_the_papers():
    assert count(resnet20(norm="evonorm")) == 273_258
    assert count(resnet20(norm="group")) == count(resnet20(norm="batch")) == 272_474
    assert count(resnet20(100)) == 273_258 + 90 * 65
    assert round(count(vgg11()) / 1e6, 2) == 9.49
    assert count(mlp((64, 128, 10))) == 9_610
    assert count(logistic(784, 10)) == 7_850


@pytest.mark.parametrize("norm", NORMS)
def test_resnet_gives_logits_and_gradients_everywhere(norm):
    torch.manual_seed(0)
    model = resnet20(7, norm=norm)
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 7)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(logits, torch.tensor([1, 2])), list(model.parameters()))
    assert all(torch.isfinite(gradient).all() and gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("norm", ["evonorm", "group"])
def test_samples_do_not_see_each_other(norm):
    """What makes these norms fit for skewed data, and batch norm not."""
    torch.manual_seed(0)
    model, images = resnet20(norm=norm), torch.randn(3, 3, 32, 32)
    alone = model(images[:1])
    assert torch.allclose(model(images)[:1], alone, atol=1e-5)
    torch.manual_seed(0)
    batch = resnet20(norm="batch")
    assert not torch.allclose(batch(images)[:1], batch(images[:1]), atol=1e-3)


def test_only_batch_norm_keeps_buffers():
    assert not list(resnet20(norm="evonorm").buffers())
    assert not list(resnet20(norm="group").buffers())
    assert len(list(resnet20(norm="batch").buffers())) == 3 * 21


def test_resolution_falls_twice():
    model = resnet20()
    shapes = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[1:])))
    model(torch.zeros(1, 3, 32, 32))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


@pytest.mark.parametrize(("channels", "groups"), [(16, 32), (64, 32), (12, 4)])
def test_evonorm_follows_its_formula(channels: int, groups: int):
    torch.manual_seed(1)
    norm = EvoNormS0(channels, groups=groups).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(channels))
    x = 3 + 2 * torch.randn(4, channels, 5, 5, dtype=torch.float64)
    per = channels // min(groups, channels)
    for sample in range(4):
        for channel in range(channels):
            group = slice(channel // per * per, channel // per * per + per)
            variance = x[sample, group].var(correction=0)
            one = x[sample, channel]
            expected = one * torch.sigmoid(norm.v[channel] * one) / torch.sqrt(variance + 1e-5)
            expected = expected * norm.weight[channel] + norm.bias[channel]
            assert torch.allclose(norm(x)[sample, channel], expected, atol=1e-10)


def test_evonorm_gradient_is_the_slope():
    torch.manual_seed(2)
    norm = EvoNormS0(4, groups=2).double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


def test_evonorm_refuses_groups_that_do_not_divide_the_channels():
    with pytest.raises(ValueError, match="48 channels do not make 32 equal groups"):
        EvoNormS0(48)


def test_vgg_starts_with_small_gradients():
    """Without a norm, larger ones make the first steps at the papers' learning rate of 0.1 diverge."""
    torch.manual_seed(0)
    model = vgg11()
    loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.tensor([0, 3, 5, 9]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert torch.stack([gradient.norm() for gradient in gradients]).norm() < 5
    assert loss.item() == pytest.approx(2.303, abs=0.05)


def test_quadratic_loss_is_its_formula():
    model = Quadratic(2500, 2)
    assert [layer.numel() for layer in model.layers] == [1024, 1024, 452]
    inputs = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    a, c = 2.0, 0.5
    expected = sum(
        a / 2 * layer.double().square().sum()
        + c * sum((row.double() * model.pattern[: row.numel()]).sum() for row in layer.split(1024))
        for layer in model.layers
    )
    assert model(inputs).item() == pytest.approx(expected.item(), rel=1e-5)
