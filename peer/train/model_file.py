"""Whole models on disk: safetensors with every entry of the model's state_dict."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from peer.errors import DataError
from peer.files import replacing, safetensors_head
from peer.records import ModelForm, ModelParts
from peer.wire.start_model import Entry, StartModel


def save_model(
    model: torch.nn.Module,
    path: Path,
    *,
    names: Collection[str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the model's state_dict, beside the final name first, so that no reader sees half a file.

    A strict `load_state_dict` takes the file: tensors that the model holds under several names are written under each.
    Values that are no tensors, such as some `_extra_state`, are left out; `not_in_files` names it. `names`: entries to
    write, where the model is to be loaded that has only these; by default all.
    """
    write_tensors(state_tensors(model, names), path, metadata={"format": "pt", **(metadata or {})})


def state_tensors(model: torch.nn.Module, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of the model's state_dict by name; not copies."""
    state = model.state_dict()
    chosen = {name: state[name] for name in (state if names is None else names)}
    return {name: each for name, each in chosen.items() if isinstance(each, torch.Tensor)}


def model_parts(
    model: torch.nn.Module,
    trained: Mapping[str, torch.Tensor],
    *,
    private: Collection[str] = (),
    names: Collection[str] | None = None,
) -> ModelParts | None:
    """Return the form of a model, and what neither training nor a batch changes: frozen parameters, under their own
    names, and states of modules; not copies. `trained`, `private`: the parameters that are exchanged, in the order of
    their vector, and those that are trained here alone. `names` as for `save_model`.

    None where the state_dict holds tensors that are neither parameters nor buffers: these may follow from parameters.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names_of = {id(each): name for name, each in tensors.items()}
    state = model.state_dict(keep_vars=True)
    held = {name: state[name] for name in (state if names is None else names)}
    held = {name: each for name, each in held.items() if isinstance(each, torch.Tensor)}
    entries = {name: names_of.get(id(each), name) for name, each in held.items()}
    if any(source not in tensors and not name.endswith("_extra_state") for name, source in entries.items()):
        return None
    shown = {*entries.values()}
    form = ModelForm(
        trained={name: tuple(each.shape) for name, each in trained.items()},
        private=tuple(private),
        entries=entries,
        without=tuple(name for name in tensors if name not in shown),
    )
    changing = {*trained, *private, *(name for name, _ in model.named_buffers())}
    return form, {entries[name]: each for name, each in held.items() if entries[name] not in changing}


def whole_model(
    form: ModelForm, vector: npt.NDArray[np.float32], beside: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the state_dict of a model at a vector, float32[n], in the memory of that; `beside`: everything else that
    it has, by name. Raises KeyError for what is missing there."""
    sizes = [math.prod(shape) for shape in form.trained.values()]
    parts = zip(form.trained.items(), torch.split(torch.from_numpy(vector), sizes), strict=True)
    tensors = {**beside, **{name: part.view(shape) for (name, shape), part in parts}}
    known = {*form.entries.values(), *form.without}
    # Some buffers are made by a later batch.
    later = {name: name for name in beside if name not in known}
    return {name: tensors[source] for name, source in {**form.entries, **later}.items()}


def not_in_files(model: torch.nn.Module) -> list[str]:
    """Return the entries of the model's state_dict that are no tensors. Raises DataError for tensors that no file can
    hold: what the end of a run needs is to be tried at its beginning."""
    without = []
    for name, each in model.state_dict().items():
        if not isinstance(each, torch.Tensor):
            without.append(name)
        elif each.layout is not torch.strided or each.is_quantized or each.is_meta or each.dtype == torch.complex128:
            kind = f"{each.dtype} ({each.layout}{', meta' if each.is_meta else ''})"
            raise DataError(
                f"{name} of the model is a tensor of {kind}, which cannot be written to a safetensors file;"
                " a buffer that is no part of the model is registered with persistent=False"
            )
    return without


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, beside the final name first."""
    with replacing(path) as beside, beside.open("wb") as file:
        file.writelines(file_parts(tensors, metadata))


def file_parts(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a safetensors file: its header, then the memory of each tensor. What the library does in one
    piece would take three times the memory of the model.

    Tensors may share memory, have gaps, and lie on any device; those on the CPU without gaps are not copied.
    """
    # The library knows the names and the order of types; of each tensor it gets a form without rows.
    bare = {name: each.new_empty((0, *each.shape[1:]) if each.ndim else ()) for name, each in tensors.items()}
    whole = save(bare)
    # The library writes metadata in an order of chance.
    header = {"__metadata__": {**metadata}, **json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])}
    names, end = [name for name in header if name != "__metadata__"], 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name]["data_offsets"] = [start, end]
        header[name]["shape"][:1] = tensors[name].shape[:1]
    yield safetensors_head(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    for name in names:
        plain = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().data


class TensorSlice(Protocol):
    """A tensor that is not read yet."""

    def get_shape(self) -> list[int]: ...


class TensorFile(Protocol):
    """Interface of an open safetensors file, which the library leaves untyped."""

    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def get_slice(self, name: str, /) -> TensorSlice: ...
    def get_tensor(self, name: str, /) -> torch.Tensor: ...


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file for reading; any fault of it, also later, becomes a DataError that names it."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise DataError(f"model file {path} does not exist") from None
    except OSError as error:
        raise DataError(f"model file {path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise DataError(f"{path} is not a valid safetensors file: {error}") from None


def refuse_not_finite(read: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise DataError if a tensor of a file holds NaN or infinity."""
    for name, value in read.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise DataError(f"model file {path}: {name} contains values that are not finite")


def load_model_(model: torch.nn.Module, path: Path) -> None:
    """Set all parameters and buffers of the model to those of a file, or leave it as it is and raise DataError.

    Ranges of 8-bit layers that the file lacks stay unknown, and are measured by the first batch.
    """
    wanted = named_tensors(model)
    with open_tensors(path) as file:
        names = set(file.keys())
        # A model that was trained in full precision has no ranges, and takes none.
        wanted = {name: tensor for name, tensor in wanted.items() if name in names or not _is_range(name)}
        names = {name for name in names if name in wanted or not _is_range(name)}
        lacking = [name for name in wanted if name not in names]
        if lacking:
            raise DataError(f"model file {path} lacks {_listed(lacking)}")
        tied = _tied(model)
        excess = sorted(names - wanted.keys() - tied.keys())
        if excess:
            raise DataError(f"model file {path} contains {_listed(excess)}, which the model does not have")
        for name, tensor in wanted.items():
            shape = file.get_slice(name).get_shape()
            if list(shape) != list(tensor.shape):
                raise DataError(
                    f"model file {path}: {name} has shape {shape}, but the model needs {list(tensor.shape)}"
                )
        read = {name: file.get_tensor(name) for name in wanted}
        for name in sorted(names & tied.keys()):
            if not torch.equal(file.get_tensor(name), read[tied[name]]):
                raise DataError(
                    f"model file {path}: {name} and {tied[name]} differ, but the model has one tensor for both"
                )
    refuse_not_finite(read, path)
    for name, tensor in read.items():
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise DataError(
                f"model file {path}: {name} has type {tensor.dtype}, but the model needs {wanted[name].dtype}"
            )
    with torch.no_grad():
        for name, tensor in read.items():
            wanted[name].copy_(tensor)


def start_model(model: torch.nn.Module, *, without: Container[str] = ()) -> StartModel:
    """Return digests of names, types, shapes and values of all parameters, and of the buffers of its state_dict;
    `without` the parameters of some names."""
    whole, kept = hashlib.sha256(), model.state_dict().keys()
    parameters: list[Entry] = []
    buffers: list[Entry] = []
    named = ((parameters, model.named_parameters()), (buffers, model.named_buffers()))
    for entries, name, tensor in ((entries, *each) for entries, tensors in named for each in tensors):
        if name not in kept if entries is buffers else name in without:
            continue
        form = f"\t{tensor.dtype}\t{list(tensor.shape)}\n"
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        values = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        # Scripts with a large frozen base leave it out of what they save, and still train on it.
        if name in kept:
            whole.update(f"{name}{form}".encode())
            whole.update(values)
        # A part that torch.compile wraps is the same model.
        plain = name.replace("_orig_mod.", "")
        entries.append((plain, hashlib.sha256(f"{plain}{form}".encode()).digest(), hashlib.sha256(values).digest()))
    return StartModel.of(whole.hexdigest(), parameters, buffers)


def _is_range(name: str) -> bool:
    """Whether a tensor is a running range of an 8-bit layer."""
    return name.rpartition(".")[2] in ("running_range", "running_largest")


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the model's state_dict by name, each once."""
    kept = model.state_dict().keys()
    return {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in kept}


def _tied(model: torch.nn.Module) -> dict[str, str]:
    """Return further names of tensors that the model holds under several → the first."""
    first: dict[int, str] = {}
    state = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, torch.Tensor)}
    return {name: first[id(tensor)] for name, tensor in state.items() if first.setdefault(id(tensor), name) != name}


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
