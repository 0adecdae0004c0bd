"""What a subclass of Classification replaces is what is trained and judged by, in each way of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from peer.config.options import TrainingOptions
from peer.train.data import Batch, Classification, crop_and_flip
from peer.train.layers import FULL_PRECISION, Layers
from peer.train.local_step import Trainer
from peer.train.metrics import TEST_LOSS
from peer.train.own_task import OwnTask, UserCode
from peer.train.private_step import SECRET_BYTES, GaussianMechanism
from peer.train.stacked import StackedTrainer
from peer.train.task import Task
from tests.train.small_tasks import points
from tests.train.test_stacked import all_gradients

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
        found = trainer.evaluate_one(0, trainer.initial_vector())
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


METHODS = sorted(
    name
    for name, value in vars(Classification).items()
    if callable(value) and not name.startswith("_") and name != "keeps"
)
"""All that a subclass may replace."""
UNUSED = {
    # One pass in the place of two, which a judge of its own takes over; private steps and 8 bits have no adjusted loss.
    "plain": {"adjusted_loss"},
    "adjusted": set(),
    "int8": {"adjusted_loss"},
    "private": {"adjusted_loss"},
    "stacked": {"adjusted_loss", "measure"},
    "not an own task": {"adjusted_loss", "measure"},
}
"""Way of training → what it has no use for."""


def overridden(name: str, how: str, calls: list[str]) -> Task:
    """Return a task that counts the calls of one of its methods."""

    def counted(self: Classification, *args: Any, **options: Any) -> Any:
        calls.append(name)
        return getattr(Classification, name)(self, *args, **options)

    if name == "make_model":
        # What takes no layers can make no model of 8 bits.
        def counted(self: Classification, layers: Layers = FULL_PRECISION) -> Any:
            calls.append(name)
            return Classification.make_model(self, layers)

    kind = type("Own", (Classification,), {name: counted})
    plain = points()
    task = kind(
        name="p",
        num_classes=3,
        model=lambda layers: layers.network({"1": layers.linear(2, 8), "2": layers.relu(), "3": layers.linear(8, 3)}),
        train=plain.train,
        test=plain.test,
        metrics=(TEST_LOSS,),
    )
    return task if how in ("not an own task", "stacked") else OwnTask(task, UserCode("tests"))


@pytest.mark.parametrize(
    # A loss of one's own cannot be adjusted by what belongs to another one; that is refused.
    ("name", "how"),
    [(name, how) for name in METHODS for how in UNUSED if (name, how) != ("loss", "adjusted")],
)
def test_each_method_of_a_subclass_is_called(name: str, how: str) -> None:
    calls: list[str] = []
    task, shard = overridden(name, how, calls), np.arange(20)
    options = TrainingOptions(
        batch_size=4,
        warmup_rounds=0,
        label_adjustment=how == "adjusted",
        precision="int8" if how == "int8" else "float32",
    )
    if how == "stacked":
        stacked = StackedTrainer(task, options, rounds=2, seed=0, shards=[shard, shard], how="stacked")
        z = np.stack([stacked.initial_vector()] * 2)
        all_gradients(stacked, z, 0, 1.0)
        stacked.evaluate_one(0, z[0])
    else:
        privacy = GaussianMechanism(1.0, 1.0, b"1" * SECRET_BYTES) if how == "private" else None
        trainer = Trainer(task, options, rounds=2, seed=0, peer=0, train_indices=shard, privacy=privacy)
        start = trainer.initial_vector()
        trainer.gradient(start, 0, 0.1, 1.0)
        trainer.evaluate(start)
    assert bool(calls) == (name not in UNUSED[how])


class OwnAugmentation(Classification):
    def augment(self, batch: Batch, uniforms: torch.Tensor) -> Batch:
        return negated(batch, uniforms)


def negated(batch: Batch, uniforms: torch.Tensor) -> Batch:
    inputs, *rest = batch
    return (-inputs, *rest)


@pytest.mark.parametrize("how", ["one", "stacked", "own"])
@pytest.mark.parametrize("shadowed", [None, crop_and_flip], ids=["no other", "another"])
def test_an_augmentation_of_its_own_is_trained_on(shadowed: Callable[..., Batch] | None, how: str) -> None:
    """As one that is given by a function is, whatever function was given beside."""
    own, given, plain = of(OwnAugmentation), of(Classification), of(Classification)
    own.augmentation, given.augmentation = shadowed, negated
    expected, unlike = gradient_of(given, how), gradient_of(plain, how)
    assert np.array_equal(gradient_of(own, how), expected)
    assert not np.array_equal(expected, unlike)


def gradient_of(task: Classification, how: str) -> npt.NDArray[np.float32]:
    options, shard = TrainingOptions(batch_size=4, warmup_rounds=0), np.arange(20)
    if how == "stacked":
        stacked = StackedTrainer(task, options, rounds=2, seed=0, shards=[shard, shard], how="stacked")
        return all_gradients(stacked, np.stack([stacked.initial_vector()] * 2), 0, 1.0).gradients
    inner: Task = OwnTask(task, UserCode("tests")) if how == "own" else task
    trainer = Trainer(inner, options, rounds=2, seed=0, peer=0, train_indices=shard)
    return trainer.gradient(trainer.initial_vector(), 0, 0.1, 1.0).gradient.copy()
