"""Residual sums in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from peer.train.eight_bit import norm_kernels
from peer.train.eight_bit.conv import ConvUnit
from peer.train.eight_bit.layer import Layer
from peer.train.eight_bit.norm_kernels import Addend
from peer.train.eight_bit.ranges import Grid, RunningRange, grid_over, rectified
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape, image_codes, innermost, outermost, unpadded


class Residual(Layer):
    """Layers one after the other, plus a shortcut around them, and a ReLU of the sum: names as in
    `peer.train.full_precision.image_layers.Residual`."""

    def __init__(self, main: Mapping[str, Layer], shortcut: Layer | None, *, activate: bool) -> None:
        super().__init__()
        self._main = tuple(main)
        for name, layer in main.items():
            self.add_module(name, layer)
        if shortcut is not None:
            self.add_module("shortcut", shortcut)
        self._shortcut = shortcut is not None
        self._relu = activate
        self.output = RunningRange()

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        start = tape.position
        other = self._around().forward_quantized(x, tape) if self._shortcut else x
        # Backwards the shortcut comes first.
        of_shortcut = tape.set_aside(start)
        y = x
        *layers, last = self._layers()
        for layer in layers:
            y = layer.forward_quantized(y, tape)
        found = self._sum_with(last, y, other, tape)
        if found is None:
            found = self._sum(last.forward_quantized(y, tape), other)
        codes, grid, (low, high) = found
        zero = grid.zero_point + 128
        tape.put_back(of_shortcut)
        if tape.training:
            self.output.observe_(*rectified(((low - zero) * grid.scale, (high - zero) * grid.scale), self._relu))
        tape.save(image_codes(x) if x.rectified else None)
        return Quantized(codes, grid.scale, zero, rectified=self._relu)

    def _sum_with(
        self, last: Layer, y: Quantized, other: Quantized, tape: Tape
    ) -> tuple[torch.Tensor, Grid, tuple[float, float]] | None:
        """Return the codes of `last` of y plus `other`, their grid and their extremes in its steps, if the norm of
        `last` can do that in its own pass."""
        b = image_codes(other)
        if not isinstance(last, ConvUnit) or b.data.shape[3] != other.data.shape[1]:
            return None
        own, grid = last.output.grid(), self.output.grid()
        if own is None or grid is None:
            return None
        scales, shift, cut = self._to_grid((own.scale, own.zero_point + 128), (b.scale, b.zero_point), grid)
        addend = Addend(b.data.flatten(1, 2), scales, shift, cut)
        total, ends = last.forward_with(y, tape, addend)
        return total.data, grid, ends

    def _sum(self, y: Quantized, other: Quantized) -> tuple[torch.Tensor, Grid, tuple[float, float]]:
        """Return the codes of y plus `other`, their grid and their extremes in its steps."""
        a, b = image_codes(y), image_codes(other)
        grid = self.output.grid()
        both = (a.scale, a.zero_point), (b.scale, b.zero_point)
        if grid is None:
            _, ends = norm_kernels.sum_forward(a.data, b.data, *self._to_grid(*both, Grid(1.0, -128)))
            grid = grid_over(*rectified(ends, self._relu))
        codes, ends = norm_kernels.sum_forward(a.data, b.data, *self._to_grid(*both, grid))
        return outermost(codes[..., : y.data.shape[1]]), grid, ends

    def _to_grid(
        self, a: tuple[float, int], b: tuple[float, int], grid: Grid
    ) -> tuple[tuple[float, float], float, tuple[float, float]]:
        """Return the factors, the shift and the cut that make codes on `grid` of two, given by scale and zero point."""
        zero = float(grid.zero_point + 128)
        shift = -(a[0] * a[1] + b[0] * b[1])
        scales = a[0] * grid.inverse, b[0] * grid.inverse
        return scales, shift * grid.inverse + zero, (zero if self._relu else 0.0, 255.0)

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        (x,) = tape.take()
        around: Gradient | None = gradient
        if self._shortcut:
            around = self._around().backward_quantized(gradient, tape, wanted=wanted)
        first, *layers = self._layers()
        passed: Gradient | None = gradient
        for layer in reversed(layers):
            assert passed is not None
            passed = layer.backward_quantized(passed, tape)
        assert passed is not None
        if not wanted:
            return first.backward_quantized(passed, tape, wanted=False)
        assert around is not None
        b = innermost(around.data)
        if isinstance(first, ConvUnit) and first.can_add:
            return first.backward_with(passed, tape, b, wanted=True)
        passed = first.backward_quantized(passed, tape)
        assert passed is not None
        channels = b.shape[3]
        mask = None if x is None else x.data[..., :channels].contiguous()
        found = norm_kernels.sum_backward(innermost(passed.data), b, mask, 0 if x is None else x.zero_point)
        return unpadded(*found, channels)

    def _layers(self) -> list[Layer]:
        return [self._layer(name) for name in self._main]

    def _around(self) -> Layer:
        return self._layer("shortcut")

    def _layer(self, name: str) -> Layer:
        layer = self.get_submodule(name)
        assert isinstance(layer, Layer)
        return layer
