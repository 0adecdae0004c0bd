"""A task: a model, a loss and data. The one interface between Sottovoce and your own model.

Write a function that returns an object with these members and name it in the configuration as
`training.task = "package.module:make_task"`; `training.task_options` are its keyword arguments. See
`tests/examples/` for a complete one outside the package.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch


class Data(Protocol):
    """A data set that is held in memory or read on demand; indexing must be deterministic."""

    def __len__(self) -> int: ...

    @property
    def labels(self) -> torch.Tensor:
        """int64[m]: what the partition sorts by (class, or any integer kind of sample)."""
        ...

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the samples at `indices: int64[b]`, inputs first and targets last, stacked along dimension 0.

        An own task may use dicts of tensors in the place of tuples, with the same keys in all batches."""
        ...


@runtime_checkable
class Task(Protocol):
    """A learning problem."""

    name: str
    num_classes: int
    """Number of classes, for accuracy per class; 0 where the task is no classification."""

    def make_model(self) -> torch.nn.Module:
        """Return a new model. Its initial weights are drawn under a seed that the caller has set, so that all peers
        start from the same vector."""
        ...

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the mean loss of a batch, a scalar to differentiate."""
        ...

    def train_data(self) -> Data:
        """Return the training set."""
        ...

    def test_data(self) -> Data:
        """Return the common test set, for reports."""
        ...

    def correct(self, model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return bool[b]: which samples of the batch the model gets right. A task with an attribute `metrics` may do
        without."""
        ...

    def augment(self, batch: tuple[torch.Tensor, ...], uniforms: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the batch augmented for training; `uniforms: float32[b, 4]` in [0, 1) are the only randomness, a
        function of seed, sample and epoch. Return the batch unchanged where there is nothing to augment."""
        ...
