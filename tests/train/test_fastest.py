"""The choice of a precision, by times that the tests decide, and which precisions are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from peer.config.options import TrainingOptions
from peer.config.precision_choice import Precision
from peer.errors import ConfigError, DataError, TaskError
from peer.train.data import Classification
from peer.train.fastest import choose, fastest
from peer.train.layers import FULL_PRECISION, Layers
from peer.train.local_step import Trainer
from peer.train.own_task import OwnTask, UserCode
from peer.train.task import Task
from tests.train.small_tasks import points


class Clock:
    """Says the time that the steps have taken so far."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, seconds: Callable[[int], float], turn: int) -> None:
        self.now += seconds(turn)


def chosen(times: Mapping[Precision, float | Callable[[int], float]]) -> tuple[Precision, Mapping[Precision, float]]:
    clock = Clock()

    def step_of(taken: float | Callable[[int], float]) -> Callable[[int], None]:
        return partial(clock.step, taken if callable(taken) else lambda turn: taken)

    choice = choose({precision: step_of(taken) for precision, taken in times.items()}, clock)
    return choice.precision, choice.step_s


@pytest.mark.parametrize("least", ["float32", "bfloat16", "int8"])
def test_the_fastest_is_chosen_with_the_times_of_all(least: Precision) -> None:
    times: dict[Precision, float] = {"float32": 0.03, "bfloat16": 0.04, "int8": 0.05}
    times[least] = 0.02
    precision, step_s = chosen(times)
    assert precision == least
    assert step_s == pytest.approx(times)


def test_of_equals_it_is_the_first() -> None:
    assert chosen({"float32": 0.25, "int8": 0.25})[0] == "float32"


def test_single_turns_that_were_disturbed_do_not_count() -> None:
    precision, step_s = chosen({"float32": 0.02, "int8": lambda turn: 9.0 if turn % 3 == 2 else 0.01})
    assert precision == "int8"
    assert step_s["int8"] == pytest.approx(0.01)


def test_the_first_steps_warm_up() -> None:
    """They allocate, and networks in 8 bits measure ranges."""
    calls: list[int] = []

    def first_is_slow(turn: int) -> float:
        calls.append(turn)
        return 100.0 if len(calls) <= 2 else 0.01

    assert chosen({"float32": 0.02, "int8": first_is_slow})[0] == "int8"


@pytest.mark.parametrize(("seconds", "turns"), [(0.0001, 99), (0.1, 9), (10.0, 3)])
def test_slow_models_are_measured_less_often(seconds: float, turns: int) -> None:
    calls: list[int] = []

    def step(turn: int) -> float:
        calls.append(turn)
        return seconds

    chosen({"float32": step})
    assert len(calls) == 2 + turns


def network(layers: Layers = FULL_PRECISION) -> nn.Module:
    return layers.network({"hidden": layers.linear(2, 8), "relu": layers.relu(), "out": layers.linear(8, 3)})


def other_network(layers: Layers = FULL_PRECISION) -> nn.Module:
    """Another network where it is not in float32."""
    width = 8 if layers is FULL_PRECISION else 9
    return layers.network({"hidden": layers.linear(2, width), "relu": layers.relu(), "out": layers.linear(width, 3)})


def task_of(model: Callable[..., nn.Module]) -> Classification:
    task = points()
    task.model = model
    return task


class Float32Only(nn.Module):
    """Multiplies what a layer returns by a matrix in float32, which autocast does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self.layer(inputs)
        if out.dtype != torch.float32:
            raise TypeError("this model knows float32 only")
        return out


def opener(task: Task, **options: object) -> Callable[[Precision], Trainer]:
    def open_trainer(precision: Precision) -> Trainer:
        settings = TrainingOptions.model_validate({"precision": precision, "batch_size": 8, **options})
        return Trainer(task, settings, rounds=9, seed=0, peer=0, train_indices=np.arange(96))

    return open_trainer


def own(task: Classification) -> OwnTask:
    return OwnTask(task, UserCode("tests", lambda: task))


@pytest.mark.parametrize(
    ("task", "tried"),
    [
        pytest.param(points(), {"float32", "bfloat16"}, id="ordinary-layers"),
        pytest.param(task_of(network), {"float32", "bfloat16", "int8"}, id="layers-of-ours"),
        pytest.param(task_of(other_network), {"float32", "bfloat16"}, id="another-network-in-8-bits"),
        pytest.param(own(task_of(Float32Only)), {"float32"}, id="float32-only"),
    ],
)
def test_every_precision_is_tried_that_the_model_can_compute_in(task: Task, tried: set[str]) -> None:
    choice = fastest(opener(task))
    assert choice.step_s.keys() == tried
    assert choice.precision in tried


def test_local_steps_and_an_adjusted_loss_are_measured_as_they_are() -> None:
    assert "int8" in fastest(opener(task_of(network), local_steps=3, label_adjustment=True)).step_s


def test_what_is_wrong_in_float32_is_told() -> None:
    with pytest.raises(ConfigError, match=r"training\.only"):
        fastest(opener(points(), only=("nothing*",)))
    with pytest.raises(DataError, match="does not exist"):
        fastest(opener(points(), warm_start="nowhere.safetensors"))

    class Broken(Float32Only):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no step at all")

    with pytest.raises(TaskError, match="no step at all"):
        fastest(opener(own(task_of(Broken))))


def test_peers_in_different_precisions_compare_the_same_start() -> None:
    def digest(precision: Precision, alike: bool) -> str:
        return Trainer(
            task_of(network), TrainingOptions(precision=precision), rounds=9, seed=0, peer=0,
            train_indices=np.arange(96), alike_in_all_precisions=alike,
        ).start_model()  # fmt: skip

    assert len({digest(precision, True) for precision in ("float32", "bfloat16", "int8")}) == 1
    # Peers of one precision compare the ranges as well, as they always did.
    assert digest("int8", False) != digest("float32", False) == digest("float32", True)
