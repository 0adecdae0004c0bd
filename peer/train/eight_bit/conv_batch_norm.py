"""A convolution and its batch norm in training, in one native call (`peer/native/eight_bit_layer.h`).

The composition by `conv` and `norms` for any norm returns the same bits; with small images, calling some sixty
operators of torch for each layer takes a third of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from peer.native import ffi
from peer.train.eight_bit import conv_kernels, kernels
from peer.train.eight_bit.conv_kernels import Window
from peer.train.eight_bit.kernels import pointer
from peer.train.eight_bit.norm_kernels import Addend, residual_sum
from peer.train.eight_bit.ranges import ChannelRanges, Grid
from peer.train.eight_bit.scratch import scratch


@dataclass(frozen=True, slots=True)
class Found:
    """Output of the forward pass, with the tensors for its backward pass."""

    out: torch.Tensor
    """uint8[b, h, w, outputs], codes of the output, or of its sum with an addend."""
    ends: tuple[float, float]
    """The extremes of the output in steps of its grid, counted from code 0."""
    ends_of_sum: tuple[float, float]
    """The extremes of the sum."""
    largest_weight: float
    before: torch.Tensor
    """uint8[b, h · w, outputs], codes of the norm's input."""
    steps: torch.Tensor
    """float32[outputs], one step of these."""
    mean: torch.Tensor
    """float64[outputs]."""
    inverse_deviation: torch.Tensor
    """float64[outputs]."""


def forward(
    x: tuple[torch.Tensor, int, float],
    weight: torch.Tensor,
    window: Window,
    ranges: ChannelRanges,
    norm: nn.BatchNorm2d,
    grid: Grid,
    addend: Addend | None,
    *,
    relu: bool,
) -> Found | None:
    """Return the layer's output on `grid` for x, the codes uint8[b, h, w, inputs], their zero point and scale, or its
    sum with `addend`; ranges and running statistics move on. None where there is no such kernel, or no range yet."""
    codes, zero_point, scale = x
    native = kernels.native_for(codes)
    if native is None or not window.is_native(weight.shape[1], len(weight)):
        return None
    if weight.dtype != torch.float32 or not weight.is_contiguous() or not ranges.running_largest.any():
        return None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    outputs, inputs, kernel, _ = weight.shape
    shape = conv_kernels.forward_shape(codes, zero_point, window, outputs)
    b, h, w = len(codes), window.results(codes.shape[1]), window.results(codes.shape[2])
    results = ffi.new("float[3]")
    added, ends_of_sum = residual_sum(addend)
    out = torch.empty((b, h, w, outputs), dtype=torch.uint8)
    before = torch.empty((b, h * w, outputs), dtype=torch.uint8)
    steps = torch.empty(outputs)
    mean, inverse = (torch.empty(outputs, dtype=torch.float64) for _ in range(2))
    terms = kernel**2 * codes.shape[3]
    zero = grid.zero_point + 128
    layer = ffi.new(
        "ConvBatchNorm *",
        {
            "shape": shape[0], "x": pointer(codes), "x_scale": scale, "weights": pointer(weight), "inputs": inputs,
            "running_largest": pointer(ranges.running_largest), "narrowing": ranges.momentum or 0.0,
            "gamma": pointer(norm.weight.detach()), "beta": pointer(norm.bias.detach()),
            "running_mean": pointer(norm.running_mean), "running_variance": pointer(norm.running_var), "share": share,
            "epsilon": norm.eps, "inverse_step": grid.inverse, "zero": float(zero), "low": float(zero) if relu else 0.0,
            "codes": pointer(scratch("weights", (outputs * terms,), torch.int8, codes.device)),
            "packed": pointer(conv_kernels.packed_room(outputs, terms)), "before": pointer(before),
            "steps": pointer(steps), "mean": pointer(mean), "inverse_deviation": pointer(inverse), "sum": added,
            "out": pointer(out), "found": results,
        },
    )  # fmt: skip
    kernels.done(native.eb_conv_batch_norm_forward(layer))
    ends = (results[0], results[1]), (ends_of_sum[0], ends_of_sum[1])
    return Found(out, *ends, results[2], before, steps, mean, inverse)
