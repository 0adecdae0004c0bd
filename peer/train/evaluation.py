"""Quality of a model on samples: those it gets right, the mean loss, and the metrics of an own task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from peer.train.data import Batch, Classification
from peer.train.memory import aligned
from peer.train.metrics import LOSS, MeanValues
from peer.train.moving import buffers_kept
from peer.train.next_token import NextToken
from peer.train.own_task import OwnTask, errors_of, inner_task
from peer.train.task import Data, Task

Values: TypeAlias = Mapping[str, torch.Tensor]

EVALUATION_BATCH = 256
"""Samples of a batch in evaluation: fixed, so that the sums do not depend on settings."""


@dataclass(frozen=True)
class Evaluation:
    """Number of samples of each class that a model gets right."""

    correct: npt.NDArray[np.int64]
    """int64[classes]; one entry where the task has no classes."""
    total: npt.NDArray[np.int64]
    loss: float | None
    """Mean over the samples; None where there are none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The task's own, by name."""

    @property
    def accuracy(self) -> float:
        """Fraction in [0, 1]; NaN where there are no samples."""
        return float(self.correct.sum() / self.total.sum()) if self.total.any() else math.nan


def evaluate_model(
    task: Task, model: torch.nn.Module, data: Data, indices: npt.NDArray[np.int64], device: torch.device
) -> Evaluation:
    """Return how a model in training mode does on the samples at `indices`; it is left as it was."""
    classes = max(1, task.num_classes)
    correct, total = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    loss, own_values = 0.0, MeanValues()
    model.eval()
    try:
        # An own model may write to its buffers even in evaluation.
        with torch.no_grad(), buffers_kept(model):
            for start in range(0, len(indices), EVALUATION_BATCH):
                part = torch.from_numpy(indices[start : start + EVALUATION_BATCH])
                batch = aligned(data.batch(part), device)
                batch_loss, right, values = _judged(task, model, batch)
                labels = class_labels(task, data, part)
                correct += np.bincount(labels[right.cpu().numpy()], minlength=classes)
                total += np.bincount(labels, minlength=classes)
                loss += float(batch_loss) * len(part)
                own_values.add(values)
    finally:
        model.train()
    if not len(indices):
        return Evaluation(correct, total, None)
    loss /= len(indices)
    means = {LOSS: loss, **own_values.means()}
    figures = task.figures(means) if isinstance(task, OwnTask | NextToken) else {}
    return Evaluation(correct, total, loss, figures)


def _judged(task: Task, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Values]:
    """Return the mean loss, bool[b], which samples are right, and the values of the task's metrics.

    Classifications take one forward pass for the first two, unless a subclass has a rule of its own for one of them;
    one pass gives the loss and the values where no sample is right or wrong.
    """
    if isinstance(task, NextToken):
        values = task.measure(model, batch)
        return values[LOSS].mean(), torch.zeros(len(batch[0]), dtype=torch.bool), values
    kind = inner_task(task)
    if isinstance(kind, Classification) and (kind.keeps("loss", "correct") or not kind.keeps("judge")):
        with errors_of(task):
            found = kind.judge(model, task.form.own(batch) if isinstance(task, OwnTask) else batch)
    else:
        found = task.loss(model, batch), task.correct(model, batch)
    return *found, task.measure(model, batch) if isinstance(task, OwnTask) and task.metrics else {}


def class_labels(task: Task, data: Data, indices: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the class of each sample, int64[b]; all 0 where the task has no classes."""
    if not task.num_classes:
        return np.zeros(len(indices), np.int64)
    labels: npt.NDArray[np.int64] = data.labels[indices].numpy()
    return labels
