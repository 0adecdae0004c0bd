"""The parts of image models in full precision, as ordinary modules: convolutions with norm and activation, residual
sums, pooling."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from peer.train.full_precision.norms import Norm, activates, make_norm


class RectifiedConv(nn.Conv2d):
    """A convolution with bias, and its ReLU."""

    def __init__(
        self, inputs: int, outputs: int, *, kernel: int, stride: int, groups: int, activate: bool = True
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups)
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        assert self.bias is not None
        nn.init.zeros_(self.bias)
        self.rectifies = activate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.relu(y) if self.rectifies else y


class ConvUnit(nn.Module):
    """Convolution, norm and activation."""

    def __init__(
        self, inputs: int, outputs: int, *, kernel: int, stride: int, groups: int, norm: Norm, activate: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.norm = make_norm(norm, outputs)
        self.rectifies = activate and not activates(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.conv(x))
        return torch.relu(y) if self.rectifies else y


class Residual(nn.Module):
    """Layers one after the other, and a shortcut around them."""

    def __init__(self, main: Mapping[str, nn.Module], shortcut: nn.Module | None, *, activate: bool) -> None:
        super().__init__()
        self._main = tuple(main)
        for name, layer in main.items():
            self.add_module(name, layer)
        self.shortcut = nn.Identity() if shortcut is None else shortcut
        self._relu = activate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for name in self._main:
            y = self.get_submodule(name)(y)
        y = y + self.shortcut(x)
        return torch.relu(y) if self._relu else y


class AveragePool(nn.Module):
    """The mean of each channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32[b, c] for float32[b, c, h, w]."""
        return x.mean(dim=(2, 3))
