"""Logistic regression: the convex problem of the papers."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def logistic(num_features: int, num_classes: int) -> nn.Sequential:
    """Return one linear layer that starts at zero; inputs are flattened."""
    layer = nn.Linear(num_features, num_classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=layer))
