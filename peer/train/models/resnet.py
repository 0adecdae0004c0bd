"""ResNets (He et al., "Deep residual learning", 2016): those for 32×32 images (section 4.2), and ResNet-18.

An EvoNorm stands for every norm and every ReLU, so the last one of a block lies before the addition; `group` normalises
2 channels at a time. `batch` and `range-batch` keep running statistics, which stay on each peer and are never sent: use
them to compare, not to train on skewed data. Shortcuts where resolution or width changes are 1×1 convolutions with a
norm of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from peer.train.full_precision.norms import Norm, activates
from peer.train.layers import FULL_PRECISION, Layers


def resnet20(num_classes: int = 10, *, norm: Norm = "evonorm", layers: Layers = FULL_PRECISION) -> nn.Module:
    """Return ResNet-20 for 32×32 images: 273,258 parameters with an EvoNorm, 272,474 with the other norms (10
    classes)."""
    return _cifar(3, num_classes, norm, layers)


def resnet54(num_classes: int = 10, *, norm: Norm = "evonorm", layers: Layers = FULL_PRECISION) -> nn.Module:
    """Return the ResNet of the low-precision paper's tables for 32×32 images that is called ResNet-54 there: 8 blocks a
    stage, 50 layers by He's count, for its published code builds ⌊(54 − 2)/6⌋ blocks."""
    return _cifar(8, num_classes, norm, layers)


def resnet110(num_classes: int = 10, *, norm: Norm = "evonorm", layers: Layers = FULL_PRECISION) -> nn.Module:
    """Return ResNet-110 for 32×32 images."""
    return _cifar(18, num_classes, norm, layers)


def resnet18(
    num_classes: int = 10, *, norm: Norm = "evonorm", image_size: int = 224, layers: Layers = FULL_PRECISION
) -> nn.Module:
    """Return ResNet-18: 11.2 million parameters (10 classes).

    Images of up to 64 pixels get a 3×3 convolution where larger ones get 7×7 with stride 2 and a maximum over 3×3 with
    stride 2, which would leave nothing of them.
    """
    chain: dict[str, nn.Module] = {}
    if image_size <= 64:
        chain["stem"] = layers.conv_unit(3, 64, norm=norm)
    else:
        chain["stem"] = layers.conv_unit(3, 64, kernel=7, stride=2, norm=norm)
        chain["pool"] = layers.max_pool(3, stride=2, padding=1)
    return _finish(chain, 64, (64, 128, 256, 512), (2, 2, 2, 2), num_classes, norm, layers)


def _cifar(blocks: int, num_classes: int, norm: Norm, layers: Layers) -> nn.Module:
    """Three stages of basic blocks with 16, 32 and 64 channels."""
    chain = {"stem": layers.conv_unit(3, 16, norm=norm)}
    return _finish(chain, 16, (16, 32, 64), (blocks, blocks, blocks), num_classes, norm, layers)


def _finish(
    chain: dict[str, nn.Module],
    channels: int,
    widths: Sequence[int],
    counts: Sequence[int],
    num_classes: int,
    norm: Norm,
    layers: Layers,
) -> nn.Module:
    blocks: dict[str, nn.Module] = {}
    for stage, (width, count) in enumerate(zip(widths, counts, strict=True)):
        for index in range(count):
            stride = 2 if index == 0 and stage > 0 else 1
            blocks[str(len(blocks))] = _block(channels, width, stride, norm, layers)
            channels = width
    chain["blocks"] = layers.sequential(blocks)
    chain["average"] = layers.average_pool()
    chain["head"] = layers.linear(channels, num_classes)
    return layers.network(chain)


def _block(inputs: int, outputs: int, stride: int, norm: Norm, layers: Layers) -> nn.Module:
    """Two 3×3 convolutions and a shortcut around them."""
    main = {
        "first": layers.conv_unit(inputs, outputs, stride=stride, norm=norm),
        "second": layers.conv_unit(outputs, outputs, norm=norm, activate=False),
    }
    shortcut = None
    if stride != 1 or inputs != outputs:
        shortcut = layers.conv_unit(inputs, outputs, kernel=1, stride=stride, norm=norm, activate=False)
    return layers.residual(main, shortcut, activate=not activates(norm))
