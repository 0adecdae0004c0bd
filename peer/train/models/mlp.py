"""The multi-layer perceptron, and logistic regression: the convex problem of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from peer.train.layers import FULL_PRECISION, Layers


def mlp(sizes: Sequence[int], layers: Layers = FULL_PRECISION) -> nn.Module:
    """Return linear layers `sizes[0] → … → sizes[-1]`, named linear1, linear2, …, with ReLU between them; inputs are
    flattened."""
    modules: dict[str, nn.Module] = {"flatten": layers.flatten()}
    for index, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        if index > 1:
            modules[f"relu{index - 1}"] = layers.relu()
        modules[f"linear{index}"] = he_linear_(layers.linear(inputs, outputs))
    return layers.network(modules)


def logistic(num_features: int, num_classes: int, layers: Layers = FULL_PRECISION) -> nn.Module:
    """Return one linear layer that starts at zero; inputs are flattened."""
    linear = layers.linear(num_features, num_classes)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return layers.network({"flatten": layers.flatten(), "linear": linear})


def he_linear_(layer: nn.Module) -> nn.Module:
    """Draw the weight by He's rule and set the bias to 0; return the layer."""
    nn.init.kaiming_normal_(layer.get_parameter("weight"), nonlinearity="relu")
    nn.init.zeros_(layer.get_parameter("bias"))
    return layer
