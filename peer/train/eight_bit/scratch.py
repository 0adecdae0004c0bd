"""Memory for intermediate results, kept from step to step: fresh pages cost more than the kernels that fill them."""

from __future__ import annotations

import threading
from math import prod

import torch

_MOST_VIEWS = 1024


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[tuple[str, torch.device], torch.Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...], torch.dtype, torch.device], torch.Tensor] = {}
        """Views of these blocks. Making one takes longer than a small kernel."""


_blocks = _Blocks()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor that is good until this thread asks for the same name again.

    For results that are read at once (accumulators, operands of one product); kept results, and those handed on, get
    memory of their own. All networks of a thread share the blocks.
    """
    view = _blocks.views.get((name, shape, dtype, device))
    if view is None:
        size = prod(shape) * dtype.itemsize
        block = _blocks.by_name.get((name, device))
        if block is None or block.numel() < size:
            # Views would keep the smaller block alive.
            _blocks.views = {key: known for key, known in _blocks.views.items() if (key[0], key[3]) != (name, device)}
            block = torch.empty(size, dtype=torch.uint8, device=device)
            _blocks.by_name[name, device] = block
        if len(_blocks.views) == _MOST_VIEWS:
            _blocks.views.clear()
        view = block[:size].view(dtype).view(shape)
        _blocks.views[name, shape, dtype, device] = view
    return view
