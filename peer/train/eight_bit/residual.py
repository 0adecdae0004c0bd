"""Residual sums in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

from peer.train.eight_bit import norm_kernels
from peer.train.eight_bit.images import image_codes, innermost, outermost, unpadded
from peer.train.eight_bit.layer import Layer
from peer.train.eight_bit.ranges import RunningRange, grid_over, rectified
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape


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
        y = x
        for layer in self._layers():
            y = layer.forward_quantized(y, tape)
        other = self._around().forward_quantized(x, tape) if self._shortcut else x
        channels = y.data.shape[1]
        a, b = image_codes(y), image_codes(other)
        shift = -(a.scale * a.zero_point + b.scale * b.zero_point)
        grid = self.output.grid()
        if grid is None:
            _, ends = norm_kernels.sum_forward(a.data, b.data, (a.scale, b.scale), shift, None)
            grid = grid_over(*rectified(ends, self._relu))
        zero = grid.zero_point + 128
        codes, (low, high) = norm_kernels.sum_forward(
            a.data,
            b.data,
            (a.scale * grid.inverse, b.scale * grid.inverse),
            shift * grid.inverse + zero,
            (float(zero) if self._relu else 0.0, 255.0),
        )
        assert codes is not None
        if tape.training:
            self.output.observe_(*rectified(((low - zero) * grid.scale, (high - zero) * grid.scale), self._relu))
        tape.save(image_codes(x) if x.rectified else None)
        return Quantized(outermost(codes[..., :channels]), grid.scale, zero, rectified=self._relu)

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        (x,) = tape.take()
        around: Gradient | None = gradient
        if self._shortcut:
            around = self._around().backward_quantized(gradient, tape, wanted=wanted)
        layers = self._layers()
        passed: Gradient | None = gradient
        for index in range(len(layers) - 1, -1, -1):
            assert passed is not None
            passed = layers[index].backward_quantized(passed, tape, wanted=wanted or index > 0)
        if not wanted:
            return None
        assert passed is not None
        assert around is not None
        a, b = innermost(passed.data), innermost(around.data)
        channels = a.shape[3]
        mask = None if x is None else x.data[..., :channels].contiguous()
        found = norm_kernels.sum_backward(a, b, mask, 0 if x is None else x.zero_point)
        return unpadded(*found, channels)

    def _layers(self) -> list[Layer]:
        return [self._layer(name) for name in self._main]

    def _around(self) -> Layer:
        return self._layer("shortcut")

    def _layer(self, name: str) -> Layer:
        layer = self.get_submodule(name)
        assert isinstance(layer, Layer)
        return layer
