"""Memory for intermediate results, kept from step to step: fresh pages cost more than the kernels that fill them."""

from __future__ import annotations

import threading
from math import prod

import torch


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[tuple[str, torch.device], torch.Tensor] = {}


_blocks = _Blocks()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor that is good until this thread asks for the same name again.

    For results that are read at once (accumulators, operands of one product); what is kept or handed on gets memory
    of its own. All networks of a thread share the blocks.
    """
    size = prod(shape) * dtype.itemsize
    block = _blocks.by_name.get((name, device))
    if block is None or len(block) < size:
        block = torch.empty(size, dtype=torch.uint8, device=device)
        _blocks.by_name[name, device] = block
    return block[:size].view(dtype).view(shape)
