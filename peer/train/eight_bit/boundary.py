"""The boundary between autograd and the 8-bit layers: a network is one function of its input and its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from peer.train.eight_bit import kernels
from peer.train.eight_bit.layer import Layer, Sequential
from peer.train.eight_bit.ranges import RunningRange, grid_over
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape, draw_seed

TAIL = 4.0
"""How far the range of data reaches, in root mean squares of the numbers that are not 0."""


class Network(Sequential):
    """A whole 8-bit network: float32 in (or token numbers, where the first layer looks them up), float32 out.

    `loss.backward()` and `torch.autograd.grad` work as on any module. The backward pass draws one 64-bit seed for each
    forward pass from torch's generator.
    """

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        super().__init__(layers)
        self.input_range = RunningRange()
        self.last_saved_bytes = 0
        """Bytes that the last forward pass kept for its backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer, in float32."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return _Boundary.apply(self, x, torch.is_grad_enabled(), *parameters)

    def quantize_input(self, x: torch.Tensor, tape: Tape, *, is_data: bool) -> Quantized:
        """Return the codes of the network's input. Of data, which no layer has made, the range reaches no further than
        `TAIL`: columns of tables have single values far beyond all others, which would take the codes of these."""
        x = x.detach().contiguous()
        if not x.is_floating_point():
            # Token numbers: exact as they are.
            return Quantized(x, 1.0, 0)
        far = kernels.root_mean_square(x) * TAIL if is_data else math.inf
        grid = self.input_range.grid() or grid_over(*_cut(kernels.extremes(x), far))
        codes, ends = kernels.quantize(x, grid)
        if tape.training:
            self.input_range.observe_(*_cut(ends, far))
        return Quantized(codes, grid.scale, grid.zero_point)


def _cut(ends: tuple[float, float], far: float) -> tuple[float, float]:
    """Return the extremes, cut to ±far; those that are no numbers stay."""
    return max(ends[0], -far), min(ends[1], far)


class _Boundary(torch.autograd.Function):
    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(
        ctx: Any, network: Network, x: torch.Tensor, recording: bool, *parameters: torch.nn.Parameter
    ) -> torch.Tensor:
        recording = recording and any(ctx.needs_input_grad)
        tape = Tape(recording, network.training, draw_seed() if recording else 0)
        codes = network.quantize_input(x, tape, is_data=recording and not ctx.needs_input_grad[1])
        result = network.forward_floats(codes, tape)
        network.last_saved_bytes = tape.saved_bytes() if recording else 0
        ctx.network, ctx.tape, ctx.parameters = network, tape, parameters
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        tape, parameters = ctx.tape, ctx.parameters
        if tape is None:
            raise RuntimeError("an 8-bit network keeps its tensors for one backward pass; compute the loss again")
        ctx.tape = None
        wanted = ctx.needs_input_grad[1]
        # Under no name here, so that it is gone when the result is converted.
        passed = ctx.network.backward_floats(Gradient(*kernels.to_bfloat16(gradient.contiguous())), tape, wanted=wanted)
        inputs = None if passed is None else passed.data.to(torch.float32)
        return (None, inputs, None, *(tape.gradient_of(parameter) for parameter in parameters))
