"""The linear layer in 8 bits."""

from __future__ import annotations

import torch
from torch import nn

from peer.train.eight_bit import kernels
from peer.train.eight_bit.layer import Layer
from peer.train.eight_bit.products import int8_product
from peer.train.eight_bit.ranges import RunningRange, grid_over
from peer.train.eight_bit.scratch import scratch
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape


class Linear(Layer):
    """y = W x + b over the last dimension, followed by a ReLU where one comes next.

    Parameters and their initial values are those of `nn.Linear`.
    """

    can_rectify = True
    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        plain = nn.Linear(inputs, outputs, bias=bias)
        self.weight = plain.weight
        self.register_parameter("bias", plain.bias)
        self.output = RunningRange()

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        x = x.signed()
        accumulator, offset, factor = self.multiply(x)
        grid = self.output.grid()
        if grid is None:
            grid = grid_over(*kernels.measure_forward(accumulator, offset, factor, self.bias, relu=self.rectifies))
        codes, ends = kernels.finish_forward(accumulator, offset, factor, self.bias, grid, relu=self.rectifies)
        if tape.training:
            self.output.observe_(*ends)
        tape.save(x)
        return Quantized(codes.view(*x.data.shape[:-1], -1), grid.scale, grid.zero_point, rectified=self.rectifies)

    def forward_floats(self, x: Quantized, tape: Tape) -> torch.Tensor:
        x = x.signed()
        accumulator, offset, factor = self.multiply(x)
        tape.save(x)
        y = kernels.finish_forward_floats(accumulator, offset, factor, self.bias)
        return y.view(*x.data.shape[:-1], -1)

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        (x,) = tape.take()
        rows = gradient.data.reshape(-1, gradient.data.shape[-1])
        self.count_gradients(rows, x, tape)
        if not wanted:
            return None
        accumulator, factor = self.multiply_back(Gradient(rows, gradient.largest), tape)
        mask = x.data if x.rectified else None
        data, largest = kernels.finish_backward(accumulator, factor, mask, x.zero_point)
        return Gradient(data.view(x.data.shape), largest)

    backward_floats = backward_quantized

    def multiply(self, x: Quantized) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """Return x Wᵀ in codes, int32[rows, outputs]; what the zero point of x added to each column; and the scale."""
        weight, sums, weight_scale = kernels.quantize_weights(self.weight.detach())
        codes = x.data.reshape(-1, weight.shape[1])
        accumulator = scratch("accumulator", (len(codes), len(weight)), torch.int32, codes.device)
        int8_product(codes, weight.t(), accumulator)
        return accumulator, sums.mul_(x.zero_point) if x.zero_point else None, x.scale * weight_scale

    def multiply_back(self, gradient: Gradient, tape: Tape) -> tuple[torch.Tensor, float]:
        """Return g W in codes, int32[rows, inputs], for `gradient: [rows, outputs]`, and its scale."""
        weight, _, weight_scale = kernels.quantize_weights(self.weight.detach())
        codes, scale = kernels.quantize_gradient(gradient.data, gradient.largest, tape.draw_keys())
        accumulator = scratch("accumulator", (len(codes), weight.shape[1]), torch.int32, codes.device)
        return int8_product(codes, weight, accumulator), scale * weight_scale

    def count_gradients(self, rows: torch.Tensor, x: Quantized, tape: Tape) -> None:
        """The weight gradients, from the layer gradient before its quantization and the saved codes."""
        if self.weight.requires_grad:
            operand = kernels.codes_to_bfloat16(x.data, x.zero_point).view(-1, x.data.shape[-1])
            product = scratch("weight gradient", tuple(self.weight.shape), torch.bfloat16, rows.device)
            torch.mm(rows.t(), operand, out=product)
            tape.add_gradient(self.weight, kernels.scale_bfloat16(product, x.scale))
        if self.bias is not None and self.bias.requires_grad:
            tape.add_gradient(self.bias, kernels.column_sums(rows))
