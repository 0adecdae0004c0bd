"""Convolutions in 8 bits, alone with bias and ReLU, or with a norm behind them."""

from __future__ import annotations

import torch
from torch import nn

from peer.native import ffi
from peer.train.eight_bit import conv_kernels, kernels
from peer.train.eight_bit.conv_kernels import Window
from peer.train.eight_bit.kernels import pointer
from peer.train.eight_bit.layer import Layer
from peer.train.eight_bit.norm_kernels import Addend, residual_sum
from peer.train.eight_bit.norms import count_batch, norm_in_8_bits
from peer.train.eight_bit.ranges import ChannelRanges, RunningRange, grid_over, rectified
from peer.train.eight_bit.scratch import scratch
from peer.train.eight_bit.stored import weight_of
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape, image_codes, innermost, outermost, unpadded


class RectifiedConv(Layer):
    """A convolution with bias, and its ReLU if it is to `activate`."""

    def __init__(self, conv: nn.Conv2d, *, activate: bool) -> None:
        """Take the parameters of a convolution that has a bias and keeps the size at stride 1."""
        super().__init__()
        assert conv.bias is not None
        self.weight, self.bias = conv.weight, conv.bias
        self.output = RunningRange()
        self._product = _Product(conv)
        self._relu = activate

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        x = image_codes(x)
        weights = conv_kernels.quantize_weights(*weight_of(self))
        factor, bias = x.scale * weights.scale, self.bias.detach()
        grid = self.output.grid()
        if grid is None:
            ends = conv_kernels.extremes(x.data, x.zero_point, weights, self._product.window)
            grid = grid_over(*self._ends(*ends, factor))
        zero = grid.zero_point + 128
        cut = (float(zero) if self._relu else 0.0, 255.0)
        onto = torch.full_like(bias, factor * grid.inverse), bias * grid.inverse + zero, cut
        codes, lows, highs = conv_kernels.forward(x.data, x.zero_point, weights, self._product.window, onto)
        if tape.training:
            self.output.observe_(*self._ends(lows, highs, factor))
        tape.save(x, weights.largest)
        return Quantized(outermost(codes), grid.scale, zero, rectified=self._relu)

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        x, largest = tape.take()
        data = innermost(gradient.data)
        if self.bias.requires_grad:
            tape.add_gradient(self.bias, kernels.column_sums(data.view(-1, data.shape[-1])))
        return self._product.backward(self.weight, x, largest, Gradient(data, gradient.largest), tape, wanted)

    def _ends(self, lows: torch.Tensor, highs: torch.Tensor, factor: float) -> tuple[float, float]:
        """Return the extremes of the output from those of the products, int32[outputs]."""
        low = (lows * factor + self.bias.detach()).amin().item()
        high = (highs * factor + self.bias.detach()).amax().item()
        return rectified((low, high), self._relu)


class ConvUnit(Layer):
    """Convolution, norm, and a ReLU if it is to `activate`.

    The norm's input is quantized too, with a range for each channel, symmetric about zero. Only these codes are kept:
    the norm's statistics are taken from them.
    """

    def __init__(self, conv: nn.Conv2d, norm: nn.Module, *, activate: bool) -> None:
        """Take the parameters and running statistics of a convolution without bias that keeps the size at stride 1, and
        of the norm behind it. Raises TypeError for a norm that has no counterpart."""
        super().__init__()
        self.conv, self.norm = conv, norm
        self.before_norm = ChannelRanges(conv.out_channels)
        self.output = RunningRange()
        self._product = _Product(conv)
        self._norm = norm_in_8_bits(norm)
        self._relu = activate

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        return self.forward_with(x, tape, None)[0]

    def forward_with(self, x: Quantized, tape: Tape, addend: Addend | None) -> tuple[Quantized, tuple[float, float]]:
        """Return the layer's output, with the codes of the sum in place of its own if there is an `addend`, and the
        extremes of that sum."""
        x = image_codes(x)
        if (found := self._forward_at_once(x, tape, addend)) is not None:
            return found
        weights = conv_kernels.quantize_weights(*weight_of(self.conv))
        factor = x.scale * weights.scale
        steps = self.before_norm.steps()
        if steps is None:
            ends = conv_kernels.extremes(x.data, x.zero_point, weights, self._product.window)
            steps = ChannelRanges.steps_of(_largest(*ends, factor))
        onto = factor / steps, torch.full_like(steps, 128.0), (1, 255)
        codes, lows, highs = conv_kernels.forward(x.data, x.zero_point, weights, self._product.window, onto)
        if tape.training:
            self.before_norm.observe_(_largest(lows, highs, factor))
        tape.save(x, weights.largest)
        b, h, w, c = codes.shape
        y, ends_of_sum = self._norm.forward(
            codes.view(b, h * w, c), steps, self.output, tape, relu=self._relu, addend=addend
        )
        return y.with_data(outermost(y.data.view(b, h, w, c))), ends_of_sum

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        return self.backward_with(gradient, tape, None, wanted=wanted)

    def backward_with(
        self, gradient: Gradient, tape: Tape, added: torch.Tensor | None, *, wanted: bool
    ) -> Gradient | None:
        """Return the sum of the gradient with regard to x and `added`: bfloat16[b, h, w, inputs], if the layer
        `can_add` that; 0 where x was rectified."""
        data = innermost(gradient.data)
        b, h, w, c = data.shape
        before = self._norm.backward(data.view(b, h * w, c), tape)
        x, largest = tape.take()
        before = before.with_data(before.data.view(b, h, w, c))
        return self._product.backward(self.conv.weight, x, largest, before, tape, wanted, added)

    @property
    def can_add(self) -> bool:
        """Whether the backward pass can add something to its result."""
        return self._product.window.covers and self.conv.in_channels % 4 == 0

    def _forward_at_once(
        self, x: Quantized, tape: Tape, addend: Addend | None
    ) -> tuple[Quantized, tuple[float, float]] | None:
        """Do the same to the bit in one native call (`peer/native/eight_bit_layer.h`), where there is one.

        With small images, calling some sixty operators of torch for each layer takes a third of the time.
        """
        norm, window, weight, ranges = self.norm, self._product.window, self.conv.weight.detach(), self.before_norm
        grid, native = self.output.grid(), kernels.native_for(x.data)
        if not tape.training or grid is None or native is None or not isinstance(norm, nn.BatchNorm2d):
            return None
        is_ready = weight.dtype == torch.float32 and weight.is_contiguous() and ranges.running_largest.any()
        if not is_ready or not window.is_native(weight.shape[1], len(weight)):
            return None
        assert norm.running_mean is not None
        assert norm.running_var is not None
        share = count_batch(norm)
        outputs, inputs, kernel, _ = weight.shape
        shape = conv_kernels.forward_shape(x.data, x.zero_point, window, outputs)
        b, h, w = len(x.data), window.results(x.data.shape[1]), window.results(x.data.shape[2])
        results = ffi.new("float[3]")
        added, ends_of_sum = residual_sum(addend)
        out = torch.empty((b, h, w, outputs), dtype=torch.uint8)
        before = torch.empty((b, h * w, outputs), dtype=torch.uint8)
        steps = torch.empty(outputs)
        mean, inverse = (torch.empty(outputs, dtype=torch.float64) for _ in range(2))
        terms = kernel**2 * x.data.shape[3]
        zero = grid.zero_point + 128
        layer = ffi.new(
            "ConvBatchNorm *",
            {
                "shape": shape[0], "x": pointer(x.data), "x_scale": x.scale, "weights": pointer(weight),
                "inputs": inputs, "running_largest": pointer(ranges.running_largest),
                "narrowing": ranges.momentum or 0.0, "gamma": pointer(norm.weight.detach()),
                "beta": pointer(norm.bias.detach()), "running_mean": pointer(norm.running_mean),
                "running_variance": pointer(norm.running_var), "share": share, "epsilon": norm.eps,
                "inverse_step": grid.inverse, "zero": float(zero), "low": float(zero) if self._relu else 0.0,
                "codes": pointer(scratch("weights", (outputs * terms,), torch.int8, weight.device)),
                "packed": pointer(conv_kernels.packed_room(outputs, terms)), "before": pointer(before),
                "steps": pointer(steps), "mean": pointer(mean), "inverse_deviation": pointer(inverse), "sum": added,
                "out": pointer(out), "found": results,
            },
        )  # fmt: skip
        kernels.done(native.eb_conv_batch_norm_forward(layer))
        low, high, largest_weight = results
        self.output.observe_(*rectified(((low - zero) * grid.scale, (high - zero) * grid.scale), self._relu))
        tape.save(x, largest_weight)
        tape.save(before, steps, mean, inverse, torch.tensor(True))
        y = Quantized(outermost(out), grid.scale, zero, rectified=self._relu)
        return y, (ends_of_sum[0], ends_of_sum[1])


class _Product:
    """The backward pass of a convolution, from the gradient of its plain output."""

    def __init__(self, conv: nn.Conv2d) -> None:
        """`conv` is square and keeps the size at stride 1."""
        self.window = Window(conv.kernel_size[0], conv.stride[0], conv.groups)
        self._inputs = conv.in_channels

    def backward(
        self,
        weight: torch.Tensor,
        x: Quantized,
        largest_weight: float,
        gradient: Gradient,
        tape: Tape,
        wanted: bool,
        added: torch.Tensor | None = None,
    ) -> Gradient | None:
        """Count the weight's gradient, and return x's plus `added`: [b, c, h, w], for `gradient` of [b, h, w,
        outputs]."""
        if weight.requires_grad:
            tape.add_gradient(
                weight,
                conv_kernels.weight_gradient(x.data, x.zero_point, gradient.data, self._inputs, self.window, x.scale),
            )
        if not wanted:
            return None
        mask = (x.data, x.zero_point) if x.rectified else None
        found = conv_kernels.input_gradient(
            gradient.data, gradient.largest, tape.draw_keys(), weight.detach(), largest_weight, self.window,
            (x.data.shape[1], x.data.shape[2]), mask, added,
        )  # fmt: skip
        return unpadded(*found, self._inputs)


def _largest(lows: torch.Tensor, highs: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the largest magnitudes of products, float32[outputs], from their extremes in codes."""
    # Negated as integers, of which none is −0.
    return torch.maximum((-lows).to(torch.float32), highs.to(torch.float32)) * factor
