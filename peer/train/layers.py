"""The parts that models are built of, in either precision: a model is defined once, with the parts handed in.

`FULL_PRECISION` makes ordinary torch modules, and is the default of an argument `layers`; `EIGHT_BIT` makes the layers
of `peer.train.eight_bit`. Parameters have equal names, shapes, order and initial values in both, so that the vector x,
checkpoints and exported models fit either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn

from peer.train import eight_bit
from peer.train.full_precision.image_layers import AveragePool, ConvUnit, RectifiedConv, Residual
from peer.train.full_precision.norms import Norm
from peer.train.full_precision.text_layers import FirstToken, TokenEmbedding, TransformerBlock

Modules: TypeAlias = Mapping[str, nn.Module]
"""Modules by the names that their parameters get."""


class Layers:
    """A factory of layers. Its products are opaque until `network` makes a computing module of them.

    This one makes ordinary torch modules, in float32: the default of an argument `layers`.
    """

    def linear(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
        """Return a linear layer over the last dimension, with parameters `weight` and `bias` as `nn.Linear`."""
        return nn.Linear(inputs, outputs, bias=bias)

    def relu(self) -> nn.Module:
        """max(x, 0), of any shape."""
        return nn.ReLU()

    def flatten(self) -> nn.Module:
        """[b, ...] → [b, n]."""
        return nn.Flatten()

    def conv_unit(
        self,
        inputs: int,
        outputs: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        groups: int = 1,
        norm: Norm | None = None,
        activate: bool = True,
    ) -> nn.Module:
        """Return a convolution that keeps the size at stride 1, its norm and its ReLU, drawn by He's rule (fan-out).

        With a norm the convolution has no bias, and the parameters are `conv.weight` and `norm.…`; norms that are
        activations take the place of the ReLU. Without a norm they are `weight` and `bias`, which starts at 0.
        """
        shape = {"kernel": kernel, "stride": stride, "groups": groups, "activate": activate}
        return self._convolution(inputs, outputs, norm, shape)

    def _convolution(self, inputs: int, outputs: int, norm: Norm | None, shape: Mapping[str, Any]) -> nn.Module:
        if norm is None:
            return RectifiedConv(inputs, outputs, **shape)
        return ConvUnit(inputs, outputs, norm=norm, **shape)

    def max_pool(self, kernel: int, *, stride: int | None = None, padding: int = 0) -> nn.Module:
        """The largest of kernel × kernel pixels; `stride` is `kernel` unless given."""
        return nn.MaxPool2d(kernel, stride, padding)

    def average_pool(self) -> nn.Module:
        """The means of channels: [b, c, h, w] → [b, c]."""
        return AveragePool()

    def residual(self, main: Modules, shortcut: nn.Module | None, *, activate: bool) -> nn.Module:
        """Return the modules `main` one after the other, under their names, plus `shortcut` of the same input, under
        that name (the input itself if None), and a ReLU of the sum if `activate`."""
        return Residual(main, shortcut, activate=activate)

    def token_embedding(self, vocabulary: int, positions: int, width: int) -> nn.Module:
        """Pieces int64[b, n], 0 being padding, → the normalised sum of the vectors of piece and position, and with it
        which pieces are padding; parameters are named as in DistilBERT."""
        return TokenEmbedding(vocabulary, positions, width)

    def transformer_block(self, width: int, heads: int, hidden: int) -> nn.Module:
        """Attention and two linear layers on [b, n, width], with padding; parameters are named as in DistilBERT."""
        return TransformerBlock(width, heads, hidden)

    def first_token(self) -> nn.Module:
        """The vector of the first piece: [b, n, d] → [b, d]."""
        return FirstToken()

    def sequential(self, modules: Modules) -> nn.Module:
        """Return the modules one after the other, to be a part of a network."""
        return nn.Sequential(OrderedDict(modules))

    def network(self, modules: Modules) -> nn.Module:
        """Return the modules one after the other as a whole model: float32 (or token numbers) in, float32 out."""
        return self.sequential(modules)


class _EightBit(Layers):
    """Layers that compute in 8 bits."""

    def linear(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
        return eight_bit.Linear(nn.Linear(inputs, outputs, bias=bias))

    def relu(self) -> nn.Module:
        return eight_bit.ReLU()

    def flatten(self) -> nn.Module:
        return eight_bit.Flatten()

    def _convolution(self, inputs: int, outputs: int, norm: Norm | None, shape: Mapping[str, Any]) -> nn.Module:
        plain = super()._convolution(inputs, outputs, norm, shape)
        if isinstance(plain, ConvUnit):
            return eight_bit.ConvUnit(plain.conv, plain.norm, activate=plain.rectifies)
        assert isinstance(plain, RectifiedConv)
        return eight_bit.RectifiedConv(plain, activate=plain.rectifies)

    def max_pool(self, kernel: int, *, stride: int | None = None, padding: int = 0) -> nn.Module:
        return eight_bit.MaxPool(kernel, stride=stride, padding=padding)

    def average_pool(self) -> nn.Module:
        return eight_bit.AveragePool()

    def residual(self, main: Modules, shortcut: nn.Module | None, *, activate: bool) -> nn.Module:
        around = None if shortcut is None else _eight_bit({"shortcut": shortcut})["shortcut"]
        return eight_bit.Residual(_eight_bit(main), around, activate=activate)

    def token_embedding(self, vocabulary: int, positions: int, width: int) -> nn.Module:
        return eight_bit.TokenEmbedding(vocabulary, positions, width)

    def transformer_block(self, width: int, heads: int, hidden: int) -> nn.Module:
        return eight_bit.TransformerBlock(width, heads, hidden)

    def first_token(self) -> nn.Module:
        return eight_bit.FirstToken()

    def sequential(self, modules: Modules) -> nn.Module:
        return eight_bit.Sequential(_eight_bit(modules))

    def network(self, modules: Modules) -> nn.Module:
        return eight_bit.Network(_eight_bit(modules))


FULL_PRECISION: Layers = Layers()
EIGHT_BIT: Layers = _EightBit()


def _eight_bit(modules: Modules) -> dict[str, eight_bit.Layer]:
    layers = {}
    for name, module in modules.items():
        if not isinstance(module, eight_bit.Layer):
            raise TypeError(
                f"{name} is a {type(module).__name__}, which computes in float32: take a layer of the factory"
            )
        layers[name] = module
    return layers
