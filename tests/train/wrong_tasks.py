"""Tasks as a beginner might write them."""

from __future__ import annotations

from peer.train.task import Task


class WithoutLoss:
    """Lacks what training needs."""

    name = "half"
    num_classes = 2


def without_loss() -> WithoutLoss:
    return WithoutLoss()


def that_fails() -> Task:
    raise RuntimeError("the sensor is not plugged in")
