"""A model of any size whose gradient costs two passes over its parameters: to measure everything but training."""

from __future__ import annotations

import math

import torch
from torch import nn

BLOCK = 1024


class Quadratic(nn.Module):
    """Layers w_l, and for each sample the loss a/2 · Σ‖w_l‖² + c · Σ⟨w_l, p⟩, with p a fixed pattern of norm 1 tiled
    over the layer.

    a and c are the sample's two inputs. Every number has a gradient of its own, of the size of a trained network's
    relative to the weights, and the loss starts near ½ whatever the size.
    """

    pattern: torch.Tensor

    def __init__(self, parameters: int, layers: int) -> None:
        """Split `parameters` numbers evenly over `layers` layers, whole blocks first and what remains as a last one."""
        super().__init__()
        blocks, rest = divmod(parameters, BLOCK)
        sizes = [(blocks // layers + (index < blocks % layers)) * BLOCK for index in range(layers)] + [rest]
        scale = 1.0 / math.sqrt(parameters)
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(size) * scale) for size in sizes if size)
        self.register_buffer("pattern", torch.randn(BLOCK) * scale, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the samples `inputs: float32[b, 2]`."""
        curvature, slope = inputs.mean(dim=0)
        total = inputs.new_zeros(())
        for layer in self.layers:
            rows = layer.view(-1, min(BLOCK, layer.numel()))
            push = rows @ self.pattern[: rows.shape[1]]
            total = total + 0.5 * curvature * torch.dot(layer, layer) + slope * push.sum()
        return total
