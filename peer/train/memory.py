"""Alignment of tensors: operators may give other bits for operands that start on other bytes, so every tensor that the
local step reads lies in memory of its own that starts on 64 bytes."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

from peer.errors import ConfigError

ALIGNMENT = 64
"""Bytes. torch's allocators start every block on at least this many, on the CPU and on CUDA."""


def open_device(name: str) -> torch.device:
    """Return the torch device of that name. Raises ConfigError if this machine has none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            "is not a PyTorch device", key="peer.device", value=name, valid="cpu, cuda, cuda:1, …"
        ) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"PyTorch finds {count} CUDA devices on this machine",
                key="peer.device",
                value=name,
                valid="cpu" if not count else None,
            )
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ConfigError("is not supported; the local step runs on cpu or cuda", key="peer.device", value=name)
    return device


def own_memory_(model: torch.nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of the model into memory of their own on `device`; shared ones stay shared.
    Whatever else the user's code holds of them is not written to."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            own = torch.empty_like(tensor, device=device, memory_format=torch.preserve_format)
            own.copy_(tensor)
            assert own.data_ptr() % ALIGNMENT == 0
            tensor.data = own


_MALLOC_SETTINGS = {-1: -1, -2: 64 << 20, -4: 0, -8: 1}
"""M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX and M_ARENA_MAX of mallopt(3) → value: nothing is trimmed, no block is mapped
by itself, and all threads share one heap. No other one holds blocks of more than 64 MB."""


def keep_freed() -> None:
    """Keep memory that this process frees for its next round, unless its environment says how to allocate: otherwise
    each copy of a large model would pay for the faults of fresh pages, more than for the copy itself."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(AttributeError, OSError):
        for setting, value in _MALLOC_SETTINGS.items():
            ctypes.CDLL(None).mallopt(setting, value)


def give_back_freed() -> None:
    """Give memory that is free to the kernel, if the C library can do that. A peer keeps what it frees, for the next
    round; what its beginning took is of no use to any round."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def aligned(batch: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a batch on `device`, copied unless they start where they should and have no gaps."""
    return tuple(_aligned(tensor.to(device)) for tensor in batch)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.data_ptr() % ALIGNMENT == 0 and (
        tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    ):
        return tensor
    # clone() keeps the strides of a dense tensor and closes gaps.
    copy = tensor.clone()
    assert copy.data_ptr() % ALIGNMENT == 0
    return copy
