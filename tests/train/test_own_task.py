"""What a user's own task raises is told as an error of the task, with the line; what built-in tasks raise is a bug."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from peer.config.options import TrainingOptions
from peer.errors import ConfigError, DataError, TaskError
from peer.train.data import Classification
from peer.train.local_step import Trainer
from peer.train.own_task import inner_task
from peer.train.stacked import StackedTrainer
from peer.train.task import Task
from peer.train.tasks import resolve_task
from tests.train import broken_tasks
from tests.train.small_tasks import points
from tests.train.test_stacked import all_gradients

FILE = Path(broken_tasks.__file__)
EVERYTHING = np.arange(64, dtype=np.int64)
OPTIONS = TrainingOptions(batch_size=8, momentum="none")


def line_of(text: str) -> int:
    """Return the number of the one line of the module with this text."""
    (number,) = (n for n, line in enumerate(FILE.read_text().splitlines(), 1) if text in line)
    return number


def raised_in(where: str) -> int:
    return line_of(f'raise KeyError("{where}")')


def broken(where: str) -> Task:
    return resolve_task("tests.train.broken_tasks:make_task", {"where": where})


def start(task: Task, *, indices: np.ndarray = EVERYTHING, options: TrainingOptions = OPTIONS) -> Trainer:
    """Return the trainer of a task that was tried."""
    trainer = Trainer(task, options, rounds=4, seed=0, peer=0, train_indices=indices)
    trainer.try_own_task()
    return trainer


@pytest.mark.parametrize(
    ("where", "function"),
    [
        ("make_task", "make_task"),
        ("model", "Model.__init__"),
        ("forward", "Model.forward"),
        ("backward", "BackwardFails.backward"),
        ("loss", "Broken.loss"),
        ("len", "Samples.__len__"),
        ("labels", "Samples.labels"),
        ("batch", "Samples.batch"),
        ("train_data", "Broken.train_data"),
        ("test_data", "Broken.test_data"),
        ("augment", "Broken.augment"),
        ("correct", "Broken.correct"),
    ],
)
def test_what_own_code_raises_is_told_with_its_line(where: str, function: str):
    with pytest.raises(TaskError) as caught:
        start(broken(where))
    place = f"{FILE}:{raised_in(where)}, in {function}"
    assert str(caught.value) == f"in your task: KeyError: '{where}' ({place})"
    assert isinstance(caught.value.__cause__, KeyError), "the cause has the whole traceback"


def test_what_an_adjusted_loss_raises_is_told_with_its_line():
    adjusting = OPTIONS.model_copy(update={"label_adjustment": True})
    with pytest.raises(TaskError, match=rf"{FILE}:{raised_in('adjusted_loss')}, in Broken"):
        start(broken("adjusted_loss"), options=adjusting)
    with pytest.raises(TaskError, match=r"adjusted_loss\(\) returned a tensor float32\[1\]; it must return a scalar"):
        start(broken("adjusted_loss-vector"), options=adjusting)


def test_an_exit_in_own_code_does_not_end_a_peer_as_a_success():
    with pytest.raises(TaskError, match="in your task: SystemExit: exit"):
        broken("exit")


def test_an_error_in_none_of_the_users_lines_names_the_function_that_makes_the_task():
    with pytest.raises(TaskError) as caught:
        start(resolve_task("tests.train.broken_tasks:misfit"))
    assert re.search(r"RuntimeError: mat1 and mat2 shapes cannot be multiplied", str(caught.value))
    made = f"none of your own lines was running; the task is made in {FILE}:{line_of('def misfit()')}"
    assert made in str(caught.value)


@pytest.mark.parametrize(
    ("where", "sentence", "function"),
    [
        ("loss-vector", "loss() returned a tensor float32[3]; it must return a scalar tensor", "loss"),
        ("loss-float", "loss() returned an object of type float; it must return a scalar tensor", "loss"),
        ("loss-detached", "the loss depends on none of the parameters that are trained", "loss"),
        ("loss-of-nothing", "the loss depends on none of the parameters that are trained", "loss"),
        ("loss-nan", "the loss of the first batch is nan", "loss"),
        ("correct-mean", "correct() returned a tensor float32[]; it must return one bool per sample", "correct"),
        ("correct-numpy", "correct() returned an object of type ndarray; it must", "correct"),
        ("batch-tensor", "batch() returned a tensor float32[8, 2]; it must return a tuple or dict of tensors", "batch"),
        ("batch-numpy", "batch() returned a tuple with an object of type ndarray in it; it must return", "batch"),
        ("augment-none", "augment() returned None; it must return a tuple or dict of tensors", "augment"),
    ],
)
def test_what_own_code_must_not_return_is_told_with_the_function(where: str, sentence: str, function: str):
    with pytest.raises(TaskError) as caught:
        start(broken(where))
    assert str(caught.value).startswith(f"in your task: {sentence}")
    assert str(caught.value).endswith(f"({FILE}:{line_of(f'def {function}(')})")


@pytest.mark.parametrize(
    ("where", "sentence"),
    [("labels-list", "are no tensor on the CPU"), ("labels-float", r"labels torch.float32\[64\]")],
)
def test_labels_that_are_none_are_refused(where: str, sentence: str):
    with pytest.raises(DataError, match=sentence):
        start(broken(where))


def test_errors_that_own_code_raises_on_purpose_and_interrupts_pass_unchanged():
    with pytest.raises(ConfigError, match=r"^training\.task_options\.lamps: too few lamps$"):
        start(broken("loss-refuses"))
    with pytest.raises(KeyboardInterrupt):
        start(broken("interrupt"))


def test_a_bug_of_a_built_in_task_stays_a_bug(monkeypatch: pytest.MonkeyPatch):
    def fails(*arguments: object) -> torch.Tensor:
        raise KeyError("ours")

    monkeypatch.setattr(Classification, "loss", fails)
    for name in ("digits", "peer.train.tasks:digits"):
        task = resolve_task(name)
        trainer = Trainer(task, OPTIONS, rounds=4, seed=0, peer=0, train_indices=EVERYTHING)
        trainer.try_own_task()
        with pytest.raises(KeyError, match="ours"):
            trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1)


def test_the_trial_leaves_nothing_behind():
    tried = start(broken(""))
    fresh = Trainer(broken(""), OPTIONS, rounds=4, seed=0, peer=0, train_indices=EVERYTHING)
    assert tried.state().keys() == fresh.state().keys()
    for name, value in fresh.state().items():
        np.testing.assert_array_equal(tried.state()[name], value)
    z = fresh.initial_vector()
    np.testing.assert_array_equal(tried.vector(), z)
    np.testing.assert_array_equal(tried.gradient(z, 0, 0.1, 0.1).gradient, fresh.gradient(z, 0, 0.1, 0.1).gradient)


def test_an_own_task_is_recognized_as_what_it_is(monkeypatch: pytest.MonkeyPatch):
    """The wrapper takes no features from a classification: one pass to judge, 8 bits, logit adjustment."""
    made = points()
    made.precision = "bfloat16"
    monkeypatch.setattr(broken_tasks, "misfit", lambda: made)
    task = resolve_task("tests.train.broken_tasks:misfit")
    assert inner_task(task) is made
    skewed = np.flatnonzero(task.train_data().labels.numpy() < 2)
    options = OPTIONS.model_copy(update={"label_adjustment": True})
    wrapped, plain = (Trainer(each, options, rounds=4, seed=0, peer=0, train_indices=skewed) for each in (task, made))
    z = plain.initial_vector()
    np.testing.assert_array_equal(wrapped.gradient(z, 0, 0.1, 0.1).gradient, plain.gradient(z, 0, 0.1, 0.1).gradient)
    assert wrapped.evaluate(z).loss == plain.evaluate(z).loss
    assert wrapped.state().keys() == plain.state().keys()


@pytest.mark.parametrize(
    ("where", "how", "sentence"),
    [
        ("loss", "stacked", r"in your task: KeyError: 'loss' \(.*broken_tasks\.py:\d+, in Broken\.loss\)"),
        ("backward", "one by one", r"in your task: KeyError: 'backward' \(.*broken_tasks\.py:\d+, in Backward"),
        ("vmap", "stacked", r"cannot be computed for all peers as one batch; .*\(vmap"),
    ],
)
def test_a_stacked_simulation_tells_the_same(where: str, how: str, sentence: str, monkeypatch: pytest.MonkeyPatch):
    # Running statistics are written in place, which vmap refuses before anything else.
    monkeypatch.setattr(nn, "BatchNorm1d", lambda size: nn.Identity())
    shards = np.split(EVERYTHING, 2)
    stacked = StackedTrainer(broken(where), OPTIONS, rounds=4, seed=0, shards=shards, how=how)
    z = np.tile(stacked.initial_vector(), (2, 1))
    with pytest.raises(DataError, match=sentence):
        all_gradients(stacked, z, 0, 0.1)
