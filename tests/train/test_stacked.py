"""Stacked peers equal peers trained one by one, within float32 rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from peer.config.options import TrainingOptions
from peer.errors import DataError
from peer.records import ADAPTIVE
from peer.train import stacked as stacked_module
from peer.train.data import Classification, TensorData
from peer.train.full_precision.norms import Norm
from peer.train.local_step import Trainer
from peer.train.models.mlp import logistic
from peer.train.models.resnet import resnet20
from peer.train.stacked import StackedStep, StackedTrainer
from peer.train.task import Task
from peer.train.tasks import resolve_task
from tests.train.small_tasks import images, points


def options(**changes: object) -> TrainingOptions:
    settings = {"momentum": "nesterov", "batch_size": 8, "warmup_rounds": 0, "weight_decay": 1e-3} | changes
    return TrainingOptions(**settings)


def shards_of(task: Task, num_peers: int) -> list[np.ndarray]:
    """Overlapping shards of different sizes."""
    numbers = np.random.default_rng(5)
    size = len(task.train_data())
    return [np.sort(numbers.permutation(size)[: 9 + 2 * peer]).astype(np.int64) for peer in range(num_peers)]


def both(
    task: Task, chosen: TrainingOptions, num_peers: int, *, how: str = "stacked", seed: int = 3
) -> tuple[StackedTrainer, list[Trainer]]:
    shards = shards_of(task, num_peers)
    stacked = StackedTrainer(task, chosen, rounds=20, seed=seed, shards=shards, how=how)
    single = [
        Trainer(task, chosen, rounds=20, seed=seed, peer=peer, train_indices=shards[peer]) for peer in range(num_peers)
    ]
    return stacked, single


def all_gradients(stacked: StackedTrainer, z: np.ndarray, t: int, z_steps: np.ndarray | float) -> StackedStep:
    """Return the local steps of round t of all peers, group after group."""
    z_steps = np.broadcast_to(np.asarray(z_steps, np.float32), len(z))
    parts = [slice(group.start, group.stop) for group in stacked.groups]
    steps = [stacked.gradients_of_group(number, z[part], t, z_steps[part]) for number, part in enumerate(parts)]
    losses = np.concatenate([step.losses for step in steps])
    return StackedStep(np.concatenate([step.gradients for step in steps]), losses, steps[0].samples)


Deviation: TypeAlias = Callable[[int, np.ndarray, int], float]
"""(peer, z, t) → how far two computations of the direction G of a round from z may lie apart, in any number. Called
once for each peer and round, in order."""


def assert_equal_training(
    stacked: StackedTrainer, single: Sequence[Trainer], rounds: int, tolerance: float | Deviation
) -> None:
    """Compare what both make of some rounds, each from the same z; a tolerance is a part of the largest number."""
    start = stacked.initial_vector()
    assert np.array_equal(start, single[0].initial_vector())
    assert stacked.layout == single[0].layout
    # Different points, so that a mixed-up row shows.
    numbers = np.random.default_rng(6)
    z = (start + 0.05 * numbers.normal(size=(len(single), start.size))).astype(np.float32)
    steps = np.linspace(0.05, 0.1, len(single)).astype(np.float32)
    for t in range(rounds):
        rate = stacked.rate(t)
        assert rate == single[0].rate(t)
        together = all_gradients(stacked, z, t, steps)
        for i, trainer in enumerate(single):
            step = trainer.gradient(z[i], t, rate, float(steps[i]))
            allowed = tolerance(i, z[i], t) if callable(tolerance) else tolerance * np.abs(step.gradient).max()
            np.testing.assert_allclose(together.gradients[i], step.gradient, atol=allowed, rtol=0)
            assert together.losses[i] == pytest.approx(step.loss, rel=1e-4)
            assert together.samples == step.samples
        after = z - np.float32(rate) * together.gradients
        for i, trainer in enumerate(single):
            stacked.after_round_of_peer(i, z[i], after[i], rate)
            trainer.after_round(z[i], after[i], rate)
        z = after


@pytest.mark.parametrize("momentum", ["none", "nesterov", "qg", "adam", "muon"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_digits_equal_one_by_one(momentum: str, local_steps: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stacked_module, "_NUMBERS_AT_ONCE", 40_000)  # four peers at once, then two
    chosen = options(momentum=momentum, local_steps=local_steps, learning_rate=0.01)
    # Adam divides by the root of tiny second moments, which magnifies rounding.
    tolerance = 2e-3 if momentum in ADAPTIVE else 1e-5
    assert_equal_training(*both(resolve_task("digits"), chosen, 6), rounds=6, tolerance=tolerance)


def test_logistic_regression_equals_one_by_one():
    digits = resolve_task("digits")
    task = Classification(
        name="l", num_classes=10, model=lambda: logistic(64, 10), train=digits.train_data(), test=digits.test_data()
    )
    assert_equal_training(*both(task, options(), 5), rounds=6, tolerance=1e-5)


def rounding_of_resnet(single: Sequence[Trainer], beta: float = 0.9) -> Deviation:
    """Return how far two float32 computations of ResNet-20's direction with Nesterov momentum may lie apart.

    A sum of m numbers is wrong by about √m u, u = 2⁻²⁴, where roundings are independent. The longest sums are those
    over a channel of a batch of b images, m = b · 32 · 32, in norms and in the gradients of their parameters; each of
    20 layers has them, forwards and backwards. So either computation is the exact one of a network whose numbers are
    off by √(2 · 20 m) u.
    What such a change does to the gradient is measured in float64, at the very parameters and samples that are
    compared: a norm divides by the deviation of at least 128 numbers, and where that is small, a channel is many times
    as sensitive as in another batch. Nesterov's G = g + β m, m ← β m + g, adds up the deviations of the gradients.
    """
    numbers, of_memory = np.random.default_rng(8), [0.0] * len(single)

    def deviation(peer: int, z: np.ndarray, t: int) -> float:
        trainer = single[peer]
        model, (samples, *rest) = trainer.task.make_model().double(), (part.cpu() for part in trainer._batch(t, 0))
        change = np.sqrt(2 * 20 * (len(samples) * 32 * 32)) * 2.0**-24

        def nearby(values: np.ndarray) -> np.ndarray:
            return values * (1 + change * numbers.uniform(-1, 1, size=values.shape))

        def gradient(z: np.ndarray, images: np.ndarray) -> np.ndarray:
            vector_to_parameters(torch.from_numpy(z), model.parameters())
            loss = trainer._loss(model, (torch.from_numpy(images), *rest))
            return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters()))).numpy()

        z, pixels = z.astype(np.float64), samples.double().numpy()
        exact = gradient(z, pixels)
        of_gradient = 2 * max(np.abs(gradient(nearby(z), nearby(pixels)) - exact).max() for _ in range(3))
        of_memory[peer] = beta * of_memory[peer] + of_gradient
        return float(of_gradient + beta * of_memory[peer])

    return deviation


def assert_equal_statistics(stacked: StackedTrainer, single: Sequence[Trainer]) -> int:
    """Compare the running statistics of the norms; return how many vectors of them there are. They are forward sums
    over at most 2 · 32 · 32 numbers behind at most 20 layers, √(20 m) u = 1.2e-5 off where roundings are independent,
    and ten times that where none are."""
    tolerance = 10 * np.sqrt(20 * (2 * 32 * 32)) * 2.0**-24
    buffers = stacked._engine.buffers
    for name, value in buffers.items():
        for peer, trainer in enumerate(single):
            expected = trainer.state()[f"buffer.{name}"]
            np.testing.assert_allclose(
                value[peer].cpu().numpy(), expected, rtol=0, atol=tolerance * np.abs(expected).max()
            )
    return len(buffers)


@pytest.fixture
def smooth_resnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """ReLU's derivative jumps at 0. Of the 400,000 numbers that go into a ReLU in a batch, one in a few batches is so
    near to 0 that the last bits choose its side, and hundreds of numbers of the gradient jump by up to 0.5 % of its
    largest, on one processor and not on another. SiLU takes its place here; what is compared is all the rest."""
    monkeypatch.setattr(torch, "relu", nn.functional.silu)
    monkeypatch.setattr(stacked_module, "_NUMBERS_AT_ONCE", 600_000)  # two peers at once, then one


RESNET_OPTIONS = {"batch_size": 2, "learning_rate": 0.01}


@pytest.mark.usefixtures("smooth_resnet")
@pytest.mark.parametrize("how", ["stacked", "one by one"])
# Not Range batch norm: in batches of 2, which activation is the largest hangs on the last bits.
@pytest.mark.parametrize("norm", ["evonorm", "range-evonorm", "group", "batch"])
def test_resnet_equals_one_by_one(norm: Norm, how: str):
    task = images(norm, augmented=True)
    stacked, single = both(task, options(**RESNET_OPTIONS), 3, how=how)
    assert_equal_training(stacked, single, rounds=2, tolerance=rounding_of_resnet(single))
    assert bool(assert_equal_statistics(stacked, single)) == (norm == "batch")


@pytest.mark.usefixtures("smooth_resnet")
@pytest.mark.parametrize("defect", ["momentum", "weight decay", "exchanged peers", "statistics"])
def test_the_comparison_of_resnets_finds_defects(defect: str):
    task = images("batch", augmented=True)
    changes: dict[str, dict[str, object]] = {"momentum": {"beta": 0.89}, "weight decay": {"weight_decay": 2e-3}}
    stacked, _ = both(task, options(**RESNET_OPTIONS), 3)

    def slower() -> nn.Module:
        model = resnet20(norm="batch")
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.099
        return model

    if defect == "statistics":
        task.model = slower
    _, single = both(task, options(**RESNET_OPTIONS | changes.get(defect, {})), 3)
    if defect == "exchanged peers":
        single = [single[1], single[0], single[2]]
    if defect == "statistics":
        assert_equal_training(stacked, single, rounds=2, tolerance=rounding_of_resnet(single))
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_equal_statistics(stacked, single)
    else:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_equal_training(stacked, single, rounds=2, tolerance=rounding_of_resnet(single))


def test_each_peers_gradient_is_shortened_by_its_own_norm():
    chosen = options(clip_norm=0.2, momentum="adamw")
    assert_equal_training(*both(points(), chosen, 3), rounds=3, tolerance=1e-5)
    unclipped = both(points(), options(momentum="none", weight_decay=0.0), 3)[1]
    norms = [np.linalg.norm(each.gradient(each.initial_vector(), 0, 0.1, 0.1).gradient) for each in unclipped]
    assert min(norms) > 0.2, "all are shortened"


def test_one_by_one_equals_the_trainer_bit_for_bit():
    stacked, single = both(points(), options(), 4, how="one by one")
    z = np.tile(stacked.initial_vector(), (4, 1))
    together = all_gradients(stacked, z, 2, 0.1)
    for i, trainer in enumerate(single):
        assert np.array_equal(together.gradients[i], trainer.gradient(z[i], 2, 0.1, 0.1).gradient)


def test_only_patterns_and_own_augmentation_apply():
    plain = points()

    def jitter(batch, uniforms):
        assert batch[0].shape == (8, 2)  # one peer at a time: an own augmentation may mix the samples of a batch
        return batch[0] + uniforms[:, :2] - batch[0].mean(dim=0), batch[1]

    task = Classification(
        name="p", num_classes=3, model=plain.model, train=plain.train, test=plain.test, augmentation=jitter
    )
    assert_equal_training(*both(task, options(only=("0.*", "4.weight")), 3), rounds=4, tolerance=1e-5)


@pytest.mark.parametrize("how", ["stacked", "one by one"])
def test_evaluations_equal_one_by_one(how: str):
    stacked, single = both(points(), options(), 70, how=how)
    numbers = np.random.default_rng(7)
    z = numbers.normal(size=(70, stacked.layout.size)).astype(np.float32)
    for peer in range(70):
        result, expected = stacked.evaluate_one(peer, z[peer]), single[peer].evaluate(z[peer])
        assert result.correct.tolist() == expected.correct.tolist()
        assert result.total.tolist() == expected.total.tolist()
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)


class Counting(nn.Module):
    """Writes a buffer in evaluation too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) + (0 if self.training else x.sum())


@pytest.mark.parametrize("task", [images("group"), images("batch"), points(model=Counting)])
def test_stacked_evaluation_changes_nothing(task):
    stacked, _ = both(task, options(batch_size=2), 2)
    z = np.tile(stacked.initial_vector(), (2, 1))
    all_gradients(stacked, z, 0, 0.1)
    before = {name: value.clone() for name, value in stacked._engine.buffers.items()}
    first, second = (stacked.evaluate_one(1, z[1]) for _ in range(2))
    assert all(torch.equal(value, before[name]) for name, value in stacked._engine.buffers.items())
    assert first.correct.tolist() == second.correct.tolist()


@pytest.mark.parametrize("how", ["stacked", "one by one"])
def test_stacked_evaluation_takes_running_statistics(how: str):
    stacked, single = both(images("batch"), options(batch_size=4), 2, how=how)
    z = np.tile(stacked.initial_vector(), (2, 1))
    all_gradients(stacked, z, 0, 0.1)
    for peer in range(2):
        single[peer].gradient(z[peer], 0, 0.1, 0.1)
        assert stacked.evaluate_one(peer, z[peer]).loss == pytest.approx(single[peer].evaluate(z[peer]).loss, rel=1e-3)


def test_many_peers_learn_together():
    task = resolve_task("digits")
    shards = np.array_split(np.arange(1437, dtype=np.int64), 120)
    trainer = StackedTrainer(task, options(batch_size=12, learning_rate=0.1), rounds=60, seed=0, shards=shards)
    z = np.tile(trainer.initial_vector(), (120, 1))
    for t in range(60):
        z = z - np.float32(trainer.rate(t)) * all_gradients(trainer, z, t, 0.1).gradients
        z[:] = z.mean(axis=0)
    assert min(trainer.evaluate_one(peer, z[peer]).accuracy for peer in range(120)) > 0.9


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Module])
def test_what_cannot_be_stacked_is_refused_with_the_reason(layer):
    class Deciding(nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    data = TensorData(torch.randn(20, 2), torch.arange(20) % 2)
    odd = Deciding() if layer is nn.Module else layer
    task = Classification(
        name="odd", num_classes=2, model=lambda: nn.Sequential(nn.Linear(2, 2), odd), train=data, test=data
    )
    stacked, single = both(task, options(), 2)
    z = np.tile(stacked.initial_vector(), (2, 1))
    with pytest.raises(DataError, match="task odd cannot be computed for all peers as one batch"):
        all_gradients(stacked, z, 0, 0.1)
    alone, _ = both(task, options(), 2, how="one by one")
    gradients = all_gradients(alone, z, 0, 0.1).gradients
    assert np.array_equal(gradients[1], single[1].gradient(z[1], 0, 0.1, 0.1).gradient)


def test_models_with_convolutions_go_one_by_one_on_a_cpu():
    chosen = options(batch_size=2)
    by_choice, _ = both(images("group"), chosen, 2, how="auto")
    one_by_one, _ = both(images("group"), chosen, 2, how="one by one")
    z = np.tile(by_choice.initial_vector(), (2, 1))
    assert np.array_equal(all_gradients(by_choice, z, 0, 0.1).gradients, all_gradients(one_by_one, z, 0, 0.1).gradients)
