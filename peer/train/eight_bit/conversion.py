"""Ordinary modules, converted: modules with a counterpart compute in 8 bits from then on, the rest in float32."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from peer.errors import UsageError
from peer.train.eight_bit.boundary import Network
from peer.train.eight_bit.conv import ConvUnit, RectifiedConv
from peer.train.eight_bit.layer import Flatten, Layer, ReLU
from peer.train.eight_bit.linear import Linear
from peer.train.eight_bit.pooling import AveragePool, MaxPool

log = logging.getLogger("sotto")

_MOST_NAMED = 8


def convert(model: nn.Module, *, leave: Sequence[str] = ()) -> nn.Module:
    """Return `model` with everything in 8 bits that has a counterpart there.

    Those are `Linear`; `Conv2d` that keeps the size at stride 1, alone with a bias, or without one before `BatchNorm2d`
    or `GroupNorm`; `ReLU`, `MaxPool2d`, `Flatten` and `AdaptiveAvgPool2d(1)` before a `Flatten`. Consecutive ones in an
    `nn.Sequential` become one network, inside which all numbers are codes; a linear layer or convolution elsewhere
    becomes a network of its own. Everything else stays as it is, and the log names it.

    The result has the parameters of `model`, the same objects in the same order, and its running statistics; `model`
    itself still computes in float32. Names change where several modules become one. Therefore convert on all devices,
    and before the optimizer asks for names.

    `leave`: names of modules, or patterns of them (`head`, `blocks.0.*`), that stay in float32: also those whose weight
    the model reads itself. Raises UsageError where nothing has a counterpart, or a pattern names nothing.
    """
    names = [name for name, _ in model.named_modules()]
    for pattern in leave:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"leave names {pattern!r}, and the model has no such module")
    conversion = _Conversion(tuple(leave))
    converted = conversion.of(model, "")
    if not conversion.networks:
        raise UsageError(
            "nothing in this model has a counterpart in 8 bits: neither nn.Linear, nor an nn.Conv2d that keeps the size"
            " at stride 1 and has a bias, or a norm and none"
        )
    if conversion.left:
        named = ", ".join(conversion.left[:_MOST_NAMED])
        more = f" and {len(conversion.left) - _MOST_NAMED} more" if len(conversion.left) > _MOST_NAMED else ""
        log.warning("in float32 stay %s%s: they have no counterpart in 8 bits, or were left out", named, more)
    return converted


_PRODUCTS = (Linear, ConvUnit, RectifiedConv)
"""Layers for which numbers are worth being quantized."""


class _Conversion:
    """One pass over a model."""

    def __init__(self, leave: tuple[str, ...]) -> None:
        self._leave = leave
        self.networks = 0
        self.left: list[str] = []
        """Modules that stay in float32, for people."""

    def of(self, module: nn.Module, name: str) -> nn.Module:
        """Return the module of that name, converted as far as it has counterparts."""
        if self._is_left(name):
            self._leaves(name, module)
            return module
        if type(module) is nn.Sequential:
            return self._sequence(module, name)
        layer = _layer_of(module)
        if isinstance(layer, _PRODUCTS):
            return self._network({"layer": layer})
        # Not `named_children`, which leaves out a module that is there twice.
        children = {child: part for child, part in module._modules.items() if part is not None}
        # Torch's own modules read the weights of their parts themselves.
        if not children or (type(module).__module__.startswith("torch.") and not isinstance(module, _CONTAINERS)):
            self._leaves(name, module)
            return module
        found = {child: self.of(part, _joined(name, child)) for child, part in children.items()}
        return _with_parts(module, found)

    def _sequence(self, sequence: nn.Sequential, name: str) -> nn.Module:
        """Return the steps of a sequence, those that follow each other in 8 bits as one network."""
        parts: list[tuple[str, nn.Module]] = []
        run: list[tuple[tuple[str, ...], Layer]] = []

        def end_run() -> None:
            layers = {names[0]: layer for names, layer in run}
            if any(isinstance(layer, _PRODUCTS) for layer in layers.values()):
                parts.append((next(iter(layers)), self._network(layers)))
            else:
                parts.extend((each, sequence.get_submodule(each)) for names, _ in run for each in names)
            run.clear()

        for names, layer in self._steps(sequence, name):
            if layer is not None:
                run.append((names, layer))
                continue
            end_run()
            parts.extend((each, self.of(sequence.get_submodule(each), _joined(name, each))) for each in names)
        end_run()
        if len(parts) == 1 and isinstance(parts[0][1], Network):
            return parts[0][1]
        return nn.Sequential(OrderedDict(parts))

    def _steps(self, sequence: nn.Sequential, name: str) -> Iterator[tuple[tuple[str, ...], Layer | None]]:
        """Yield the names of consecutive modules of a sequence, and their 8-bit layer, if there is one; a convolution
        takes its norm and its ReLU along."""
        modules = [(each, module) for each, module in sequence._modules.items() if module is not None]
        at = 0
        while at < len(modules):
            following = [
                None if self._is_left(_joined(name, each)) else module for each, module in modules[at : at + 3]
            ]
            layer, taken = _step(*following, *[None] * (3 - len(following)))
            yield tuple(each for each, _ in modules[at : at + taken]), layer
            at += taken

    def _network(self, layers: dict[str, Layer]) -> Network:
        self.networks += 1
        return Network(layers)

    def _is_left(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._leave)

    def _leaves(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Identity):
            self.left.append(f"{name or 'the model'} ({type(module).__name__})")


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _step(first: nn.Module | None, second: nn.Module | None, third: nn.Module | None) -> tuple[Layer | None, int]:
    """Return the 8-bit layer for a module of a sequence, or None, and the number of modules that it replaces."""
    if isinstance(first, nn.Conv2d) and first.bias is None and _is_square(first) and _has_statistics(second):
        assert second is not None
        relu = type(third) is nn.ReLU
        return ConvUnit(first, second, activate=relu), 2 + relu
    if isinstance(first, nn.Conv2d) and type(second) is nn.ReLU and _layer_of(first) is not None:
        return RectifiedConv(first, activate=True), 2
    if isinstance(first, nn.AdaptiveAvgPool2d) and first.output_size in (1, (1, 1)) and _flattens(second):
        return AveragePool(), 2
    return (None if first is None else _layer_of(first)), 1


def _layer_of(module: nn.Module) -> Layer | None:
    """Return the 8-bit layer for a module by itself; None without a counterpart."""
    if type(module) is nn.Linear:
        return Linear(module)
    if isinstance(module, nn.Conv2d) and module.bias is not None and _is_square(module):
        return RectifiedConv(module, activate=False)
    if type(module) is nn.ReLU:
        return ReLU()
    if _flattens(module):
        return Flatten()
    if type(module) is nn.MaxPool2d and not (module.ceil_mode or module.return_indices):
        kernel, stride, padding = map(_side, (module.kernel_size, module.stride, module.padding))
        if kernel is None or stride is None or padding is None or _side(module.dilation) != 1:
            return None
        if kernel <= 16 and padding * 2 <= kernel:
            return MaxPool(kernel, stride=stride, padding=padding)
    return None


def _side(size: int | tuple[int, ...]) -> int | None:
    """Return the side of a square; None for any other rectangle."""
    sides = {size} if isinstance(size, int) else {*size}
    return sides.pop() if len(sides) == 1 else None


def _is_square(conv: nn.Conv2d) -> bool:
    """Whether a convolution is one that `Window` describes."""
    (kernel, other), (stride, across) = conv.kernel_size, conv.stride
    return (
        type(conv) is nn.Conv2d
        and kernel == other
        and stride == across
        and kernel % 2 == 1
        and conv.padding in ("same", (kernel // 2, kernel // 2))
        and conv.padding_mode == "zeros"
        and conv.dilation == (1, 1)
    )


def _has_statistics(norm: nn.Module | None) -> bool:
    """Whether it is a norm that has a counterpart behind a convolution."""
    if type(norm) is nn.BatchNorm2d:
        return norm.affine and norm.track_running_stats
    return type(norm) is nn.GroupNorm and norm.affine


def _flattens(module: nn.Module | None) -> bool:
    return type(module) is nn.Flatten and module.start_dim == 1 and module.end_dim == -1


def _with_parts(module: nn.Module, parts: dict[str, nn.Module]) -> nn.Module:
    """Return a module with other submodules, and with the parameters and buffers of this one."""
    other = copy.copy(module)
    # A shallow copy shares these.
    for shared in ("_parameters", "_buffers", "_modules"):
        other.__dict__[shared] = dict(module.__dict__[shared])
    for name, part in parts.items():
        other._modules[name] = part
    return other


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
