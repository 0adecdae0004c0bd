"""The multi-layer perceptron."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Return linear layers `sizes[0] → … → sizes[-1]`, named linear1, linear2, …, with ReLU between them; inputs are
    flattened."""
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for index, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        if index > 1:
            layers[f"relu{index - 1}"] = nn.ReLU()
        layers[f"linear{index}"] = _linear(inputs, outputs)
    return nn.Sequential(OrderedDict(layers))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """He initialisation and zero bias, drawn from torch's generator."""
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layer.bias.zero_()
    return layer
