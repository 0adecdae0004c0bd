"""One definition of each model: whatever computes, the vector that is trained and sent is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from peer.train.full_precision.norms import NORMS
from peer.train.layers import EIGHT_BIT, FULL_PRECISION, Layers
from peer.train.models.distilbert import DistilBertSize, distilbert
from peer.train.models.mlp import logistic, mlp
from peer.train.models.mobilenet import mobilenetv2
from peer.train.models.resnet import resnet18, resnet20
from peer.train.models.vgg import vgg11

SMALL = DistilBertSize(vocabulary=60, positions=16, width=32, blocks=2, heads=4, hidden=64)
MODELS: dict[str, Callable[[Layers], nn.Module]] = {
    "logistic": lambda layers: logistic(64, 10, layers),
    "mlp": lambda layers: mlp((64, 32, 10), layers),
    "vgg11": lambda layers: vgg11(layers=layers),
    "resnet18": lambda layers: resnet18(image_size=96, layers=layers),
    "mobilenetv2": lambda layers: mobilenetv2(layers=layers),
    "distilbert": lambda layers: distilbert(4, SMALL, layers=layers),
    **{f"resnet20, {norm}": lambda layers, norm=norm: resnet20(norm=norm, layers=layers) for norm in NORMS},
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_have_the_same_names_order_and_first_values(name: str) -> None:
    made = []
    for layers in (FULL_PRECISION, EIGHT_BIT):
        torch.manual_seed(3)
        made.append(dict(MODELS[name](layers).named_parameters()))
    full, eight = made
    assert list(full) == list(eight)
    assert all(torch.equal(parameter, eight[key]) for key, parameter in full.items())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_point_the_same_way(name: str) -> None:
    """Of the whole vector, on one batch. Of fewer samples it is noisier where a norm takes its range from the batch."""
    torch.manual_seed(4)
    samples = 8 if name == "resnet18" else 32
    if name in ("logistic", "mlp"):
        inputs = torch.randn(samples, 64)
    elif name == "distilbert":
        inputs = torch.randint(1, 60, (samples, 16))
    else:
        size = 96 if name == "resnet18" else 32
        inputs = torch.randn(samples, 3, size, size)
    labels = torch.arange(samples) % 4
    gradients = []
    for layers in (FULL_PRECISION, EIGHT_BIT):
        torch.manual_seed(3)
        model = MODELS[name](layers)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        parts = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([part.reshape(-1) for part in parts]))
    assert torch.isfinite(gradients[1]).all()
    assert nn.functional.cosine_similarity(*gradients, dim=0) > 0.9
