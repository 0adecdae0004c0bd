"""Metrics of an own task or script: figures of a test set beside accuracy, or in its place.

A task lists them in its attribute `metrics`, a script in the argument of that name of `sottovoce.join`. A task's method
`measure(model, batch)` returns tensors by name; a metric is computed from their means over all elements of the whole
test set. The mean loss is among them as "loss". A script's `evaluate(model)` returns sums and counts by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from peer.records import ACCURACY, Better, Criterion

Means = Mapping[str, float]
LOSS = "loss"
MOST_METRICS = 16
"""Most metrics of one task: notes to other peers hold no more figures."""
MOST_CHARACTERS = 24
"""Longest name: terminals and tables have no room for more."""


@dataclass(frozen=True)
class Metric:
    """One figure of a model on a test set, for the `metrics` of a task or of `join`."""

    name: str
    of: Callable[[Means], float] | None = None
    """Computes the figure from the means of what was measured, by name. None: it is the value of its own name."""
    better: Better = "higher"
    """Whether higher or lower values are better."""

    @property
    def criterion(self) -> Criterion:
        """The metric without how it is computed."""
        return Criterion(self.name, self.better)


def _exp(x: float) -> float:
    return math.inf if x >= 700.0 else math.exp(x)


def _f1(means: Means) -> float:
    errors = means["false_positive"] + means["false_negative"]
    both = 2.0 * means["true_positive"] + errors
    return 2.0 * means["true_positive"] / both if both else 0.0


TEST_LOSS = Metric("test loss", lambda means: means[LOSS], "lower")
"""The mean of the task's loss."""
PERPLEXITY = Metric("perplexity", lambda means: _exp(means[LOSS]), "lower")
"""e to the mean loss: for a loss that is the mean over the same number of tokens in each batch. Otherwise let `measure`
return the loss of each token as "loss"."""
RMSE = Metric("RMSE", lambda means: math.sqrt(means["squared_error"]), "lower")
"""`measure` returns "squared_error" of each number."""
F1 = Metric("F1", _f1)
"""`measure` returns "true_positive", "false_positive" and "false_negative" of each sample. 0 without any positive."""

UNDECLARED = (ACCURACY, TEST_LOSS.criterion)
"""The figures of a script that declares no metrics: models are compared by the first of them that it tells."""


@dataclass
class MeanValues:
    """Means over all elements of tensors that come batch by batch; added up in float64."""

    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Count the elements of each tensor."""
        for name, tensor in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(tensor.detach().sum(dtype=torch.float64))
            self._counts[name] = self._counts.get(name, 0) + tensor.numel()

    def means(self) -> dict[str, float]:
        """Return the mean by name; NaN where there was no element."""
        return {
            name: total / count if (count := self._counts[name]) else math.nan for name, total in self._sums.items()
        }


def figure_of(metric: Metric, means: Means) -> float:
    """Return a metric's figure. Raises KeyError for a mean that is not there, and whatever its `of` does."""
    return means[metric.name] if metric.of is None else metric.of(means)


def why_no_metrics(metrics: object) -> str | None:
    """Return the fault of a task's attribute `metrics`; None if it has none."""
    if not isinstance(metrics, tuple | list) or not all(isinstance(metric, Metric) for metric in metrics):
        return "must be a tuple of sottovoce.Metric"
    if wrong := [metric.better for metric in metrics if metric.better not in ("higher", "lower")]:
        return f'has better={wrong[0]!r}; valid: "higher", "lower"'
    names = [metric.name for metric in metrics]
    for name in names:
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name.strip()) == len(name) <= MOST_CHARACTERS):
            return f"has a name {name!r}; names have 1 to {MOST_CHARACTERS} printable characters"
    if len({*names, ACCURACY.name}) != len(names) + 1:
        return f"has a name twice, or uses {ACCURACY.name!r}, which `correct` is for: {', '.join(names)}"
    if len(names) > MOST_METRICS:
        return f"has {len(names)} entries; {MOST_METRICS} are allowed"
    return None


def metrics_of(task: object) -> tuple[Metric, ...]:
    """Return the task's own metrics, the one that it is judged by first."""
    return tuple(getattr(task, "metrics", ()))
