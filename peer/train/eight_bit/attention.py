"""Multi-head attention in 8 bits: all six products of it, forwards and backwards, are of int8 operands.

Queries, keys, values and their gradients are codes around zero. A softmax row is coded relative to its largest entry,
127, with a float32 weight for the row: p = code · weight, which adds up to 1 exactly and keeps flat rows as fine as
peaked ones.
"""

from __future__ import annotations

from torch import nn

from peer.train.eight_bit import attention_kernels
from peer.train.eight_bit.attention_kernels import Attended, Operands
from peer.train.eight_bit.linear import Linear
from peer.train.eight_bit.ranges import RunningRange, grid_over, symmetric_grid_over
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape


class Attention(nn.Module):
    """Attention of every position to all that are no padding; parameters as in `text_layers.Attention`. A part of
    `TransformerBlock`, which adds up and normalises the output of `out_lin`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not share {width} numbers evenly")
        self.heads = heads
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (Linear(width, width) for _ in range(4))
        self.mixed = RunningRange()

    def mix(self, x: Quantized, tape: Tape) -> tuple[Quantized, Attended]:
        """Return the input of `out_lin` for `x: int8[b, n, d]`, of the same shape, and the tensors to keep."""
        query, key, value = (self._codes(linear, x, tape) for linear in (self.q_lin, self.k_lin, self.v_lin))
        operands = Operands(query, key, value, self.heads, tape.padding)
        grid = self.mixed.grid() or grid_over(*attention_kernels.measure(operands))
        codes, ends, kept = attention_kernels.mix(operands, grid)
        if tape.training:
            self.mixed.observe_(*ends)
        return Quantized(codes, grid.scale, grid.zero_point), kept

    def mix_back(self, gradient: Gradient, kept: Attended, tape: Tape) -> tuple[Gradient, Gradient, Gradient]:
        """Return the gradients of the outputs of q_lin, k_lin and v_lin, bfloat16[b · n, d], for that of `mix`'s
        output."""
        of_value = attention_kernels.gradient_of_value(gradient, kept, tape.draw_keys())
        of_scores = attention_kernels.gradient_of_scores(gradient, kept, tape.draw_keys())
        of_query, of_key = attention_kernels.gradients_of_query_and_key(of_scores, kept, tape.draw_keys())
        return of_query, of_key, of_value

    @staticmethod
    def _codes(linear: Linear, x: Quantized, tape: Tape) -> Quantized:
        """Return x W + b in codes around zero."""
        codes, grid, _ = linear.codes(x, tape, RunningRange.symmetric_grid, symmetric_grid_over, relu=False)
        return Quantized(codes.view(x.data.shape), grid.scale, 0)
