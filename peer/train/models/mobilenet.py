"""MobileNetV2 (Sandler et al., 2018), with ReLU in place of ReLU6."""

from __future__ import annotations

from torch import nn

from peer.train.full_precision.norms import Norm
from peer.train.layers import FULL_PRECISION, Layers

_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, blocks and stride of the first block (the paper's table 2)."""
_HEAD = 1280


def mobilenetv2(
    num_classes: int = 10, *, norm: Norm = "evonorm", image_size: int = 32, layers: Layers = FULL_PRECISION
) -> nn.Module:
    """Return MobileNetV2. For images of up to 64 pixels the first convolution and the second stage keep the resolution,
    as is usual for CIFAR."""
    small = image_size <= 64
    channels = 32
    chain = {"stem": layers.conv_unit(3, channels, stride=1 if small else 2, norm=norm)}
    blocks: dict[str, nn.Module] = {}
    for stage, (expansion, width, count, first) in enumerate(_STAGES):
        for index in range(count):
            stride = first if index == 0 and not (small and stage == 1) else 1
            blocks[str(len(blocks))] = _block(channels, width, expansion, stride, norm, layers)
            channels = width
    chain["blocks"] = layers.sequential(blocks)
    chain["last"] = layers.conv_unit(channels, _HEAD, kernel=1, norm=norm)
    chain["average"] = layers.average_pool()
    chain["head"] = layers.linear(_HEAD, num_classes)
    return layers.network(chain)


def _block(inputs: int, outputs: int, expansion: int, stride: int, norm: Norm, layers: Layers) -> nn.Module:
    """An inverted residual: wider, one channel at a time, narrower without activation."""
    hidden = expansion * inputs
    main: dict[str, nn.Module] = {}
    if expansion != 1:
        main["expand"] = layers.conv_unit(inputs, hidden, kernel=1, norm=norm)
    main["depthwise"] = layers.conv_unit(hidden, hidden, stride=stride, groups=hidden, norm=norm)
    main["project"] = layers.conv_unit(hidden, outputs, kernel=1, norm=norm, activate=False)
    if stride == 1 and inputs == outputs:
        return layers.residual(main, None, activate=False)
    return layers.sequential(main)
