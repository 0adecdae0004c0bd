"""Weights that a model for inference keeps as codes, int8 and one scale, in place of float32."""

from __future__ import annotations

import torch
from torch import nn

SCALE_SUFFIX = "_scale"
"""Suffix of the scale's buffer, after the name of the weight."""


def store_(module: nn.Module, name: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Let a module keep `codes: int8[...]`, of the shape of its parameter `name`, and `scale: float32[1]` in place of
    that parameter: a number is code · scale."""
    delattr(module, name)
    module.register_buffer(name, codes)
    module.register_buffer(name + SCALE_SUFFIX, scale)


def weight_of(module: nn.Module) -> tuple[torch.Tensor, float | None]:
    """Return the weight of a module, float32 and None; or its codes and the largest magnitude that these stand for."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if weight.dtype != torch.int8:
        return weight.detach(), None
    # Rounded to float32, as the largest number is that the codes stand for.
    return weight, float(127.0 * module.get_buffer("weight" + SCALE_SUFFIX))


def rows_of(module: nn.Module, indices: torch.Tensor | slice) -> torch.Tensor:
    """Return rows of the weight of a module, float32."""
    weight, largest = weight_of(module)
    rows = weight[indices]
    return rows if largest is None else rows.to(torch.float32) * module.get_buffer("weight" + SCALE_SUFFIX)


def as_levels(weight: torch.Tensor, inverse: float) -> tuple[torch.Tensor, float]:
    """Return the float32 values that kernels round to codes, and their factor: a weight and `inverse`, its number of
    steps in 1; or codes as they are, and 1."""
    return (weight.to(torch.float32), 1.0) if weight.dtype == torch.int8 else (weight, inverse)
