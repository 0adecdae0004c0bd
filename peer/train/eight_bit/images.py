"""Memory layout of images between layers: of shape [b, c, h, w] to callers, stored with channels innermost, as
uint8."""

from __future__ import annotations

import torch
from torch.nn import functional

from peer.train.eight_bit.conv_kernels import up_to_4
from peer.train.eight_bit.tensors import Gradient, Quantized


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return [b, h, w, c], contiguous, for [b, c, h, w]; a view where channels lie innermost already."""
    return tensor.permute(0, 2, 3, 1).contiguous()


def outermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return the view [b, c, h, w] of [b, h, w, c]."""
    return tensor.permute(0, 3, 1, 2)


def image_codes(x: Quantized) -> Quantized:
    """Return codes uint8[b, h, w, c] of an image [b, c, h, w], c rounded up to a multiple of 4 with zeros."""
    x = x.unsigned()
    codes = innermost(x.data)
    channels = codes.shape[3]
    if channels % 4:
        codes = functional.pad(codes, (0, up_to_4(channels) - channels), value=x.zero_point)
    return x.with_data(codes)


def unpadded(data: torch.Tensor, largest: float, channels: int) -> Gradient:
    """Return the gradient [b, channels, h, w] of bfloat16[b, h, w, c], c ≥ channels."""
    return Gradient(outermost(data[..., :channels]), largest)
