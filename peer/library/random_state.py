"""The random numbers of a training script: the global generators of torch, numpy and Python, as one value."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from peer.train.local_step import operator_seed, start_seed


def draw_alike(seed: int) -> None:
    """Seed torch by the seed of the run, before a script begins: one that sets no seed builds the same model on all
    peers."""
    torch.manual_seed(start_seed(seed))


def draw_apart(seed: int, peer: int) -> None:
    """Let torch draw numbers of this peer's own behind the model, as for shuffling and dropout, unless the script has
    set a seed since `draw_alike`."""
    if torch.initial_seed() == start_seed(seed):
        torch.manual_seed(operator_seed(seed, peer, 0, 0))


class RandomNumbers:
    """The global generators that a script may draw from."""

    def __init__(self, devices: Collection[torch.device] = ()) -> None:
        """`devices`: where the model is."""
        self._cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})

    def state(self) -> dict[str, Any]:
        """Return where the generators are: plain values, arrays and tensors."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
            "torch": torch.get_rng_state(),
            "cuda": {index: torch.cuda.get_rng_state(index) for index in self._cuda},
        }

    def set(self, state: Mapping[str, Any]) -> None:
        """Put the generators where they were; those of a GPU only if the model is there again."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        for index in self._cuda:
            if index in state["cuda"]:
                torch.cuda.set_rng_state(state["cuda"][index], index)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the generators as they were, despite draws inside."""
        state = self.state()
        try:
            yield
        finally:
            self.set(state)
