"""Logistic regression: the convex problem of the papers."""

from __future__ import annotations

from torch import nn

from peer.train.layers import FULL_PRECISION, Layers


def logistic(num_features: int, num_classes: int, layers: Layers = FULL_PRECISION) -> nn.Module:
    """Return one linear layer that starts at zero; inputs are flattened."""
    linear = layers.linear(num_features, num_classes)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return layers.network({"flatten": layers.flatten(), "linear": linear})
