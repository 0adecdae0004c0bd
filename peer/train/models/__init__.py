"""The models of the built-in tasks, in either precision. An own task needs none of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from peer.errors import ConfigError
from peer.train.models.distilbert import distilbert
from peer.train.models.gpt import GPT_SIZES, gpt
from peer.train.models.mlp import logistic, mlp
from peer.train.models.mobilenet import mobilenetv2
from peer.train.models.resnet import resnet18, resnet20, resnet54, resnet110
from peer.train.models.synthetic import Quadratic
from peer.train.models.vgg import vgg11, vgg16

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "resnet20": resnet20,
    "resnet54": resnet54,
    "resnet110": resnet110,
    "resnet18": resnet18,
    "vgg11": vgg11,
    "vgg16": vgg16,
    "mobilenetv2": mobilenetv2,
    "distilbert": distilbert,
    **{name: partial(gpt, *size) for name, size in GPT_SIZES.items()},
    "quadratic": Quadratic,
}
"""By name; `peer.train.listed` says more of each."""


def ready_models() -> dict[str, Callable[..., nn.Module]]:
    """Return the models that are made without arguments: the name alone says the shapes of their parameters."""

    def needs_nothing(make: Callable[..., nn.Module]) -> bool:
        return all(each.default is not each.empty for each in inspect.signature(make).parameters.values())

    return {name: make for name, make in MODELS.items() if needs_nothing(make)}


def ready_model(name: str) -> nn.Module:
    """Return a listed model whose size needs no further settings. Raises ConfigError."""
    ready = ready_models()
    if name not in ready:
        raise ConfigError("is not a model of known size", key="model", value=name, valid=", ".join(ready))
    return ready[name]()
