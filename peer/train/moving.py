"""Changing state of a model beside its trained parameters: buffers, and frozen copies that its code moves.

A buffer may be None until the first batch, or grow with the longest sequence. A momentum encoder, a target network or a
mean teacher requires no gradient and yet changes in each step. Both are part of the state that a run resumes from.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

Fingerprint = tuple[int, ...]


class FrozenParameters:
    """The parameters of a model that require no gradient when training begins."""

    def __init__(self, model: nn.Module) -> None:
        named = model.named_parameters()
        self._start = {name: fingerprint(each) for name, each in named if not each.requires_grad}
        self._model = model

    def moved(self) -> dict[str, torch.Tensor]:
        """Return those that are others than at the start, by name; not copies. It takes one reading of all."""
        return {name: each.detach() for name, each in self._now() if self._start[name] != fingerprint(each)}

    def restore_(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Set parameters to a result of `moved`. Raises ValueError for those of another model."""
        own = dict(self._now())
        for name, value in kept.items():
            if name not in own or own[name].shape != value.shape:
                raise ValueError(f"the model has no frozen parameter {name} of shape {list(value.shape)}")
            with torch.no_grad():
                own[name].copy_(value)

    def _now(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, each) for name, each in self._model.named_parameters() if name in self._start)


def set_buffer_(model: nn.Module, name: str, value: torch.Tensor, *, persistent: bool = True) -> None:
    """Give a buffer its value: in place where shape and type are the same, so that references to it stay valid.

    `persistent` counts for one that the model does not have yet. Raises ValueError where the model cannot have it.
    """
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"the model has no module {path} for its buffer {leaf}") from None
    own = module._buffers.get(leaf)
    if own is not None and own.shape == value.shape and own.dtype == value.dtype and _takes_values(own):
        with torch.no_grad():
            own.copy_(value)
        return
    if own is None and leaf not in module._buffers and hasattr(module, leaf):
        raise ValueError(f"{name} is no buffer of the model")
    others = itertools.chain(module.parameters(), module.buffers(), model.parameters())
    beside = own if own is not None else next(others, None)
    # In memory of its own, which starts where operators expect it.
    fresh = value.to(value.device if beside is None else beside.device, copy=True)
    if leaf in module._buffers:
        module._buffers[leaf] = fresh
    else:
        module.register_buffer(leaf, fresh, persistent=persistent)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Leave the buffers as they were, whatever a model does to them inside: write to them, grow them, or make them."""
    before = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(each, each.clone()) for each in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in values:
            # Tensors made under inference mode can be written to only under it.
            with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)
                if not is_expanded(buffer):
                    buffer.copy_(value)
        for module, buffers in before:
            if [*map(id, module._buffers.values())] != [*map(id, buffers.values())]:
                module._buffers.clear()
                module._buffers.update(buffers)


@contextmanager
def frozen_kept(model: nn.Module) -> Iterator[None]:
    """Leave the frozen parameters as they were: the loss of a model with a momentum encoder moves it."""
    frozen = [(each, each.detach().clone()) for each in model.parameters() if not each.requires_grad]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in frozen:
                parameter.copy_(value)


def _takes_values(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_expanded(tensor) and not tensor.is_inference()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor are one number in memory, as `expand` makes them: nothing can be
    written into it."""
    return tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return numbers that differ where values do, computed where the tensor is: sums of its bits."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return (tensor._version,)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    bits = flat.view(kind)
    sums: list[int] = torch.stack((bits.sum(dtype=torch.int64), bits[1::3].sum(dtype=torch.int64))).tolist()
    return (*tensor.shape, *sums)


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that match a pattern, or, where none does, those in the modules whose names do."""
    names = list(names)
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    return found or [name for name in names if fnmatch.fnmatchcase(name, f"{pattern}.*")]
