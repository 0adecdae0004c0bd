"""Weights that a model for inference keeps as codes, int8 and one scale, in place of float32."""

from __future__ import annotations

import torch
from torch import nn

SCALE_SUFFIX = "_scale"
"""Of the buffer with the scale, behind the name of the weight."""


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
    return weight, 127.0 * float(module.get_buffer("weight" + SCALE_SUFFIX))


def rows_of(module: nn.Module, indices: torch.Tensor | slice) -> torch.Tensor:
    """Return rows of the weight of a module, float32."""
    weight, largest = weight_of(module)
    rows = weight[indices]
    return rows if largest is None else rows.to(torch.float32) * module.get_buffer("weight" + SCALE_SUFFIX)
