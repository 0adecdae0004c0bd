"""By which figure the models of a run are compared: accuracy, or the first metric of an own task."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Criterion:
    """A figure, and which values of it are better."""

    name: str
    better: Better = "higher"

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst of at least one value; NaN is worse than any other."""
        return min(values, key=self.rank)

    def rank(self, value: float) -> float:
        """Return a number that is larger for a better value."""
        if math.isnan(value):
            return -math.inf
        return value if self.better == "higher" else -value


ACCURACY = Criterion("accuracy")
"""The fraction of the samples that a model gets right: what tasks without metrics of their own are judged by."""
