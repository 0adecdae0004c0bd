"""Conversion of `state_dict` results to named arrays and back, with nothing pickled.

Tensors and numpy arrays become arrays of a checkpoint; everything else has to be a plain value, and goes into one JSON
text beside them. JSON has no tuples, no keys but strings and no bytes: these become tables with one key that names
their type.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from peer.errors import StateError, UsageError
from peer.node.checkpoint_arrays import Arrays, Group, group, grouped
from peer.train.moving import fingerprint

_TEXT = "values"
"""Name of the array that holds the JSON text."""

_BYTE_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
"""Types of tensors by name. Numpy lacks some of them, so that tensors are stored as bytes."""


_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
}
"""Layout of a sparse tensor → the tensors that it is made of."""


def pack(value: object, place: str) -> dict[str, npt.NDArray[Any]]:
    """Return a value as flat arrays, mostly not copies. `place` says where it comes from.

    Raises UsageError, with its place, for a value that is no tensor, no array and no plain value.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    text = json.dumps(_packed(value, place, arrays))
    return {**arrays, _TEXT: np.frombuffer(text.encode(), np.uint8)}


def digest(arrays: Arrays) -> int:
    """Return XXH3-64 of a result of `pack`."""
    whole = xxhash.xxh3_64()
    for name, array in arrays.items():
        whole.update(f"{name} {array.size} ".encode())
        whole.update(array.data)
    return whole.intdigest()


def unpack(arrays: Arrays) -> Any:
    """Return the value that `pack` was given, tensors on the CPU. Raises StateError if the arrays cannot be those."""
    try:
        return _unpacked(json.loads(arrays[_TEXT].tobytes()), arrays)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"what was kept of the training script cannot be read: {error}") from None


def _packed(value: object, place: str, arrays: dict[str, npt.NDArray[Any]]) -> object:
    match value:
        case None | bool() | str():
            return value
        case np.generic() | np.ndarray():
            if value.dtype.kind in "biufc":
                stored = _stored(np.ascontiguousarray(value).reshape(-1).view(np.uint8), arrays)
                return {"numpy": [stored, value.dtype.str, value.shape]}
        case int() | float():
            # Enumerations and their like would come back as plain numbers.
            if type(value) in (int, float):
                return value
        case torch.Tensor() if value.layout in _SPARSE:
            parts = [getattr(value.detach(), part)() for part in _SPARSE[value.layout]]
            kind = str(value.layout).removeprefix("torch.")
            options = {"is_coalesced": value.is_coalesced()} if value.layout is torch.sparse_coo else {}
            return {kind: [[_packed(part, place, arrays) for part in parts], list(value.shape), options]}
        case torch.Tensor():
            stored = _stored(_bytes_of(value, place), arrays)
            return {"tensor": [stored, str(value.dtype).removeprefix("torch."), list(value.shape)]}
        case bytes():
            return {"bytes": _stored(np.frombuffer(value, np.uint8), arrays)}
        case Mapping():
            kind = "counter" if isinstance(value, Counter) else "table"
            pairs = [
                [_packed(key, f"a key of {place}", arrays), _packed(each, f"{place}[{key!r}]", arrays)]
                for key, each in value.items()
            ]
            return {kind: pairs}
        case list() | tuple() | set() | frozenset():
            # A set has no order: sorted, equal ones have equal texts.
            items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            packed = [_packed(each, f"{place}[{number}]", arrays) for number, each in enumerate(items)]
            return packed if isinstance(value, list) else {_kind(value): packed}
    raise UsageError(
        f"{place} is of type {type(value).__name__}, which cannot be kept: tensors, arrays, numbers, texts, and lists"
        " and tables of them can"
    )


def _kind(value: object) -> str:
    return next(kind.__name__ for kind in (tuple, set, frozenset) if isinstance(value, kind))


def _stored(data: npt.NDArray[np.uint8], arrays: dict[str, npt.NDArray[Any]]) -> str:
    """Put bytes among the arrays; return their name."""
    name = str(len(arrays))
    arrays[name] = data
    return name


def _bytes_of(tensor: torch.Tensor, place: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, not a copy where that is on the CPU and has no gaps."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UsageError(f"{place} is a tensor without plain values ({tensor.layout}), which cannot be kept")
    own = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data: npt.NDArray[np.uint8] = own.view(torch.uint8).numpy() if own.numel() else np.empty(0, np.uint8)
    return data


def _unpacked(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tensor":
            name, dtype, shape = content
            if not arrays[name].size:
                return torch.empty(shape, dtype=_BYTE_TYPES[dtype])
            return torch.from_numpy(arrays[name].copy()).view(_BYTE_TYPES[dtype]).reshape(shape)
        case "sparse_coo" | "sparse_csr":
            parts, shape, options = content
            make = getattr(torch, f"{kind}_tensor")
            tensors = (_unpacked(part, arrays) for part in parts)
            return make(*tensors, tuple(shape), check_invariants=True, **options)
        case "numpy":
            name, dtype, shape = content
            array = arrays[name].copy().view(np.dtype(dtype)).reshape(shape)
            return array if shape else array[()]
        case "bytes":
            return arrays[content].tobytes()
        case "table" | "counter":
            pairs = {_unpacked(key, arrays): _unpacked(each, arrays) for key, each in content}
            return Counter(pairs) if kind == "counter" else pairs
        case "tuple":
            return tuple(_unpacked(each, arrays) for each in content)
        case "set":
            return {_unpacked(each, arrays) for each in content}
        case "frozenset":
            return frozenset(_unpacked(each, arrays) for each in content)
    raise ValueError(f"a value of kind {kind!r}")


class Stateful(Protocol):
    """An object that `keep` takes."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


Keepable: TypeAlias = Stateful | torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""Arguments of `keep`: generators of random numbers too, which have states under other names."""


class _Numbers:
    """A generator of random numbers in the form that `Kept` saves."""

    def __init__(self, get: Callable[[], Any], set_: Callable[[Any], object]) -> None:
        self._get, self._set = get, set_

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._get()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._set(state_dict["state"])


def _stateful(each: Keepable) -> Stateful:
    match each:
        case torch.Generator():
            return _Numbers(each.get_state, each.set_state)
        case np.random.Generator():
            bits = each.bit_generator
            return _Numbers(lambda: bits.state, lambda state: setattr(bits, "state", state))
        case np.random.RandomState():
            return _Numbers(lambda: each.get_state(legacy=True), each.set_state)
        case random.Random():
            return _Numbers(each.getstate, each.setstate)
    return each


def _groups(each: object) -> list[dict[str, Any]]:
    return each.param_groups if isinstance(each, torch.optim.Optimizer) else []


class Kept:
    """The objects of a script whose state is saved with the model: any object with `state_dict` and `load_state_dict`,
    and generators of random numbers."""

    def __init__(self, objects: Sequence[Keepable]) -> None:
        """Raises UsageError for an object that has not both, or that is listed twice."""
        if not isinstance(objects, (list, tuple)):
            kind = type(objects).__name__
            raise UsageError(f"keep is of type {kind}; give a list, such as keep=[optimizer, scheduler]")
        self._given = [*objects]
        self._objects = [_stateful(each) for each in objects]
        self._kinds = [type(each).__name__ for each in objects]
        self._num_groups = [len(_groups(each)) for each in objects]
        for number, each in enumerate(objects):
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(self._objects[number], method, None)):
                    raise UsageError(
                        f"keep[{number}] is of type {type(each).__name__}, which has no {method}(); keep takes objects"
                        " that can save and load their state, such as an optimizer or a torchdata StatefulDataLoader"
                    )
            if any(each is other for other in objects[:number]):
                raise UsageError(f"keep[{number}] is in keep twice ({type(each).__name__})")

    def __contains__(self, each: object) -> bool:
        return any(each is one for one in self._given)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers among the objects; of one that a framework has wrapped, what it wraps: wrappers are
        optimizers by their type alone."""
        found = [each for each in self._given if isinstance(each, torch.optim.Optimizer)]
        return [getattr(each, "optimizer", each) for each in found]

    def groups(self, model: nn.Module) -> dict[int, list[list[str]]]:
        """Return the names of the parameters in each group of the optimizers, by number; "" for one that neither the
        model nor a module among the objects has. Raises UsageError for such a one in a group that an optimizer has got
        since it was given."""
        names = {id(one): name for name, one in self._parameters(model).items()}
        found: dict[int, list[list[str]]] = {}
        for number, had in enumerate(self._num_groups):
            groups = [[names.get(id(one), "") for one in group["params"]] for group in _groups(self._given[number])]
            if any("" in group for group in groups[had:]):
                raise UsageError(
                    f"keep[{number}] ({self._kinds[number]}) was given a parameter group whose parameters belong"
                    " neither to the model nor to a module in keep, so a crash would lose them; keep that module"
                )
            if groups:
                found[number] = groups
        return found

    def _arrange(self, saved: Mapping[int, Sequence[Sequence[str]]], model: nn.Module) -> None:
        """Give optimizers the groups and the order of parameters that `groups` returned: `load_state_dict` makes no
        groups, and gives states by position, which differs in each process where a script made the list of a set."""
        named = self._parameters(model)
        for number, now in self.groups(model).items():
            # Where a name is missing, nothing can be compared. Earlier versions saved none of the first groups.
            for index, names in enumerate(saved.get(number, [])):
                was, is_ = set(names), set(now[index]) if index < len(now) else set(names).intersection(named)
                if not names or "" in was | is_:
                    continue
                if other := was ^ is_:
                    raise StateError(
                        f"keep[{number}] ({self._kinds[number]}) had other parameters in its group {index} when its"
                        f" state was saved: {min(other)} was added or left out; build it as before"
                    )
                ordered = [named[name] for name in names]
                if index < len(now):
                    _groups(self._given[number])[index]["params"][:] = ordered
                else:
                    cast(torch.optim.Optimizer, self._given[number]).add_param_group({"params": ordered})

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of the model and of the modules among the objects, by names of their own."""
        found = {
            f"{what}.{name}": one for what, each in self.modules().items() for name, one in each.named_parameters()
        }
        return {**found, **dict(model.named_parameters())}

    def followers(self) -> dict[str, int]:
        """Return digests of the states of schedulers and modules, by their names in sentences: these follow the steps
        of an optimizer, where a loader or a generator goes ahead of them."""
        kinds = (torch.optim.lr_scheduler.LRScheduler, nn.Module)
        numbers = [number for number, each in enumerate(self._given) if isinstance(each, kinds)]
        return {f"keep[{number}] ({self._kinds[number]})": digest(self._packed(number)) for number in numbers}

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules among the objects, by their names in sentences."""
        named = enumerate(zip(self._given, self._kinds, strict=True))
        return {f"keep[{k}] ({kind})": each for k, (each, kind) in named if isinstance(each, nn.Module)}

    def _packed(self, number: int) -> dict[str, npt.NDArray[Any]]:
        return pack(self._objects[number].state_dict(), f"keep[{number}].state_dict()")

    def pack(self) -> dict[str, npt.NDArray[Any]]:
        """Return the states of all objects, and their kinds, mostly not copies. Raises UsageError for objects that
        cannot be kept."""
        groups = {"kept": pack(self._kinds, "keep")}
        groups |= {f"kept.{number}": self._packed(number) for number in range(len(self._objects))}
        return grouped(**groups)

    def load(self, arrays: Arrays, groups: Mapping[int, Sequence[Sequence[str]]], model: nn.Module) -> None:
        """Give all objects the states that `pack` returned, and optimizers what `groups` did. Raises UsageError if
        these are other objects, StateError if one does not take its state."""
        kinds = unpack(group(arrays, "kept"))
        if kinds != self._kinds:
            now, then = ", ".join(self._kinds) or "nothing", ", ".join(kinds) or "nothing"
            raise UsageError(f"keep holds {now}, but the run that is resumed kept {then}, in this order")
        self._arrange(groups, model)
        for number, each in enumerate(self._objects):
            state = unpack(Group(arrays, f"kept.{number}"))
            try:
                each.load_state_dict(state)
            except Exception as error:  # Code of others: any error means that it refuses its own state.
                raise StateError(
                    f"keep[{number}] ({kinds[number]}) does not take the state that it had: {error}"
                ) from error
            inner = getattr(self._given[number], "optimizer", self._given[number])
            # Other optimizers need not return the tensors that they hold.
            if getattr(type(inner), "state_dict", None) is torch.optim.Optimizer.state_dict:
                held = [one for one_group in inner.param_groups for one in one_group["params"]]
                for index, one in enumerate(held):
                    if index in state.get("state", {}):
                        inner.state[one] = _with_types(inner.state[one], state["state"][index])


def _with_types(loaded: Any, saved: Any) -> Any:
    """Return the loaded state of an optimizer with the types that were saved. `load_state_dict` gives each tensor that
    of its parameter, so that counts, codes in 8 bits and moments of other precision would come back as float32."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _with_types(value, saved.get(key)) for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)) and isinstance(saved, (list, tuple)):
        return type(loaded)(_with_types(*pair) for pair in zip(loaded, saved, strict=True))
    return loaded


class LooseValues:
    """The numbers and tensors that modules hold as plain attributes: no state_dict has them, so a crash loses them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules, self._num_looks = modules, 0
        plain = nn.Module.get_extra_state
        self._before = {
            (whose, f"{path}.{name}" if path else name): (part, _mark(value), _content(value))
            for whose, module in modules.items()
            for path, part in module.named_modules()
            if type(part).get_extra_state is plain
            for name, value in vars(part).items()
            if not name.startswith("_") and _is_loose(value)
        }

    def changed(self) -> list[str]:
        """Return, once for each, which of them have changed since the modules were given, but those that a module saves
        in a way of its own."""
        self._num_looks += 1
        # To read whole tensors takes time, and in-place changes past autograd are rare: these are found ever later.
        reads_all = self._num_looks.bit_count() == 1
        found = []
        for key, (part, mark, content) in list(self._before.items()):
            value = vars(part).get(key[1].rpartition(".")[2])
            if not _is_loose(value):
                del self._before[key]
            elif (_mark(value) != mark or reads_all) and _content(value) != content:
                found.append(key)
                del self._before[key]
        touched = {whose for whose, _ in found}
        saved = {each: {key.rpartition(".")[2] for key in self._modules[each].state_dict()} for each in touched}
        return [f"{name} of {whose}" for whose, name in found if name.rpartition(".")[2] not in saved[whose]]


def _is_loose(value: object) -> bool:
    """Whether this is a number, or a tensor that was not computed of parameters: one that was is computed anew, as the
    weight below a weight norm is."""
    return type(value) in (int, float) or (isinstance(value, torch.Tensor) and value.grad_fn is None)


def _mark(value: object) -> object:
    """Return a mark that usually differs once a value has changed; quickly."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    # In a tuple, something that is not a number equals itself.
    return (value,)


def _content(value: object) -> object:
    return fingerprint(value) if isinstance(value, torch.Tensor) else (value,)
