"""A model of any size whose gradient costs two passes over its parameters: to measure everything but training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

BLOCK = 1024
_OFFSETS = 4096
"""Number of positions at which noise may begin."""


class Quadratic(nn.Module):
    """Layers w_l, and for each sample the loss a/2 · Σ‖w_l‖² + c · Σ⟨w_l, p⟩, with p a fixed pattern of norm 1 tiled
    over the layer.

    a and c are the sample's two inputs. Every number has a gradient of its own, of the size of a trained network's
    relative to the weights, and the loss starts near ½ whatever the size.

    The difference of two peers is then a multiple of p, which entropy coding finds out. With `noise`, p is as long as
    the model, and begins somewhere else in each batch: what peers disagree about looks random, as it does in a network.
    """

    pattern: torch.Tensor

    def __init__(self, parameters: int, layers: int, noise: bool = False) -> None:
        """Split `parameters` numbers evenly over `layers` layers, whole blocks first and what remains as a last one."""
        super().__init__()
        blocks, rest = divmod(parameters, BLOCK)
        sizes = [(blocks // layers + (index < blocks % layers)) * BLOCK for index in range(layers)] + [rest]
        scale = 1.0 / math.sqrt(parameters)
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(size) * scale) for size in sizes if size)
        self._noise = noise
        length = parameters + _OFFSETS if noise else BLOCK
        self.register_buffer("pattern", torch.randn(length) * scale, persistent=False)

    @classmethod
    def of_shapes(cls, shapes: Sequence[Sequence[int]]) -> Self:
        """Return a model with noise whose layers have these shapes."""
        total = sum(map(math.prod, shapes))
        model = cls(total, 1, noise=True)
        scale = 1.0 / math.sqrt(total)
        model.layers = nn.ParameterList(nn.Parameter(torch.randn(*shape) * scale) for shape in shapes)
        return model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the samples `inputs: float32[b, 2]`."""
        curvature, slope = inputs.mean(dim=0)
        total = inputs.new_zeros(())
        # As random as the samples of the batch, and the same wherever it is computed again.
        start = int(slope.abs() * _OFFSETS**2) % _OFFSETS
        for parameter in self.layers:
            layer = parameter.view(-1)
            if self._noise:
                pattern, start = self.pattern[start : start + layer.numel()], start + layer.numel()
                total = total + 0.5 * curvature * torch.dot(layer, layer) + slope * torch.dot(layer, pattern)
                continue
            rows = layer.view(-1, min(BLOCK, layer.numel()))
            push = rows @ self.pattern[: rows.shape[1]]
            total = total + 0.5 * curvature * torch.dot(layer, layer) + slope * push.sum()
        return total
