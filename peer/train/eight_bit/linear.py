"""The linear layer in 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from peer.train.eight_bit import kernels, linear_kernels
from peer.train.eight_bit.layer import Layer
from peer.train.eight_bit.linear_kernels import Operands, OperandsBack
from peer.train.eight_bit.ranges import ANY_GRID, Grid, RunningRange, grid_over
from peer.train.eight_bit.stored import weight_of
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape, as_rows, rows_like


class Linear(Layer):
    """y = W x + b over the last dimension, followed by a ReLU where one comes next.

    Its parameters are those of the linear layer that it is given.
    """

    can_rectify = True
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.output = RunningRange()

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        x = x.signed()
        y, largest = self.coded(x, tape)
        tape.save(x, largest)
        return y

    def forward_floats(self, x: Quantized, tape: Tape) -> torch.Tensor:
        x = x.signed()
        y, largest = linear_kernels.forward_floats(self.operands(x))
        tape.save(x, largest)
        return rows_like(y, x.data)

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        x, largest = tape.take()
        rows = as_rows(gradient.data)
        self.count_gradients(rows, x, tape)
        if not wanted:
            return None
        operands = self.operands_back(Gradient(rows, gradient.largest), tape, largest)
        data, largest = linear_kernels.backward(operands, x.data if x.rectified else None, x.zero_point)
        return Gradient(rows_like(data, x.data), largest)

    backward_floats = backward_quantized

    def coded(
        self, x: Quantized, tape: Tape, over: Callable[[float, float], Grid] = grid_over
    ) -> tuple[Quantized, float]:
        """Return the output in codes, int8[…, outputs], on the grid `over` the range, or over this batch's values if it
        is the first, and the largest magnitude of the weights."""
        operands, relu = self.operands(x), self.rectifies
        grid = self.output.grid(over) or over(*linear_kernels.forward(operands, ANY_GRID, relu=relu)[1])
        codes, ends, largest = linear_kernels.forward(operands, grid, relu=relu)
        if tape.training:
            self.output.observe_(*ends)
        return Quantized(rows_like(codes, x.data), grid.scale, grid.zero_point, rectified=relu), largest

    def operands(self, x: Quantized) -> Operands:
        """Return the operands of x W + b, for x in int8."""
        weight, largest = weight_of(self)
        bias = self.bias
        return Operands(
            as_rows(x.data), x.zero_point, x.scale, weight, largest, None if bias is None else bias.detach()
        )

    def operands_back(self, gradient: Gradient, tape: Tape, largest: float | None = None) -> OperandsBack:
        """Return the operands of g W, for `gradient: [rows, outputs]`; `largest` of the weights, if known."""
        weight, known = weight_of(self)
        largest = known if largest is None else largest
        return OperandsBack(gradient.data, gradient.largest, tape.draw_keys(), weight, largest)

    def count_gradients(self, rows: torch.Tensor, x: Quantized, tape: Tape) -> None:
        """The weight gradients, from the layer gradient before its quantization and the saved codes."""
        weight, bias = self.weight, self.bias
        if weight.requires_grad:
            product, sums = linear_kernels.weight_gradient(rows, as_rows(x.data), x.zero_point, x.scale)
            tape.add_gradient(weight, product)
        elif bias is not None and bias.requires_grad:
            sums = kernels.column_sums(rows)
        if bias is not None and bias.requires_grad:
            tape.add_gradient(bias, sums)
