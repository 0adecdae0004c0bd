"""What a script's `evaluate` returns, and the figures in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from peer.errors import UsageError
from peer.records import ACCURACY, Criterion
from peer.train.evaluation import Evaluation
from peer.train.metrics import LOSS, TEST_LOSS, UNDECLARED, Metric, figure_of, why_no_metrics

Number: TypeAlias = float | torch.Tensor
Measured: TypeAlias = tuple[Number, Number] | Mapping[str, tuple[Number, Number] | Number]
Measure: TypeAlias = Callable[[nn.Module], Measured]


class Measures:
    """The figures of a script, by its metrics."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        """Raises UsageError for metrics that are none."""
        if (problem := why_no_metrics(metrics)) is not None:
            raise UsageError(f"metrics {problem}")
        self._metrics = tuple(metrics)

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The figures that the script may tell, the one that models are compared by first."""
        return (*(metric.criterion for metric in self._metrics), ACCURACY) if self._metrics else UNDECLARED

    def of(self, found: object) -> Evaluation:
        """Return the figures in a result of `evaluate`. Raises UsageError for one that it must not return."""
        values = found if isinstance(found, Mapping) else {ACCURACY.name: found}
        right, total = 0, 0
        if ACCURACY.name in values:
            right, total = _right_of_total(values[ACCURACY.name])
        means = {name: _mean(name, value) for name, value in values.items()}
        metrics = self._metrics
        if not metrics:
            for name in means.keys() - {ACCURACY.name, LOSS}:
                raise UsageError(
                    f"evaluate returned {name!r}, and nothing says which values of it are better; declare it:"
                    f" join(…, metrics=[sottovoce.Metric({name!r}, better='higher')]), or better='lower'"
                )
            metrics = (TEST_LOSS,) if LOSS in means else ()
        figures = {metric.name: _figure(metric, means) for metric in metrics}
        return Evaluation(np.array([right], np.int64), np.array([total], np.int64), means.get(LOSS), figures)


def _figure(metric: Metric, means: Mapping[str, float]) -> float:
    try:
        return float(figure_of(metric, means))
    except KeyError as error:
        problem = f"is computed from {error}, which evaluate did not return"
    except (TypeError, ValueError):
        problem = "is no number"
    raise UsageError(f"the metric {metric.name!r} {problem}")


def _mean(name: object, value: object) -> float:
    """Return the mean that (sum, count) stands for, NaN of no samples; a number that is no mean as it is."""
    try:
        total, count = value if isinstance(value, tuple | list) else (value, 1)
        if not isinstance(name, str) or isinstance(total, str) or not 0 <= float(count) < math.inf:
            raise ValueError
        return float(total) / float(count) if count else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(
            f"evaluate returned {value!r} as {name!r}; it must return, by name, (sum, count), or one number where a"
            " figure is no mean"
        ) from None


def _right_of_total(found: object) -> tuple[int, int]:
    """Return the numbers of right samples and of all. Raises UsageError if they are not: a fraction would be told to
    all as 0."""
    try:
        right, total = found if isinstance(found, tuple) else ()
        whole = int(right), int(total)
        # Sums of floats are whole, but 1.0 of 1.0 is an accuracy.
        is_count = whole == (right, total) and (not isinstance(total, float) or total > 1)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        is_count = False
    if not is_count or not 0 <= whole[0] <= whole[1]:
        raise UsageError(
            f"evaluate returned {found!r}; it must return (right, total), two whole numbers: how many test samples the"
            " model gets right, and of how many; or sums and counts by name, such as {'loss': (sum, count)}"
        )
    return whole
