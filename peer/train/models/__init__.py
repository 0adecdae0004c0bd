"""The models of the built-in tasks, in either precision. An own task needs none of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from peer.train.models.distilbert import DistilBertSize, distilbert
from peer.train.models.logistic import logistic
from peer.train.models.mlp import mlp
from peer.train.models.mobilenet import mobilenetv2
from peer.train.models.resnet import resnet18, resnet20, resnet54, resnet110
from peer.train.models.synthetic import Quadratic
from peer.train.models.vgg import vgg11, vgg16


@dataclass(frozen=True)
class ModelInfo:
    """A model as the lists show it."""

    make: Callable[..., nn.Module]
    summary: str

    @property
    def needs_nothing(self) -> bool:
        """Whether it is made without arguments, so that its name alone says the shapes of its parameters."""
        return all(each.default is not each.empty for each in inspect.signature(self.make).parameters.values())


MODELS: Mapping[str, ModelInfo] = {
    "logistic": ModelInfo(logistic, "Logistic regression: one linear layer that starts at zero."),
    "mlp": ModelInfo(mlp, "Multi-layer perceptron: linear layers with ReLU between them."),
    "resnet20": ModelInfo(resnet20, "ResNet-20 for 32×32 images, with any of the norms."),
    "resnet54": ModelInfo(resnet54, "The low-precision paper's ResNet-54 for 32×32 images, with any of the norms."),
    "resnet110": ModelInfo(resnet110, "ResNet-110 for 32×32 images, with any of the norms."),
    "resnet18": ModelInfo(resnet18, "ResNet-18 for images of any size, with any of the norms."),
    "vgg11": ModelInfo(vgg11, "VGG-11 for images of any size, without normalization."),
    "vgg16": ModelInfo(vgg16, "VGG-16 for images of any size, without normalization."),
    "mobilenetv2": ModelInfo(mobilenetv2, "MobileNetV2 for images of any size, with any of the norms."),
    "distilbert": ModelInfo(distilbert, "DistilBERT for classes of sentences, from weights in a file or drawn."),
    "quadratic": ModelInfo(Quadratic, "Any number of parameters and a cheap gradient, for benchmarks."),
}

__all__ = [
    "MODELS",
    "DistilBertSize",
    "ModelInfo",
    "Quadratic",
    "distilbert",
    "logistic",
    "mlp",
    "mobilenetv2",
    "resnet18",
    "resnet20",
    "resnet54",
    "resnet110",
    "vgg11",
    "vgg16",
]
