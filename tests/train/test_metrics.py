"""Metrics of an own task: what they are computed from, in whatever form its batches come."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from peer.config.options import TrainingOptions
from peer.errors import DataError, TaskError
from peer.records import ACCURACY, Criterion
from peer.train.local_step import Trainer
from peer.train.metrics import F1, PERPLEXITY, RMSE
from peer.train.own_task import criteria_of
from peer.train.stacked import StackedTrainer
from peer.train.task import Task
from peer.train.tasks import resolve_task
from tests.train import measured_tasks
from tests.train.test_stacked import all_gradients

OPTIONS = TrainingOptions(batch_size=8, momentum="none", warmup_rounds=0)
FILE = Path(measured_tasks.__file__)


def regression(where: str = "") -> Task:
    return resolve_task("tests.train.measured_tasks:regression", {"where": where})


def trainer(task: Task, options: TrainingOptions = OPTIONS) -> Trainer:
    indices = np.arange(len(task.train_data()), dtype=np.int64)
    trainer = Trainer(task, options, rounds=100, seed=0, peer=0, train_indices=indices)
    trainer.try_own_task()
    return trainer


def test_a_regression_is_judged_by_its_first_metric_and_needs_no_accuracy() -> None:
    task = regression()
    assert criteria_of(task) == (
        Criterion("RMSE", "lower"),
        Criterion("test loss", "lower"),
        Criterion("perplexity", "lower"),
    )
    found = trainer(task).evaluate(np.array([2.0, -0.5], np.float32))
    error = (2 * measured_tasks.Lines(20).x - 0.5) - (3 * measured_tasks.Lines(20).x - 1)
    mean = float((error**2).mean())
    assert found.metrics["RMSE"] == pytest.approx(math.sqrt(mean), rel=1e-6)
    assert found.metrics["test loss"] == pytest.approx(mean, rel=1e-6)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)


def test_a_model_trains_on_batches_that_are_dicts_alone_and_stacked() -> None:
    task = regression()
    one = trainer(task)
    stacked = StackedTrainer(task, OPTIONS, rounds=100, seed=0, shards=[np.arange(64)])
    z = one.initial_vector()
    both = all_gradients(stacked, z[None], 0, 0.1).gradients[0]
    np.testing.assert_allclose(both, one.gradient(z, 0, 0.1, 0.1).gradient, rtol=1e-5, atol=1e-6)
    for t in range(100):
        z = z - np.float32(0.3) * one.gradient(z, t, 0.3, 0.3).gradient
    assert one.evaluate(z).metrics["RMSE"] < 0.1 < one.evaluate(one.initial_vector()).metrics["RMSE"]
    assert stacked.evaluate_one(0, z).metrics == one.evaluate(z).metrics


def test_a_classification_takes_dicts_as_keyword_arguments_and_has_both_figures() -> None:
    task = resolve_task("tests.train.measured_tasks:detector")
    assert criteria_of(task) == (Criterion("F1"), ACCURACY)
    one = trainer(task)
    z = one.initial_vector()
    for t in range(300):
        z = z - np.float32(0.5) * one.gradient(z, t, 0.5, 0.5).gradient
    found = one.evaluate(z)
    assert found.accuracy > 0.9
    with torch.no_grad():
        one.evaluate(z)  # The model now holds z.
        points, targets = measured_tasks.detector().test._tensors  # type: ignore[union-attr]
        predicted = one.model.eval()(points=points).argmax(1)
    both = int(((predicted == 1) & (targets == 1)).sum())
    assert found.metrics["F1"] == pytest.approx(2 * both / (int((predicted == 1).sum()) + int((targets == 1).sum())))


def test_figures_without_samples_or_beyond_floats_are_no_errors() -> None:
    assert F1.of({"true_positive": 0.0, "false_positive": 0.0, "false_negative": 0.0}) == 0.0
    assert PERPLEXITY.of({"loss": 1e6}) == math.inf
    assert RMSE.of({"squared_error": 0.25}) == 0.5


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("measure", f"KeyError: 'measure' ({FILE}:"),
        ("measure-list", "measure() returned an object of type list; it must return a dict of tensors"),
        ("measure-float", "measure() returned an object of type float as 'squared_error'; it must return tensors"),
        ("metric", f"KeyError: 'nothing' ({FILE}:"),
        ("metric-text", "the metric text is an object of type str, not a number"),
        ("keys", "batch() returned a batch with the keys x, y, z; those before had the keys x, y"),
    ],
)
def test_errors_in_metrics_and_batches_are_the_users_before_a_run_starts(where: str, sentence: str) -> None:
    if where == "keys":
        task = regression(where)
        with pytest.raises(TaskError, match="in your task: ") as caught:
            trainer(task).evaluate(np.zeros(2, np.float32))
    else:
        with pytest.raises(TaskError, match="in your task: ") as caught:
            trainer(regression(where))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ("list of names", "must be a tuple of sottovoce.Metric"),
        ("twice", "has a name twice"),
        ("accuracy", "uses 'accuracy'"),
        ("empty name", "has a name ''"),
        ("many", "has 17 entries; 16 are allowed"),
    ],
)
def test_metrics_that_are_none_are_refused(metrics: str, sentence: str) -> None:
    with pytest.raises(DataError, match=r"training\.task: the attribute metrics of what tests") as caught:
        resolve_task("tests.train.measured_tasks:wrong_metrics", {"metrics": metrics})
    assert sentence in str(caught.value)
