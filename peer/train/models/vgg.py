"""VGG-11 for 32×32 images (Simonyan and Zisserman, 2015, configuration A)."""

from __future__ import annotations

from torch import nn

_CHANNELS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)
"""0 halves the resolution."""


def vgg11(num_classes: int = 10) -> nn.Sequential:
    """Return VGG-11 with two linear layers behind its eight convolutions and no norm: 9,488,266 parameters for
    10 classes, the 9.49 M of the low-precision paper."""
    layers: list[nn.Module] = []
    inputs = 3
    for channels in _CHANNELS:
        if not channels:
            layers.append(nn.MaxPool2d(2))
            continue
        conv = nn.Conv2d(inputs, channels, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        layers += [_with_zero_bias(conv), nn.ReLU()]
        inputs = channels
    hidden, head = nn.Linear(512, 512), nn.Linear(512, num_classes)
    nn.init.kaiming_normal_(hidden.weight, nonlinearity="relu")
    # Small, so that without a norm the first gradients are.
    nn.init.normal_(head.weight, std=0.01)
    return nn.Sequential(*layers, nn.Flatten(), _with_zero_bias(hidden), nn.ReLU(), _with_zero_bias(head))


def _with_zero_bias(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
