"""The multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from peer.train.layers import FULL_PRECISION, Layers


def mlp(sizes: Sequence[int], layers: Layers = FULL_PRECISION) -> nn.Module:
    """Return linear layers `sizes[0] → … → sizes[-1]`, named linear1, linear2, …, with ReLU between them; inputs are
    flattened."""
    modules: dict[str, nn.Module] = {"flatten": layers.flatten()}
    for index, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        if index > 1:
            modules[f"relu{index - 1}"] = layers.relu()
        modules[f"linear{index}"] = _initialized(layers.linear(inputs, outputs))
    return layers.network(modules)


def _initialized(layer: nn.Module) -> nn.Module:
    """He initialisation and zero bias, drawn from torch's generator."""
    parameters = dict(layer.named_parameters())
    with torch.no_grad():
        nn.init.kaiming_normal_(parameters["weight"], nonlinearity="relu")
        parameters["bias"].zero_()
    return layer
