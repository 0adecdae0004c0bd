"""The random numbers of a training script: the global generators of torch, numpy and Python, as one value."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


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
