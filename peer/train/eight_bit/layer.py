"""The interface of an 8-bit layer, and layers made of other layers.

A layer reads codes and returns codes; backwards it reads the gradient of its output, counts the gradients of its
parameters on the tape and returns the gradient of its input. The backward pass takes what the forward pass saved, so
that the order of the tape is that of the layers reversed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from peer.train.eight_bit import kernels
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape


class Layer(nn.Module, ABC):
    """A part of an 8-bit network. Its parameters are float32: the master weights that are trained and sent."""

    rectifies = False
    """Set by `Sequential` where a ReLU follows and the layer `can_rectify`: it then computes the ReLU itself, in the
    pass that quantizes, and marks its result as rectified."""
    can_rectify = False

    @abstractmethod
    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        """Return the layer's output for x, and save the state for the backward pass on the tape."""

    @abstractmethod
    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        """Take the values of `forward_quantized` from the tape, count the gradients of the parameters on it, and return
        the gradient with regard to x, 0 where x was rectified; None unless `wanted`."""

    def forward_floats(self, x: Quantized, tape: Tape) -> torch.Tensor:
        """Return the output in float32, for the last layer of a network."""
        y = self.forward_quantized(x, tape)
        tape.save(y if y.rectified else None)
        return y.dequantize()

    def backward_floats(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        """The backward pass of `forward_floats`."""
        (y,) = tape.take()
        return self.backward_quantized(gradient if y is None else masked(gradient, y), tape, wanted=wanted)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """8-bit layers compute only inside a network, which is one step for autograd."""
        raise TypeError(f"{type(self).__name__} computes on codes: put it into the network of `EightBit.network`")


class Sequential(Layer):
    """Layers one after the other, under the names that they are given."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        for before, after in pairwise(layers.values()):
            if isinstance(after, ReLU) and before.can_rectify:
                before.rectifies = after.done_before = True

    def layers(self) -> list[Layer]:
        """Return the layers in order."""
        return [layer for layer in self.children() if isinstance(layer, Layer)]

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        start = tape.position
        for layer in self.layers():
            x = layer.forward_quantized(x, tape)
        tape.save(start)
        return x

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        return self._back_through(gradient, tape, wanted=wanted)

    def forward_floats(self, x: Quantized, tape: Tape) -> torch.Tensor:
        start = tape.position
        *layers, last = self.layers()
        for layer in layers:
            x = layer.forward_quantized(x, tape)
        y = last.forward_floats(x, tape)
        tape.save(start)
        return y

    def backward_floats(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        return self._back_through(gradient, tape, wanted=wanted, from_floats=True)

    def _back_through(
        self, gradient: Gradient, tape: Tape, *, wanted: bool, from_floats: bool = False
    ) -> Gradient | None:
        """Go back through the layers to the first that is trained, or to the input if its gradient is `wanted`. The
        last one may have computed `forward_floats`."""
        (start,) = tape.take()
        layers = self.layers()
        first = 0 if wanted else _first_trained(layers)
        steps = [layer.backward_quantized for layer in layers]
        if from_floats:
            steps[-1] = layers[-1].backward_floats
        passed: Gradient | None = gradient
        for index in range(len(layers) - 1, first - 1, -1):
            assert passed is not None
            passed = steps[index](passed, tape, wanted=wanted or index > first)
        tape.rewind(start)
        return passed if wanted else None


class ReLU(Layer):
    """max(0, x) on the codes: nothing below the zero point."""

    done_before = False
    """Whether the layer before computes it already."""

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        if self.done_before:
            return x
        return Quantized(x.data.clamp(min=x.zero_point), x.scale, x.zero_point, rectified=True)

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        # The layer that read the rectified output has set the gradient to 0 where the output is 0.
        return gradient


class Flatten(Layer):
    """[b, ...] → [b, n]."""

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        tape.save(x.data.shape)
        return x.with_data(x.data.reshape(len(x.data), -1))

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        (shape,) = tape.take()
        return gradient.with_data(gradient.data.view(shape))


def _first_trained(layers: list[Layer]) -> int:
    """Return the index of the first layer with parameters to train, or how many layers there are."""
    for index, layer in enumerate(layers):
        if any(parameter.requires_grad for parameter in layer.parameters()):
            return index
    return len(layers)


def masked(gradient: Gradient, x: Quantized) -> Gradient:
    """Return the gradient with regard to x, 0 where x was rectified; the gradient given is overwritten."""
    if not x.rectified:
        return gradient
    return Gradient(gradient.data, kernels.mask_gradient_(gradient.data, x.data, x.zero_point))
