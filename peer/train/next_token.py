"""A task of language models: to say the next token of texts, judged in nats a byte on held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from peer.train.data import Batch
from peer.train.datasets.documents import BYTES, Encoding, WindowData, read_windows
from peer.train.metrics import LOSS, PERPLEXITY, TEST_LOSS, Metric, figure_of, why_no_metrics

_AT_ONCE = 1 << 21
"""Most logits in memory at once when a model is judged, unless one window has more."""


class NextToken:
    """The task. A batch holds windows int64[b, n] and the number of the subfolder that each is of, int64[b]."""

    num_classes = 0
    correct: Any = None
    """No sample is right or wrong."""

    def __init__(
        self,
        name: str,
        model: Callable[[], torch.nn.Module],
        folders: Mapping[str, Sequence[Path]],
        length: int,
        encoding: Encoding = BYTES,
    ) -> None:
        """`model` makes a new one. `folders`, `length` and `encoding` are as for `read_windows`, which reads the files
        when they are first needed."""
        self.name, self.make_model, self._folders = name, model, folders
        self._length, self._encoding = length, encoding
        self.meaning = {"tokens": encoding.names} if encoding.names else {}
        self.metrics: tuple[Metric, ...] = (TEST_LOSS, PERPLEXITY)
        for each in folders if len(folders) > 1 else ():
            # Those without room, or without a name for a table, are judged together only.
            more = (*self.metrics, Metric(each or ".", itemgetter(f"/{each}"), "lower"))
            if why_no_metrics(more) is None:
                self.metrics = more

    def with_one_folder(self) -> NextToken:
        """Return the task with all texts as those of one folder: devices with texts of their own have to be told the
        same figures, whatever their folders are called."""
        paths = [path for paths in self._folders.values() for path in paths]
        return NextToken(self.name, self.make_model, {"": paths}, self._length, self._encoding)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch, in nats a token."""
        return _losses(model, batch[0]).mean()

    def measure(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the loss of each token but the first of a window, as nats a byte: of all, and by subfolder. A token
        stands for as many bytes as it does in the mean of the held-out texts."""
        windows, folders = batch
        at_once = max(1, _AT_ONCE // (self._length * self._encoding.size))
        losses = torch.cat([_losses(model, part) for part in torch.split(windows, at_once)])
        *rates, rate = self.test_data().tokens_per_byte
        by_folder = {f"/{name}": rates[number] * losses[folders == number] for number, name in enumerate(self._folders)}
        return {LOSS: rate * losses, **by_folder}

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
        return read_windows(self._folders, self._length, self._encoding)


def _losses(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token but the first, in nats, float32[b, n − 1]."""
    logits = model(windows)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(
        len(windows), -1
    )
