"""The models of the built-in tasks. An own task needs none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from peer.train.models.logistic import logistic
from peer.train.models.mlp import mlp
from peer.train.models.resnet import resnet20
from peer.train.models.synthetic import Quadratic
from peer.train.models.vgg import vgg11


@dataclass(frozen=True)
class ModelInfo:
    """A model as the lists show it."""

    make: Callable[..., nn.Module]
    summary: str


MODELS: Mapping[str, ModelInfo] = {
    "logistic": ModelInfo(logistic, "Logistic regression: one linear layer that starts at zero."),
    "mlp": ModelInfo(mlp, "Multi-layer perceptron: linear layers with ReLU between them."),
    "resnet20": ModelInfo(resnet20, "ResNet-20 for 32×32 images, with EvoNorm-S0, group norm or batch norm."),
    "vgg11": ModelInfo(vgg11, "VGG-11 for 32×32 images, without norm."),
    "quadratic": ModelInfo(Quadratic, "Any number of parameters and a cheap gradient, for benchmarks."),
}

__all__ = ["MODELS", "ModelInfo", "Quadratic", "logistic", "mlp", "resnet20", "vgg11"]
