"""A task of language models: to say the next byte of texts, judged in nats a byte on held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from peer.train.data import Batch
from peer.train.datasets.documents import WindowData, read_windows
from peer.train.metrics import LOSS, PERPLEXITY, TEST_LOSS, Metric, figure_of, why_no_metrics

_AT_ONCE = 1 << 13
"""Bytes whose activations are in memory at once when a model is judged."""


class NextByte:
    """The task. A batch holds windows int64[b, n] and the number of the subfolder that each is of, int64[b]."""

    num_classes = 0
    correct: Any = None
    """No sample is right or wrong."""

    def __init__(
        self, name: str, model: Callable[[], torch.nn.Module], folders: Mapping[str, Sequence[Path]], length: int
    ) -> None:
        """`model` makes a new one. `folders` and `length` are as for `read_windows`, which reads the files when
        they are first needed."""
        self.name, self.make_model, self._folders, self._length = name, model, folders, length
        self.metrics: tuple[Metric, ...] = (TEST_LOSS, PERPLEXITY)
        for each in folders if len(folders) > 1 else ():
            # Those without room, or without a name for a table, are judged together only.
            more = (*self.metrics, Metric(each or ".", itemgetter(f"/{each}"), "lower"))
            if why_no_metrics(more) is None:
                self.metrics = more

    def with_one_folder(self) -> NextByte:
        """Return the task with all texts as those of one folder: devices with texts of their own have to be told the
        same figures, whatever their folders are called."""
        paths = [path for paths in self._folders.values() for path in paths]
        return NextByte(self.name, self.make_model, {"": paths}, self._length)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch, in nats a byte."""
        return _losses(model, batch[0]).mean()

    def measure(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the loss of each byte but the first of a window: of all, and by subfolder."""
        windows, folders = batch
        losses = torch.cat([_losses(model, part) for part in torch.split(windows, max(1, _AT_ONCE // self._length))])
        by_folder = {f"/{name}": losses[folders == number] for number, name in enumerate(self._folders)}
        return {LOSS: losses, **by_folder}

    def figures(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return each metric by its name, from the means of `measure`'s results."""
        return {metric.name: figure_of(metric, means) for metric in self.metrics}

    def train_data(self) -> WindowData:
        """Return the windows to train on."""
        return self._data[0]

    def test_data(self) -> WindowData:
        """Return the held-out windows."""
        return self._data[1]

    def augment(self, batch: Batch, uniforms: torch.Tensor) -> Batch:
        """Return the batch as it is."""
        return batch

    @cached_property
    def _data(self) -> tuple[WindowData, WindowData]:
        return read_windows(self._folders, self._length)


def _losses(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the loss of each byte but the first, in nats, float32[b, n − 1]."""
    logits = model(windows)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(
        len(windows), -1
    )
