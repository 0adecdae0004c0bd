"""Initial weights of linear layers, drawn from torch's generator."""

from __future__ import annotations

from torch import nn


def he_linear_(layer: nn.Module) -> nn.Module:
    """Draw the weight by He's rule and set the bias to 0; return the layer."""
    nn.init.kaiming_normal_(layer.get_parameter("weight"), nonlinearity="relu")
    nn.init.zeros_(layer.get_parameter("bias"))
    return layer


def small_linear_(layer: nn.Module, std: float = 0.01) -> nn.Module:
    """Draw the weight from a normal distribution of that width and set the bias to 0; return the layer."""
    nn.init.normal_(layer.get_parameter("weight"), std=std)
    nn.init.zeros_(layer.get_parameter("bias"))
    return layer
