"""Pooling in 8 bits."""

from __future__ import annotations

import torch

from peer.train.eight_bit import kernels, norm_kernels
from peer.train.eight_bit.layer import Layer
from peer.train.eight_bit.ranges import RunningRange, grid_over
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape, image_codes, innermost, outermost, unpadded


class MaxPool(Layer):
    """The greatest code of each window: exact. Kept is its place, a byte for each result."""

    def __init__(self, kernel: int, *, stride: int | None = None, padding: int = 0) -> None:
        super().__init__()
        self._window = (kernel, kernel if stride is None else stride, padding)
        if not 0 < kernel <= 16 or padding * 2 > kernel:
            raise ValueError(f"windows of {kernel} with padding {padding}: at most 16, and at most half of it padding")

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        channels = x.data.shape[1]
        x = image_codes(x)
        codes, places = norm_kernels.max_pool_forward(x.data, *self._window)
        tape.save(places, x.data.shape, channels)
        # Where the greatest is 0, who reads it knows that no gradient passes the ReLU before.
        return x.with_data(outermost(codes[..., :channels]))

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        places, shape, channels = tape.take()
        if not wanted:
            return None
        data = torch.nn.functional.pad(innermost(gradient.data), (0, shape[3] - channels))
        found = norm_kernels.max_pool_backward(places, data, (shape[1], shape[2]), *self._window)
        return unpadded(*found, channels)


class AveragePool(Layer):
    """The mean of each channel, [b, c, h, w] → [b, c]: the sum of codes is exact, the mean gets a grid of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.output = RunningRange()

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        channels = x.data.shape[1]
        x = image_codes(x)
        b, h, w, c = x.data.shape
        sums = norm_kernels.statistics(x.data.view(b, h * w, c)).sums[:, :channels]
        means = (sums.to(torch.float32) / (h * w) + (128 - x.zero_point)) * x.scale
        means = means.contiguous()
        grid = self.output.grid() or grid_over(*kernels.extremes(means))
        codes, ends = kernels.quantize(means, grid)
        if tape.training:
            self.output.observe_(*ends)
        tape.save(x.data if x.rectified else None, x.zero_point, x.data.shape, channels)
        return Quantized(codes, grid.scale, grid.zero_point)

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        mask, zero_point, (b, h, w, c), channels = tape.take()
        if not wanted:
            return None
        share = (gradient.data.to(torch.float32) / (h * w)).to(torch.bfloat16)
        share = torch.nn.functional.pad(share, (0, c - channels))
        data = share.view(b, 1, 1, c).expand(b, h, w, c).contiguous()
        return unpadded(data, kernels.mask_gradient_(data, mask, zero_point), channels)
