"""Layer norm in 8 bits: statistics of each row in float32, kept values in int8."""

from __future__ import annotations

import torch
from torch import nn

from peer.train.eight_bit import kernels, row_kernels
from peer.train.eight_bit.ranges import ANY_GRID, RunningRange, grid_over, symmetric_grid_over
from peer.train.eight_bit.row_kernels import LayerNormOperands
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape


class LayerNorm(nn.Module):
    """y = (x − mean) / deviation · γ + β over rows; parameters as of `nn.LayerNorm`. A part of other layers, which hand
    it the summands of x, so that the sum itself is never stored."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.normal, self.output = RunningRange(), RunningRange()

    def forward_rows(self, x: LayerNormOperands, tape: Tape) -> tuple[Quantized, Quantized, torch.Tensor]:
        """Return y in codes, int8[m, n], and the values to keep for `backward_rows`: codes of
        n = (x − mean) / deviation, and 1 / deviation of each row, float32[m]."""
        gamma, beta = self.weight.detach(), self.bias.detach()
        normal_grid, grid = self.normal.symmetric_grid(), self.output.grid()
        if normal_grid is None or grid is None:
            _, normal_ends, _, ends, _ = row_kernels.layer_norm(x, gamma, beta, self.epsilon, ANY_GRID, ANY_GRID)
            normal_grid, grid = normal_grid or symmetric_grid_over(*normal_ends), grid or grid_over(*ends)
        normal, normal_ends, codes, ends, deviations = row_kernels.layer_norm(
            x, gamma, beta, self.epsilon, normal_grid, grid
        )
        if tape.training:
            self.normal.observe_(*normal_ends)
            self.output.observe_(*ends)
        y = Quantized(codes, grid.scale, grid.zero_point)
        return y, Quantized(normal, normal_grid.scale, 0), deviations

    def backward_rows(self, rows: torch.Tensor, normal: Quantized, deviations: torch.Tensor, tape: Tape) -> Gradient:
        """Return the gradient with regard to x for `rows: bfloat16[m, n]`, and count those of γ and β."""
        data, largest, gamma_gradient = row_kernels.layer_norm_backward(
            rows, normal.data, normal.scale, deviations, self.weight.detach()
        )
        if self.weight.requires_grad:
            tape.add_gradient(self.weight, gamma_gradient)
        if self.bias.requires_grad:
            tape.add_gradient(self.bias, kernels.column_sums(rows))
        return Gradient(data, largest)
