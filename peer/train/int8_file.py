"""Models with 8-bit weights on disk, a quarter of the size, for inference in 8 bits.

The file is safetensors. For each parameter NAME of two dimensions or more it holds `NAME` as int8 codes and
`NAME.scale` as one float32: the number is code · scale, and codes go from −127 to 127. Everything else is as in a file
of full precision: biases and norms float32, and the running ranges of activations, from one pass over training samples
(`peer.train.statistics`). The metadata says `format: sottovoce-int8-1`, and which task.

Codes are those that the layers of `peer.train.eight_bit` take from the float32 weights, so that a model from such a
file computes what the 8-bit model that was written did. It holds the codes alone, a quarter of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from peer.errors import DataError
from peer.train.eight_bit.stored import SCALE_SUFFIX, store_
from peer.train.model_file import named_tensors, open_tensors, read_like, take_, write_tensors
from peer.train.precision import make_model
from peer.train.task import Task

FORMAT = "sottovoce-int8-1"
LARGEST = 127


def save_int8(model: torch.nn.Module, path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write an 8-bit model, beside the final name first."""
    tensors = {}
    own = named_tensors(model)
    for name, tensor in own.items():
        value = tensor.detach().cpu()
        stored = name.removesuffix(SCALE_SUFFIX)
        if _has_codes(tensor):
            codes, scale = quantized(value)
            tensors[name], tensors[f"{name}.scale"] = codes, torch.tensor([scale], dtype=torch.float32)
        elif stored != name and stored in own and own[stored].dtype == torch.int8:
            tensors[f"{stored}.scale"] = value
        else:
            tensors[name] = value.contiguous()
    write_tensors(tensors, path, metadata={**(metadata or {}), "format": FORMAT})


def load_int8(task: Task, path: Path) -> torch.nn.Module:
    """Return the task's model with the weights and ranges of a file, in 8 bits, for inference only: there are no
    float32 weights to train.

    Raises DataError if the file is not one that `sotto export --int8` wrote of such a model, ConfigError if the task
    cannot compute in 8 bits.
    """
    model = make_model(task, "int8")
    wanted = named_tensors(model)
    read: dict[str, torch.Tensor] = {}
    coded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with open_tensors(path) as file:
        if (file.metadata() or {}).get("format") != FORMAT:
            raise DataError(f"model file {path} is not of the format {FORMAT}")
        names = set(file.keys())
        for name, tensor in wanted.items():
            parts = (name, f"{name}.scale") if _has_codes(tensor) else (name,)
            lacking = [part for part in parts if part not in names]
            if lacking:
                raise DataError(f"model file {path} lacks {', '.join(lacking)}")
            value = read_like(file, path, name, tensor)
            if len(parts) == 2:
                coded[name] = _checked(path, name, value, file.get_tensor(parts[1]))
            else:
                read[name] = value
    take_(wanted, read, path)
    for name, (codes, scale) in coded.items():
        module, _, own = name.rpartition(".")
        store_(model.get_submodule(module), own, codes, scale)
    return model.eval()


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the codes int8[...] of a weight and their scale."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    inverse = LARGEST / largest if largest > 0.0 else 0.0
    return torch.round(weight * inverse).clamp(-LARGEST, LARGEST).to(torch.int8), largest / LARGEST


def _has_codes(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.ndim >= 2


def _checked(path: Path, name: str, codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if codes.dtype != torch.int8 or scale.dtype != torch.float32 or scale.numel() != 1 or not 0 <= scale.item() < 1e30:
        raise DataError(
            f"model file {path}: {name} has type {codes.dtype} and scale {scale.tolist()}; expected int8 codes"
        )
    return codes, scale
