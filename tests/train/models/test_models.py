"""The models: sizes that the papers give, and that those of earlier versions stay what they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from peer.train import listed
from peer.train.full_precision.norms import NORMS
from peer.train.model_file import start_model
from peer.train.models import MODELS
from peer.train.models.distilbert import distilbert
from peer.train.models.mlp import logistic, mlp
from peer.train.models.mobilenet import mobilenetv2
from peer.train.models.resnet import resnet18, resnet20, resnet54, resnet110
from peer.train.models.synthetic import Quadratic
from peer.train.models.vgg import vgg11, vgg16


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_model_is_described():
    assert all(summary.endswith(".") for summary in listed.MODELS.values())
    assert list(listed.MODELS) == list(MODELS)
    assert MODELS["resnet20"] is resnet20


def test_sizes_are_those_of_the_papers():
    assert {norm: count(resnet20(norm=norm)) for norm in NORMS} == {
        "evonorm": 273_258,
        "range-evonorm": 273_258,
        "group": 272_474,
        "batch": 272_474,
        "range-batch": 272_474,
    }
    assert count(resnet20(100)) == 273_258 + 90 * 65
    assert count(mlp((64, 128, 10))) == 9_610
    assert count(logistic(784, 10)) == 7_850


def test_sizes_are_those_of_the_low_precision_papers_table_1():
    """In millions, as it prints them."""
    assert round(count(resnet20()) / 1e6, 2) == 0.27
    assert round(count(resnet54()) / 1e6, 2) == 0.76
    assert round(count(vgg11()) / 1e6, 2) == 9.49
    assert round(count(resnet18()) / 1e6, 1) == 11.2
    # The paper prints 66.7: the published model has 66.36 without its classifier.
    assert count(distilbert(4)) == 66_956_548


def test_sizes_of_the_models_that_the_table_lacks():
    assert round(count(resnet110(norm="batch")) / 1e6, 2) == 1.73
    assert count(vgg16()) == 14_982_474
    assert round(count(mobilenetv2(norm="batch")) / 1e6, 2) == 2.24


def test_models_of_earlier_versions_are_unchanged():
    """Names, order and first values, so that old checkpoints and trajectories hold."""
    found = {}
    for name, make in (
        ("logistic", lambda: logistic(784, 10)),
        ("mlp", lambda: mlp((64, 256, 10))),
        ("vgg11", vgg11),
        ("evonorm", resnet20),
        ("group", lambda: resnet20(norm="group")),
        ("batch", lambda: resnet20(norm="batch")),
    ):
        torch.manual_seed(7)
        found[name] = start_model(make()).whole[:16]
    assert found == {
        "logistic": "ee03253d39ccca34",
        "mlp": "7147931fec2879ca",
        "vgg11": "753c91cdf36ad2e4",
        "evonorm": "a1d3117a5c594afe",
        "group": "9813de909c44b4be",
        "batch": "34ca8ed0ceabf239",
    }


@pytest.mark.parametrize("norm", NORMS)
def test_resnet_gives_logits_and_gradients_everywhere(norm):
    torch.manual_seed(0)
    model = resnet20(7, norm=norm)
    assert_trains(model, torch.randn(2, 3, 32, 32), 7)


@pytest.mark.parametrize(
    ("make", "size"),
    [(resnet18, 32), (resnet18, 96), (vgg11, 64), (mobilenetv2, 32), (mobilenetv2, 96)],
)
def test_models_fit_images_of_several_sizes(make, size: int):
    torch.manual_seed(0)
    assert_trains(make(5, image_size=size), torch.randn(2, 3, size, size), 5)


def assert_trains(model: nn.Module, inputs: torch.Tensor, num_classes: int) -> None:
    logits = model(inputs)
    assert logits.shape == (2, num_classes)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(logits, torch.tensor([1, 2])), list(model.parameters()))
    assert all(torch.isfinite(gradient).all() and gradient.abs().max() > 0 for gradient in gradients)


def test_resolution_falls_twice():
    model = resnet20()
    shapes = []
    for block in model.get_submodule("blocks"):
        block.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[1:])))
    model(torch.zeros(1, 3, 32, 32))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


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
