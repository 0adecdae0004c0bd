"""The parts that models are built of, in either precision: a model is defined once, with the parts handed in.

`FullPrecision` makes ordinary torch modules, `EightBit` the layers of `peer.train.eight_bit`. Parameters have equal
names, shapes, order and initial values in both, so that the vector x, checkpoints and exported models fit either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol, TypeAlias

from torch import nn

from peer.train import eight_bit

Modules: TypeAlias = Mapping[str, nn.Module]
"""Modules by the names that their parameters get."""


class Layers(Protocol):
    """A factory of layers. What it returns is opaque until `network` makes a module of it that computes."""

    def linear(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
        """Return a linear layer over the last dimension, with parameters `weight` and `bias` as `nn.Linear`."""
        ...

    def relu(self) -> nn.Module: ...

    def flatten(self) -> nn.Module:
        """[b, ...] → [b, n]."""
        ...

    def sequential(self, modules: Modules) -> nn.Module:
        """Return the modules one after the other, to be a part of a network."""
        ...

    def network(self, modules: Modules) -> nn.Module:
        """Return the modules one after the other as a whole model: float32 (or token numbers) in, float32 out."""
        ...


class FullPrecision:
    """Ordinary torch modules in float32."""

    def linear(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=bias)

    def relu(self) -> nn.Module:
        return nn.ReLU()

    def flatten(self) -> nn.Module:
        return nn.Flatten()

    def sequential(self, modules: Modules) -> nn.Module:
        return nn.Sequential(OrderedDict(modules))

    def network(self, modules: Modules) -> nn.Module:
        return self.sequential(modules)


class EightBit:
    """Layers that compute in 8 bits."""

    def linear(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
        return eight_bit.Linear(inputs, outputs, bias=bias)

    def relu(self) -> nn.Module:
        return eight_bit.ReLU()

    def flatten(self) -> nn.Module:
        return eight_bit.Flatten()

    def sequential(self, modules: Modules) -> nn.Module:
        return eight_bit.Sequential(_eight_bit(modules))

    def network(self, modules: Modules) -> nn.Module:
        return eight_bit.Network(_eight_bit(modules))


FULL_PRECISION: Layers = FullPrecision()
EIGHT_BIT: Layers = EightBit()


def _eight_bit(modules: Modules) -> dict[str, eight_bit.Layer]:
    layers = {}
    for name, module in modules.items():
        if not isinstance(module, eight_bit.Layer):
            raise TypeError(
                f"{name} is a {type(module).__name__}, which computes in float32: take a layer of the factory"
            )
        layers[name] = module
    return layers
