"""The models of the built-in tasks. An own task needs none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from peer.train.models.logistic import logistic
from peer.train.models.mlp import mlp


@dataclass(frozen=True)
class ModelInfo:
    """A model as the lists show it."""

    make: Callable[..., nn.Module]
    summary: str


MODELS: Mapping[str, ModelInfo] = {
    "logistic": ModelInfo(logistic, "Logistic regression: one linear layer that starts at zero."),
    "mlp": ModelInfo(mlp, "Multi-layer perceptron: linear layers with ReLU between them."),
}
