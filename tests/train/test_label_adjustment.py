"""Logit adjustment: the loss is that of the equation, judgement knows nothing of it, and off means off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from peer.config.options import TrainingOptions
from peer.errors import ConfigError, DataError
from peer.train.baseline import single_process
from peer.train.data import Classification, TensorData, cross_entropy
from peer.train.label_adjustment import declared_shares, is_uneven
from peer.train.local_step import Trainer
from peer.train.sampling import ClassQuotas
from peer.train.stacked import StackedTrainer
from peer.train.tasks import resolve_task
from tests.train.small_tasks import all_indices, descend, points
from tests.train.test_stacked import all_gradients

OFF = {"label_adjustment": False, "class_balance": 0.0}


def options(**changes: object) -> TrainingOptions:
    settings = {"momentum": "none", "batch_size": 8, "warmup_rounds": 0, "learning_rate": 0.1} | changes
    return TrainingOptions(**settings)


def trainer_of(task: Classification, indices: np.ndarray, *, peer: int = 0, **changes: object) -> Trainer:
    return Trainer(task, options(**changes), rounds=40, seed=3, peer=peer, train_indices=indices)


def of_classes(task: Classification, *counts: int) -> np.ndarray:
    """Return the first samples of each class, as many as asked for."""
    labels = task.train_data().labels.numpy()
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c, count in enumerate(counts)]))


def drawn(trainer: Trainer, t: int) -> np.ndarray:
    return trainer._schedule.batch(t).indices


def equation(trainer: Trainer, z: np.ndarray, t: int, drawn_shares: np.ndarray) -> tuple[np.ndarray, float]:
    """Return gradient and loss of −log(r_y e^f_y / Σ r_c e^f_c), r = q / p or 1, written out in float64."""
    data = trainer.task.train_data()
    inputs, targets = data.batch(torch.from_numpy(drawn(trainer, t)))
    model = trainer.task.make_model().double()
    offset = 0
    for parameter in model.parameters():
        part = torch.from_numpy(z[offset : offset + parameter.numel()]).double()
        parameter.data = part.view(parameter.shape)
        offset += parameter.numel()
    all_shares = np.bincount(data.labels.numpy()) / len(data)
    ratios = torch.from_numpy(np.where(drawn_shares > 0, drawn_shares / all_shares, 1.0))
    weighted = ratios * model(inputs.double()).exp()
    loss = -(weighted[torch.arange(len(targets)), targets] / weighted.sum(dim=1)).log().mean()
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return np.concatenate([part.reshape(-1).numpy() for part in parts]), loss.item()


@pytest.mark.parametrize("counts", [(20, 3, 7), (20, 0, 7), (0, 9, 0)], ids=["skewed", "one absent", "one only"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_loss_and_gradient_are_those_of_the_equation(counts: tuple[int, ...], alpha: float):
    task = points()
    trainer = trainer_of(task, of_classes(task, *counts), label_adjustment=True, class_balance=alpha)
    z = trainer.initial_vector() + np.float32(0.2)
    own = np.array(counts)
    places = np.where(own > 0, np.maximum(own, 1) ** (1.0 - alpha), 0)
    exact = places / places.sum()
    for t in range(5):
        step = trainer.gradient(z, t, 0.1, 0.1)
        # Places of a pass are whole numbers: the shares of what is really drawn.
        shares = trainer._adjustment._quotas.of_pass(t * 8 // own.sum()) / own.sum()
        assert np.abs(shares - exact).max() <= 1 / own.sum()
        if t * 8 // own.sum() != (t * 8 + 7) // own.sum() and alpha > 0:
            continue
        gradient, loss = equation(trainer, z, t, shares)
        np.testing.assert_allclose(step.gradient, gradient, rtol=0, atol=2e-7)
        assert step.loss == pytest.approx(loss, rel=2e-6)


def test_a_peer_with_one_class_tells_it_from_the_others():
    task = points()
    task.model = lambda: nn.Linear(2, 3)
    trainer = trainer_of(task, of_classes(task, 0, 9, 0), label_adjustment=True)
    z = trainer.initial_vector()
    for t in range(20):
        z = z - np.float32(0.5) * trainer.gradient(z, t, 0.5, 0.5).gradient
    assert trainer.gradient(z, 20, 0.5, 0.5).loss < 0.5 * trainer.gradient(trainer.initial_vector(), 20, 0.5, 0.5).loss


def test_judgement_knows_nothing_of_it(tmp_path: Path):
    task = points()
    shard = of_classes(task, 20, 0, 7)
    adjusted, plain = trainer_of(task, shard, label_adjustment=True), trainer_of(task, shard, **OFF)
    z = plain.initial_vector()
    for split in ("test", "train"):
        one, other = adjusted.evaluate(z, split), plain.evaluate(z, split)
        assert one.loss == other.loss
        assert np.array_equal(one.correct, other.correct)
    exported = []
    for trainer in (adjusted, plain):
        trainer.save_model(z, tmp_path / "model.safetensors")
        exported.append(load_file(tmp_path / "model.safetensors"))
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())


def test_what_is_learned_from_skewed_samples_is_right_for_all_data():
    """With one feature that takes three values the best model is known: its softmax has the classes' shares among all
    samples of that value, and a peer whose shares differ by class alone should find the same."""
    numbers = np.random.default_rng(2)
    classes = numbers.choice(3, 6000, p=[0.5, 0.3, 0.2])
    chances = np.array([[0.7, 0.2, 0.1], [0.3, 0.4, 0.3], [0.1, 0.2, 0.7]])
    values = np.array([numbers.choice(3, p=chances[c]) for c in classes])
    inputs = torch.eye(3)[torch.from_numpy(values)]
    data = TensorData(inputs, torch.from_numpy(classes))
    task = Classification(
        name="values", num_classes=3, model=lambda: nn.Linear(3, 3, bias=False), train=data, test=data
    )
    joint = np.zeros((3, 3))
    np.add.at(joint, (values, classes), 1)
    best = joint / joint.sum(axis=1, keepdims=True)
    kept = numbers.random(6000) < np.array([0.1, 0.9, 0.5])[classes]

    def learned(adjustment: bool) -> np.ndarray:
        chosen = options(batch_size=256, learning_rate=1.0, label_adjustment=adjustment)
        trainer = Trainer(task, chosen, rounds=300, seed=0, peer=0, train_indices=np.flatnonzero(kept))
        z = descend(trainer, trainer.initial_vector(), range(300))
        return torch.softmax(torch.from_numpy(z).view(3, 3).T, dim=1).numpy()

    assert np.abs(learned(True) - best).max() < 0.05
    assert np.abs(learned(False) - best).max() > 0.2


# Off, and "auto"


@pytest.mark.parametrize("name", ["digits", "points"])
def test_off_is_the_plain_local_step_bit_for_bit(name: str):
    """The steps of a trainer with α = 0 and no adjustment, against those of the loss alone on the plain schedule."""
    task = points() if name == "points" else resolve_task(name)
    shard = of_classes(task, 20, 3, 7)
    off = trainer_of(task, shard, precision="float32", **OFF)
    z = off.initial_vector()
    for t in range(4):
        batch = task.train_data().batch(torch.from_numpy(drawn(off, t)))
        loss = cross_entropy(off.model, batch)
        parts = torch.autograd.grad(loss, list(off.model.parameters()))
        expected = np.concatenate([part.reshape(-1).numpy() for part in parts])
        assert np.array_equal(off.gradient(z, t, 0.1, 0.1).gradient, expected)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_auto_leaves_samples_dealt_at_random_alone(precision: str):
    task = resolve_task("digits")
    shard = np.sort(np.random.default_rng(1).permutation(1437)[:180])
    auto, off = (trainer_of(task, shard, precision=precision, **changes) for changes in ({}, OFF))
    z = auto.initial_vector()
    for t in range(3):
        assert np.array_equal(auto.gradient(z, t, 0.1, 0.1).gradient, off.gradient(z, t, 0.1, 0.1).gradient)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_auto_adjusts_where_classes_are_skewed(precision: str):
    task = resolve_task("digits")
    shard = of_classes(task, 80, 60, 5, 5, 5, 5, 5, 5, 5, 5)
    auto, on, off = (
        trainer_of(task, shard, precision=precision, **changes) for changes in ({}, {"label_adjustment": True}, OFF)
    )
    z = auto.initial_vector()
    steps = [trainer.gradient(z, 0, 0.1, 0.1) for trainer in (auto, on, off)]
    assert np.array_equal(steps[0].gradient, steps[1].gradient)
    assert not np.array_equal(steps[0].gradient, steps[2].gradient)
    assert steps[0].loss < steps[2].loss


def test_balanced_drawing_is_adjusted_for_even_where_samples_were_dealt_at_random():
    task = points()
    shard = all_indices(task)[:90]
    auto = trainer_of(task, shard, class_balance=1.0)
    on = trainer_of(task, shard, class_balance=1.0, label_adjustment=True)
    z = auto.initial_vector()
    assert auto.gradient(z, 0, 0.1, 0.1).loss == on.gradient(z, 0, 0.1, 0.1).loss


def test_chance_is_told_from_skew():
    numbers = np.random.default_rng(4)
    for classes, shard in ((2, 40), (10, 180), (100, 500)):
        labels = numbers.integers(0, classes, 8 * shard)
        totals = np.bincount(labels, minlength=classes)
        for _ in range(300):
            counts = np.bincount(numbers.permutation(labels)[:shard], minlength=classes)
            assert not is_uneven(counts, totals)
        skewed = np.bincount(np.sort(labels)[:shard], minlength=classes)
        assert is_uneven(skewed, totals)
    assert not is_uneven(totals, totals)
    # Uneven as all the data is: nothing to adjust.
    assert not is_uneven(np.array([900, 100]), np.array([9000, 1000]))


def test_one_process_with_all_the_data_is_trained_plainly():
    task = points()
    with_, without = (
        single_process(task, options(**changes), rounds=12, seed=1)
        for changes in ({"label_adjustment": True, "class_balance": 0.5}, OFF)
    )
    assert np.array_equal(with_[1], without[1])


def test_balance_follows_the_rate_after_the_warm_up():
    task = points()
    shard = of_classes(task, 20, 3, 1)
    trainer = trainer_of(
        task, shard, local_steps=2, warmup_rounds=6, class_balance=0.8, class_balance_follows_rate=True
    )
    quotas = trainer._adjustment._quotas
    for number in range(20):
        first_round = number * 24 // (8 * 2)
        alpha = 0.8 if first_round < 6 else 0.8 * trainer.rate(first_round) / 0.1
        assert np.array_equal(quotas.of_pass(number), ClassQuotas(quotas.classes, 3, balance=alpha).of_pass(0))
    assert quotas.of_pass(0)[0] < quotas.of_pass(19)[0]


# Data that is each device's own


def own_trainer(counts: tuple[int, ...], shares: tuple[float, ...] = (), **changes: object) -> Trainer:
    """Return a trainer of a device that has these counts of the classes and no more."""
    whole = points()
    inputs, labels = whole.train_data().batch(torch.from_numpy(of_classes(whole, *counts)))
    data = TensorData(inputs, labels)
    task = Classification(name="own", num_classes=3, model=whole.model, train=data, test=whole.test)
    declared = declared_shares(task, shares)
    indices = all_indices(task)
    return Trainer(task, options(**changes), rounds=9, seed=3, peer=0, train_indices=indices, class_shares=declared)


def log_ratios(trainer: Trainer) -> np.ndarray:
    return trainer._adjustment.rows(0)[0]


def test_own_classes_are_compared_with_equal_shares_where_none_are_declared():
    assert np.allclose(log_ratios(own_trainer((25, 2, 3))), np.log(np.array([25, 2, 3]) / 30 * 3), atol=1e-6)
    assert own_trainer((12, 9, 10))._adjustment is None
    assert own_trainer((12, 9, 10), label_adjustment=True)._adjustment is not None
    assert own_trainer((25, 2, 3), label_adjustment=False)._adjustment is None
    assert own_trainer((12, 9, 10), class_balance=0.5)._adjustment is not None


def test_own_classes_are_compared_with_the_declared_shares():
    """Declared in percent; a device with the classes of all is left alone, uneven as they are."""
    assert own_trainer((25, 2, 3), (80, 10, 10))._adjustment is None
    expected = np.log(np.array([10, 10, 11]) / 31 / np.array([0.8, 0.1, 0.1]))
    assert np.allclose(log_ratios(own_trainer((10, 10, 11), (80, 10, 10))), expected, atol=1e-6)
    # Nobody has the second class.
    assert own_trainer((12, 0, 14), (1, 0, 1))._adjustment is None
    assert np.isfinite(log_ratios(own_trainer((25, 0, 1), (1, 0, 3)))).all()


@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0), (1e308, 1e308, 1e308)])
def test_declared_shares_that_do_not_fit_the_task_are_refused(shares: tuple[float, ...]):
    with pytest.raises(ConfigError, match=r"data\.class_shares: task points has 3 classes .*valid: 3 numbers"):
        declared_shares(points(), shares)


def test_samples_of_a_class_that_nobody_should_have_are_refused():
    with pytest.raises(ConfigError, match=r"data\.class_shares: is 0 for class 2, but this device has 3 samples of it"):
        own_trainer((25, 2, 3), (0.5, 0.5, 0))


# Which tasks can


class OwnLoss(Classification):
    """A classification with a loss that nobody can adjust."""

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs), targets, label_smoothing=0.1)


class AdjustableOwnLoss(OwnLoss):
    """The same with one that can be."""

    def adjusted_loss(
        self, model: nn.Module, batch: tuple[torch.Tensor, ...], adjustment: torch.Tensor
    ) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs) + adjustment, targets, label_smoothing=0.1)


def own(kind: type[Classification]) -> Classification:
    task = points()
    return kind(name="own", num_classes=3, model=task.model, train=task.train, test=task.test)


def soft() -> Classification:
    """Return the points with probabilities as targets."""
    task, count = points(), 96
    inputs, labels = task.train_data().batch(torch.arange(count))
    targets = 0.9 * torch.eye(3)[labels] + 0.1 / 3
    return Classification(
        name="soft", num_classes=3, model=task.model, train=TensorData(inputs, targets, labels=labels), test=task.test
    )


@pytest.mark.parametrize("task", [own(OwnLoss), soft()], ids=["a loss of its own", "soft targets"])
def test_a_loss_that_cannot_be_adjusted_stays_as_it_is(task: Classification):
    shard = of_classes(task, 30, 2, 1)
    auto, off = trainer_of(task, shard), trainer_of(task, shard, **OFF)
    z = auto.initial_vector()
    assert np.array_equal(auto.gradient(z, 0, 0.1, 0.1).gradient, off.gradient(z, 0, 0.1, 0.1).gradient)
    with pytest.raises(ConfigError, match=r"training\.label_adjustment: the loss of task .* takes nothing to add"):
        trainer_of(task, shard, label_adjustment=True)


def test_an_own_loss_that_can_be_adjusted_is():
    task = own(AdjustableOwnLoss)
    shard = of_classes(task, 30, 2, 1)
    auto, off = trainer_of(task, shard), trainer_of(task, shard, **OFF)
    z = auto.initial_vector()
    assert not np.array_equal(auto.gradient(z, 0, 0.1, 0.1).gradient, off.gradient(z, 0, 0.1, 0.1).gradient)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"label_adjustment": True},
            r"training\.label_adjustment: the loss of task synthetic .*valid: \"auto\", false",
        ),
        ({"class_balance": 0.5}, r"training\.class_balance: task synthetic has no classes \(got 0\.5\); valid: 0"),
    ],
)
def test_a_task_without_classes_has_nothing_to_adjust_or_balance(changes: dict[str, object], sentence: str):
    task = resolve_task("synthetic", {"parameters": 40, "layers": 2, "samples": 64})
    Trainer(task, options(), rounds=9, seed=0, peer=0, train_indices=np.arange(8))
    with pytest.raises(ConfigError, match=sentence):
        Trainer(task, options(**changes), rounds=9, seed=0, peer=0, train_indices=np.arange(8))


# All peers at once, and going on


@pytest.mark.parametrize("how", ["stacked", "one by one"])
@pytest.mark.parametrize(
    "changes",
    [
        {"label_adjustment": True},
        {"class_balance": 0.5, "local_steps": 2},
        {"class_balance": 1.0, "class_balance_follows_rate": True},
        {"class_balance": 0.5, "label_adjustment": False},
        {},
    ],
)
def test_stacked_peers_equal_peers_one_by_one(how: str, changes: dict[str, object]):
    task = resolve_task("digits")
    # The last one is dealt at random: "auto" adjusts the others only.
    even = np.sort(np.random.default_rng(1).permutation(1437)[:60])
    shards = [of_classes(task, 30, 20, 5), of_classes(task, 0, 3, 40, 2, 0, 0, 0, 0, 0, 17), even]
    chosen = options(precision="float32", momentum="nesterov", batch_size=12, **changes)
    together = StackedTrainer(task, chosen, rounds=20, seed=3, shards=shards, how=how)
    alone = [
        Trainer(task, chosen, rounds=20, seed=3, peer=peer, train_indices=shard) for peer, shard in enumerate(shards)
    ]
    z = np.tile(together.initial_vector(), (3, 1))
    for t in range(12):
        step = all_gradients(together, z, t, 0.1)
        for peer, trainer in enumerate(alone):
            own_step = trainer.gradient(z[peer], t, 0.1, 0.1)
            scale = np.abs(own_step.gradient).max()
            np.testing.assert_allclose(step.gradients[peer], own_step.gradient, rtol=0, atol=2e-5 * scale)
            assert step.losses[peer] == pytest.approx(own_step.loss, rel=1e-4)
        z = z - np.float32(0.1) * step.gradients


def test_networks_in_8_bits_are_adjusted_alike_stacked_and_alone():
    task = resolve_task("digits")
    shards = [of_classes(task, 30, 20, 5), of_classes(task, 0, 3, 40, 2)]
    chosen = options(precision="int8", class_balance=0.5)
    together = StackedTrainer(task, chosen, rounds=20, seed=3, shards=shards)
    z = np.tile(together.initial_vector(), (2, 1))
    step = all_gradients(together, z, 1, 0.1)
    for peer, shard in enumerate(shards):
        trainer = Trainer(task, chosen, rounds=20, seed=3, peer=peer, train_indices=shard)
        assert np.array_equal(step.gradients[peer], trainer.gradient(z[peer], 1, 0.1, 0.1).gradient)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_training_goes_on_from_its_state_bit_for_bit(precision: str):
    task = resolve_task("digits")
    shard = of_classes(task, 30, 20, 5)
    changes = {
        "precision": precision,
        "momentum": "nesterov",
        "class_balance": 0.7,
        "class_balance_follows_rate": True,
    }
    whole, first, second = (trainer_of(task, shard, **changes) for _ in range(3))
    expected = descend(whole, whole.initial_vector(), range(40))
    middle = descend(first, first.initial_vector(), range(23))
    second.restore(first.state())
    assert np.array_equal(descend(second, middle, range(23, 40)), expected)


@pytest.mark.parametrize(
    ("changes", "is_adjusted"),
    [({}, False), ({"label_adjustment": True}, True), ({"class_balance": 0.5}, True)],
    ids=["auto", "asked for", "asked for with balance"],
)
def test_a_run_from_before_goes_on_without_it_unless_it_is_asked_for(changes: dict[str, object], is_adjusted: bool):
    task = points()
    shard = of_classes(task, 30, 2, 1)
    off = {**changes, "label_adjustment": False}
    before, after = trainer_of(task, shard, **off), trainer_of(task, shard, **off)
    resumed, new = trainer_of(task, shard, **changes), trainer_of(task, shard, **changes)
    z = descend(before, before.initial_vector(), range(5))
    resumed.restore(before.state())
    after.restore(before.state())
    steps = [trainer.gradient(z, 5, 0.1, 0.1).gradient.copy() for trainer in (resumed, new, after)]
    assert np.array_equal(steps[0], steps[1 if is_adjusted else 2])
    assert not np.array_equal(steps[1], steps[2])
    again = trainer_of(task, shard, **changes)
    again.restore(resumed.state())
    assert np.array_equal(again.gradient(z, 5, 0.1, 0.1).gradient, steps[0])


def test_a_run_that_began_with_it_goes_on_with_it_where_it_is_no_longer_the_default():
    """Earlier releases adjusted with sgp on a complete graph, where `RunSetup` says false now."""
    task = points()
    shard = of_classes(task, 30, 2, 1)
    before, resumed = trainer_of(task, shard), trainer_of(task, shard, label_adjustment=False)
    z = descend(before, before.initial_vector(), range(5))
    plain = resumed.gradient(z, 5, 0.1, 0.1).gradient.copy()
    resumed.restore(before.state())
    step = resumed.gradient(z, 5, 0.1, 0.1).gradient.copy()
    assert np.array_equal(step, before.gradient(z, 5, 0.1, 0.1).gradient)
    assert not np.array_equal(step, plain)
    assert "label_adjustment" in resumed.state()


def test_a_model_with_another_number_of_outputs_is_named() -> None:
    data = TensorData(torch.zeros(4, 6), torch.arange(4))
    task = Classification(name="pets", num_classes=4, model=lambda: nn.Linear(6, 3), train=data, test=data)
    with pytest.raises(DataError, match="the model of task pets has 3 outputs; num_classes is 4"):
        task.adjusted_loss(task.make_model(), data.batch(torch.arange(4)), torch.zeros(4, 4))
