"""ResNets for 32×32 images (He et al., "Deep residual learning", 2016, section 4.2)."""

from __future__ import annotations

import torch
from torch import nn

from peer.train.norms import Norm, activates, make_norm


def resnet20(num_classes: int = 10, *, norm: Norm = "evonorm") -> ResNet:
    """Return ResNet-20: 273,258 parameters with an EvoNorm, 272,474 with the other norms (10 classes).

    The shortcuts where the resolution falls are 1×1 convolutions with a norm of their own. An EvoNorm stands for every
    norm and every ReLU, so the last one of a block lies before the addition; `group` normalises 2 channels at a time.
    `batch` and `range-batch` keep running statistics, which stay on each peer and are never sent: use them to compare,
    not to train on skewed data.
    """
    return ResNet((3, 3, 3), num_classes, norm)


class ResNet(nn.Module):
    """Three stages of basic blocks with 16, 32 and 64 channels."""

    def __init__(self, blocks: tuple[int, int, int], num_classes: int, norm: Norm) -> None:
        super().__init__()
        self.stem = _Unit(3, 16, norm=norm)
        channels, stages = 16, []
        for width, count in zip((16, 32, 64), blocks, strict=True):
            for index in range(count):
                stages.append(_Block(channels, width, stride=2 if index == 0 and width > 16 else 1, norm=norm))
                channels = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits float32[b, classes] for float32[b, 3, 32, 32]."""
        logits: torch.Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits


class _Unit(nn.Module):
    """Convolution, norm and activation."""

    def __init__(
        self, inputs: int, outputs: int, *, norm: Norm, kernel: int = 3, stride: int = 1, activate: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.norm = make_norm(norm, outputs)
        self._relu = activate and not activates(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.conv(x))
        return torch.relu(y) if self._relu else y


class _Block(nn.Module):
    """Two 3×3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = _Unit(inputs, outputs, norm=norm, stride=stride)
        self.second = _Unit(outputs, outputs, norm=norm, activate=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = _Unit(inputs, outputs, norm=norm, kernel=1, stride=stride, activate=False)
        self._relu = not activates(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x)) + self.shortcut(x)
        return torch.relu(y) if self._relu else y
