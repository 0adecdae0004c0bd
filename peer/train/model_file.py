"""Whole models on disk: safetensors with every entry of the model's state_dict."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from peer.errors import DataError
from peer.files import instead_of, replacing, safetensors_head, write_whole
from peer.records import ModelForm, ModelParts
from peer.wire.start_model import Entry, StartModel

SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in one file of an exported model."""
INDEX = ".index.json"
"""End of the name of the file that says which tensors are in which shard of a model."""
_BLOCK = 1 << 20
"""Numbers of a vector that are in memory at once while it is written."""


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
    form: ModelForm, vector: InParts, beside: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | VectorPart]:
    """Return the state_dict of a model at a vector, float32[n], of which nothing is read before it is written;
    `beside`: everything else that it has, by name. Raises KeyError for what is missing there."""
    ends = accumulate(map(math.prod, form.trained.values()))
    mixed = {n: VectorPart(vector, end, shape) for (n, shape), end in zip(form.trained.items(), ends, strict=True)}
    tensors: dict[str, torch.Tensor | VectorPart] = {**beside, **mixed}
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


def write_tensors(tensors: Tensors, path: Path, *, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, beside the final name first."""
    with replacing(path) as beside, beside.open("wb") as file:
        file.writelines(file_parts(tensors, metadata))


def write_shards(tensors: Tensors, path: Path, *, metadata: Mapping[str, str]) -> list[Path]:
    """Write a safetensors file; in place of one that is larger than a shard may be, several in the order of the
    tensors, and their index, as libraries of Hugging Face read them. Return the files, the index first."""
    sizes = {name: each.nbytes for name, each in tensors.items()}
    shards: list[list[str]] = []
    for name, size in sizes.items():
        if not shards or sum(sizes[each] for each in shards[-1]) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    if len(shards) <= 1:
        write_tensors(tensors, path, metadata=metadata)
        return [path]
    files = [path.with_name(f"{path.stem}-{n + 1:05}-of-{len(shards):05}{path.suffix}") for n in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        write_tensors({name: tensors[name] for name in names}, file, metadata=metadata)
    places = {name: file.name for file, names in zip(files, shards, strict=True) for name in names}
    facts = {**metadata, "total_size": sum(sizes.values())}
    # Last: whoever finds it finds the others.
    index = path.with_name(path.name + INDEX)
    write_whole(index, json.dumps({"metadata": facts, "weight_map": places}, indent=2) + "\n")
    return [index, *files]


def shards_of(path: Path) -> list[Path]:
    """Return the index and the shards of a model that are there."""
    stem, suffix = map(re.escape, (path.stem, path.suffix))
    is_part = re.compile(rf"{stem}({suffix}{re.escape(INDEX)}|-\d{{5}}-of-\d{{5}}{suffix})").fullmatch
    return [each for each in path.parent.glob("*") if is_part(each.name)]


def file_parts(tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a safetensors file: its header, then the memory of each tensor. What the library does in one
    piece would take three times the memory of the model.

    Tensors may share memory, have gaps, and lie on any device; those on the CPU without gaps are not copied.
    """
    # The library knows the names and the order of types; of each tensor it gets a form without rows.
    types = {name: torch.float32 if isinstance(each, VectorPart) else each.dtype for name, each in tensors.items()}
    bare = {n: torch.empty((0, *each.shape[1:]) if each.shape else (), dtype=types[n]) for n, each in tensors.items()}
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
        tensor = tensors[name]
        if isinstance(tensor, VectorPart):
            yield from tensor.blocks()
            continue
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().data


class InParts(Protocol):
    """A vector of which slices of consecutive numbers are read: an array, or what reads or computes them then."""

    @property
    def size(self) -> int:
        """The number n."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its type."""
        ...

    def __getitem__(self, part: slice, /) -> npt.NDArray[Any]:
        """Return consecutive numbers."""
        ...


@dataclass(frozen=True)
class VectorPart:
    """A tensor that lies in a vector, float32[n], and is read block by block when it is written."""

    vector: InParts
    end: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a file."""
        return 4 * math.prod(self.shape)

    def blocks(self) -> Iterator[bytes]:
        """Yield its bytes."""
        for begin in range(self.end - math.prod(self.shape), self.end, _BLOCK):
            yield self.vector[begin : min(begin + _BLOCK, self.end)].astype("<f4", copy=False).tobytes()


Tensors: TypeAlias = Mapping[str, torch.Tensor | VectorPart]


class TensorSlice(Protocol):
    """A tensor that is not read yet."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


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
        raise DataError(f"model file {path} does not exist{instead_of(path)}") from None
    except OSError as error:
        raise DataError(f"model file {path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise DataError(f"{path} is not a valid safetensors file: {error}") from None


def read_like(file: TensorFile, path: Path, name: str, own: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a file. Raises DataError unless it has the shape of the model's own."""
    shape = list(file.get_slice(name).get_shape())
    if shape != list(own.shape):
        raise DataError(f"model file {path}: {name} has shape {shape}, but the model needs {list(own.shape)}")
    return file.get_tensor(name)


def take_(own: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor], path: Path) -> None:
    """Set tensors of a model to those of a file, by name. Raises DataError, and changes nothing, for values that are
    not finite or of another type."""
    for name, value in read.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise DataError(f"model file {path}: {name} contains values that are not finite")
    for name, value in read.items():
        if value.is_floating_point() != own[name].is_floating_point():
            raise DataError(f"model file {path}: {name} has type {value.dtype}, but the model needs {own[name].dtype}")
    with torch.no_grad():
        for name, value in read.items():
            own[name].copy_(value)


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
        read = {name: read_like(file, path, name, tensor) for name, tensor in wanted.items()}
        for name in sorted(names & tied.keys()):
            if not torch.equal(file.get_tensor(name), read[tied[name]]):
                raise DataError(
                    f"model file {path}: {name} and {tied[name]} differ, but the model has one tensor for both"
                )
    take_(wanted, read, path)


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
