"""VGG (Simonyan and Zisserman, 2015), configurations A and D, with two linear layers behind the convolutions and no
norm, as in the low-precision paper."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from peer.train.layers import FULL_PRECISION, Layers
from peer.train.models.mlp import he_linear_

_A = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)
_D = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""0 halves the resolution."""


def vgg11(num_classes: int = 10, *, image_size: int = 32, layers: Layers = FULL_PRECISION) -> nn.Module:
    """Return VGG-11: 9,488,266 parameters for 10 classes, the 9.49 M of the low-precision paper."""
    return _vgg(_A, num_classes, image_size, layers)


def vgg16(num_classes: int = 10, *, image_size: int = 32, layers: Layers = FULL_PRECISION) -> nn.Module:
    """Return VGG-16: 14,982,474 parameters for 10 classes."""
    return _vgg(_D, num_classes, image_size, layers)


def _vgg(channels_of: Sequence[int], num_classes: int, image_size: int, layers: Layers) -> nn.Module:
    """Names count convolutions, ReLUs and poolings as if each were a layer of its own."""
    chain: dict[str, nn.Module] = {}
    inputs, number = 3, 0
    for channels in channels_of:
        if channels:
            chain[str(number)] = layers.conv_unit(inputs, channels)
            inputs, number = channels, number + 2
        else:
            chain[str(number)] = layers.max_pool(2)
            number += 1
    # Five halvings leave one pixel of 32, and a map of larger images.
    chain[str(number)] = layers.flatten() if image_size < 64 else layers.average_pool()
    hidden = layers.linear(512, 512)
    head = layers.linear(512, num_classes)
    chain[str(number + 1)] = he_linear_(hidden)
    chain[str(number + 2)] = layers.relu()
    # Small, so that without a norm the first gradients are.
    nn.init.normal_(head.get_parameter("weight"), std=0.01)
    nn.init.zeros_(head.get_parameter("bias"))
    chain[str(number + 3)] = head
    return layers.network(chain)
