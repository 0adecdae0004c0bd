"""The loss and the rule of a subclass of Classification are those that models are judged by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from peer.config import TrainingOptions
from peer.train.data import Batch, Classification
from peer.train.local_step import Trainer
from peer.train.metrics import TEST_LOSS
from peer.train.own_task import OwnTask, UserCode
from peer.train.stacked import StackedTrainer
from peer.train.task import Task
from tests.train.small_tasks import points

SAMPLES = len(points().test_data())


class OwnLoss(Classification):
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return 100 + 0 * super().loss(model, batch)


class OwnRule(Classification):
    def correct(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return torch.ones(len(batch[-1]), dtype=torch.bool)


class Both(OwnLoss, OwnRule):
    pass


class OwnJudge(Classification):
    def judge(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(100.0), torch.ones(len(batch[-1]), dtype=torch.bool)


def of(kind: type[Classification]) -> Classification:
    plain = points()
    return kind(name="p", num_classes=3, model=plain.model, train=plain.train, test=plain.test, metrics=(TEST_LOSS,))


def with_a_rule_of_its_own() -> Classification:
    task = of(Classification)
    task.correct = OwnRule.correct.__get__(task)  # type: ignore[method-assign]
    return task


def judged(task: Task, how: str) -> tuple[float, float]:
    """Return the loss and the accuracy that models of the task are told to have."""
    options, shard = TrainingOptions(batch_size=4, warmup_rounds=0), np.arange(20)
    if how == "stacked":
        trainer = StackedTrainer(task, options, rounds=2, seed=0, shards=[shard, shard], how="stacked")
        start = trainer.initial_vector()
        (found, _) = trainer.evaluate(np.stack([start, start]))
    else:
        single = Trainer(task, options, rounds=2, seed=0, peer=0, train_indices=shard)
        found = single.evaluate(single.initial_vector())
    assert found.total.sum() == SAMPLES
    return found.loss, found.accuracy


@pytest.mark.parametrize("how", ["one", "stacked", "own"])
@pytest.mark.parametrize(
    ("make", "loss", "accuracy"),
    [
        (lambda: of(OwnLoss), 100.0, None),
        (lambda: of(OwnRule), None, 1.0),
        (lambda: of(Both), 100.0, 1.0),
        (lambda: of(OwnJudge), 100.0, 1.0),
        (with_a_rule_of_its_own, None, 1.0),
    ],
    ids=["loss", "correct", "both", "judge", "of one object"],
)
def test_models_are_judged_by_the_rules_of_the_task(
    make: Callable[[], Classification], loss: float | None, accuracy: float | None, how: str
) -> None:
    def inner(task: Classification) -> Task:
        return OwnTask(task, UserCode("tests")) if how == "own" else task

    plain = judged(inner(of(Classification)), how)
    assert plain[0] < 2
    assert plain[1] < 1
    expected = plain[0] if loss is None else loss, plain[1] if accuracy is None else accuracy
    assert judged(inner(make()), how) == pytest.approx(expected, rel=1e-6)
