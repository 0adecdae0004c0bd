"""The local step: the flat gradient is that of the loss, and nothing but seed, peer, round and z decides it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from peer.config.options import TrainingOptions
from peer.errors import ConfigError, DataError, LocalProtocolError
from peer.train import local_step
from peer.train.data import Classification, TensorData
from peer.train.local_step import Trainer, Vector
from peer.train.memory import ALIGNMENT
from peer.train.own_task import OwnTask, UserCode
from peer.train.task import Task
from peer.train.tasks import resolve_task
from tests.train.small_tasks import NUM_TEST, NUM_TRAIN, all_indices, descend, images, points


def make_trainer(
    task: Task | None = None, *, peer: int = 0, seed: int = 7, rounds: int = 50, **options: object
) -> Trainer:
    settings = {"momentum": "none", "batch_size": 8, "warmup_rounds": 0, "schedule": "constant"} | options
    task = task or points()
    return Trainer(
        task,
        TrainingOptions(**settings),
        rounds=rounds,
        seed=seed,
        peer=peer,
        train_indices=np.arange(len(task.train_data()), dtype=np.int64),
    )


class RecordingPoints(Classification):
    """Keeps the last batch and the memory of what the loss was computed on."""

    def loss(self, model, batch):
        self.batch = batch
        self.parameters = list(model.parameters())
        return super().loss(model, batch)


def recording() -> RecordingPoints:
    plain = points()
    return RecordingPoints(name="points", num_classes=3, model=plain.model, train=plain.train, test=plain.test)


# The vector and the module


def test_layers_are_the_parameters_in_order():
    trainer = make_trainer()
    assert trainer.layout.names == ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
    assert trainer.layout.sizes == (16, 8, 64, 8, 24, 3)


def test_vector_and_module_hold_the_same_numbers():
    trainer = make_trainer()
    z = np.random.default_rng(0).normal(size=trainer.layout.size).astype(np.float32)
    trainer.evaluate(z)
    for part, parameter in zip(trainer.layout.slices, trainer.model.parameters(), strict=True):
        assert np.array_equal(z[part], parameter.detach().numpy().reshape(-1))


class Tied(nn.Module):
    """Has a weight that is used twice, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)

    def forward(self, inputs):
        return self.last(self.first(self.first(inputs).tanh()))


@pytest.mark.parametrize("momentum", ["nesterov", "heavy-ball", "adam"])
def test_a_gradient_that_is_flattened_part_by_part_has_the_same_bits(momentum, monkeypatch):
    plain = points()
    task = Classification(name="points", num_classes=3, model=Tied, train=plain.train, test=plain.test)

    def trained() -> list[bytes]:
        trainer = make_trainer(task, momentum=momentum, local_steps=3, weight_decay=0.01)
        z, found = trainer.initial_vector(), []
        for t in range(3):
            g = trainer.gradient(z, t, 0.1, 0.1).gradient
            z = z - np.float32(0.1) * g
            found.append(g.tobytes())
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        return found

    expected = trained()
    monkeypatch.setattr(local_step, "_LARGE", 1)
    assert trained() == expected


def test_gradient_is_the_slope_of_the_loss_in_every_coordinate():
    task = recording()
    trainer = make_trainer(task)
    z = trainer.initial_vector()
    gradient = trainer.gradient(z, 0, 0.1, 0.1).gradient.copy()
    inputs, targets = task.batch
    model = points().model().double()

    def loss_at(vector: np.ndarray) -> float:
        nn.utils.vector_to_parameters(torch.from_numpy(vector), model.parameters())
        return float(nn.functional.cross_entropy(model(inputs.double()), targets).detach())

    slopes = np.empty(z.size)
    for k in range(z.size):
        shift = np.zeros(z.size)
        shift[k] = 1e-5
        slopes[k] = (loss_at(z + shift) - loss_at(z - shift)) / 2e-5
    assert np.abs(slopes).max() > 0.01
    np.testing.assert_allclose(gradient, slopes, atol=2e-6)


def test_a_parameter_that_the_loss_does_not_touch_has_gradient_zero():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x):
            return self.used(x)

    trainer = make_trainer(points(model=TwoHeads))
    gradient = trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1).gradient
    used, unused = gradient[:9], gradient[9:]
    assert np.any(used)
    assert not np.any(unused)


def test_tied_weights_are_one_layer():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.again = nn.Linear(2, 2), nn.Linear(2, 2)
            self.again.weight = self.into.weight
            self.out = nn.Linear(2, 3)

        def forward(self, x):
            return self.out(self.again(torch.tanh(self.into(x))))

    trainer = make_trainer(points(model=Tied))
    assert trainer.layout.names == ("into.weight", "into.bias", "again.bias", "out.weight", "out.bias")
    z = trainer.initial_vector()
    assert descend(trainer, z, range(5)).shape == z.shape
    assert trainer.model.again.weight is trainer.model.into.weight


def test_z_of_another_size_or_type_is_a_broken_contract():
    trainer = make_trainer()
    with pytest.raises(LocalProtocolError, match="float32"):
        trainer.gradient(trainer.initial_vector().astype(np.float64), 0, 0.1, 0.1)
    with pytest.raises(LocalProtocolError, match=f"float32\\[{trainer.layout.size}\\]"):
        trainer.evaluate(np.zeros(3, np.float32))


# Bit identity


@pytest.mark.parametrize("momentum", ["none", "heavy-ball", "nesterov", "qg", "qg-nesterov", "adam", "muon"])
def test_two_trainers_agree_bit_for_bit(momentum: str):
    first, second = (make_trainer(momentum=momentum, weight_decay=1e-3, local_steps=2) for _ in range(2))
    z = first.initial_vector()
    assert np.array_equal(z, second.initial_vector())
    assert np.array_equal(descend(first, z, range(12)), descend(second, z, range(12)))


def test_result_does_not_depend_on_where_z_lies_in_memory():
    trainer, z = make_trainer(resolve_task("digits"), batch_size=32), None
    z = trainer.initial_vector()
    reference = trainer.gradient(z, 3, 0.1, 0.1).gradient.copy()
    for offset in (4, 8, 20, 60):
        memory = np.empty(z.nbytes + 128, np.uint8)
        start = (-memory.ctypes.data) % 64 + offset
        shifted = memory[start : start + z.nbytes].view(np.float32)
        shifted[:] = z
        assert shifted.ctypes.data % 64 == offset
        assert np.array_equal(trainer.gradient(shifted, 3, 0.1, 0.1).gradient, reference)


def test_result_does_not_depend_on_rounds_computed_before():
    fresh, used = make_trainer(), make_trainer()
    z = fresh.initial_vector()
    for t in (0, 5, 2):
        used.gradient(z, t, 0.1, 0.1)
    assert np.array_equal(fresh.gradient(z, 9, 0.1, 0.1).gradient, used.gradient(z, 9, 0.1, 0.1).gradient)


def test_result_does_not_depend_on_torchs_global_generator():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 3)

        def forward(self, x):
            return self.linear(nn.functional.dropout(x, 0.5, self.training))

    gradients = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        trainer = make_trainer(points(model=Noisy))
        torch.rand(global_seed)
        gradients.append(trainer.gradient(trainer.initial_vector(), 4, 0.1, 0.1).gradient.copy())
    other_round = trainer.gradient(trainer.initial_vector(), 5, 0.1, 0.1).gradient
    assert np.array_equal(*gradients)
    assert not np.array_equal(gradients[0], other_round)


def test_making_a_trainer_leaves_the_global_generator_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    make_trainer().initial_vector()
    assert torch.equal(torch.rand(3), expected)


def test_everything_an_operator_reads_starts_on_64_bytes():
    class Unaligned(TensorData):
        def batch(self, indices):
            inputs, targets = super().batch(indices)
            memory = torch.empty(inputs.numel() + 1)
            shifted = memory[1:].view(inputs.shape)
            shifted.copy_(inputs)
            return shifted, targets

    data = points().train
    task = recording()
    task.train = Unaligned(*data._tensors)
    assert task.train.batch(torch.arange(4))[0].data_ptr() % ALIGNMENT
    trainer = make_trainer(task)
    trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1)
    for tensor in (*task.batch, *task.parameters):
        assert tensor.data_ptr() % ALIGNMENT == 0


def test_parameters_leave_memory_that_they_share_or_that_starts_elsewhere():
    memory = torch.arange(16.0)

    def sliced() -> nn.Module:
        model = nn.Linear(2, 3)
        model.weight.data = memory[1:7].view(3, 2)
        model.bias.data = memory[7:10]
        return model

    trainer = make_trainer(points(model=sliced))
    assert trainer.initial_vector().tolist() == list(range(1, 10))
    assert all(p.data_ptr() % ALIGNMENT == 0 for p in trainer.model.parameters())
    trainer.evaluate(np.zeros(9, np.float32))
    assert torch.equal(memory, torch.arange(16.0))


def test_peers_start_alike_and_draw_different_batches():
    first, second = recording(), recording()
    one, two = make_trainer(first, peer=0), make_trainer(second, peer=1)
    z = one.initial_vector()
    assert np.array_equal(z, two.initial_vector())
    assert one.start_model() == two.start_model()
    one.gradient(z, 0, 0.1, 0.1)
    two.gradient(z, 0, 0.1, 0.1)
    assert not torch.equal(first.batch[0], second.batch[0])


def test_another_seed_starts_elsewhere():
    one, two = make_trainer(seed=1), make_trainer(seed=2)
    assert not np.array_equal(one.initial_vector(), two.initial_vector())
    assert one.start_model() != two.start_model()


# Local steps and momentum


def test_local_steps_are_the_loop_written_by_hand():
    task = recording()
    trainer = make_trainer(task, local_steps=3, momentum="heavy-ball", beta=0.5, weight_decay=0.01)
    z = trainer.initial_vector()
    step = trainer.gradient(z, 4, 0.2, 0.3)

    plain = make_trainer(task, momentum="none")
    moved, m, total, losses = z.copy(), np.zeros_like(z), np.zeros_like(z), []
    for local in range(3):
        # With τ = 3, round 4 holds the batches 12, 13 and 14 of the schedule.
        one = plain.gradient(moved, 4 * 3 + local, 0.2, 0.0)
        m = 0.5 * m + one.gradient + np.float32(0.01) * moved
        total += m
        moved = moved - np.float32(0.3) * m
        losses.append(one.loss)
    np.testing.assert_allclose(step.gradient, total, rtol=1e-5, atol=1e-6)
    assert step.loss == pytest.approx(np.mean(losses))
    assert step.samples == 24


def test_weighted_steps_of_devices_add_up_to_those_of_all_samples():
    """Two devices with 24 and 72 samples, all of them in every batch: with weights n · 2 / 96 their mean gradient is
    that of all 96."""
    task = points()
    everything = all_indices(task)

    def gradient(indices: np.ndarray, weight: float) -> Vector:
        options = TrainingOptions(momentum="none", batch_size=len(indices), label_adjustment=False)
        trainer = Trainer(task, options, rounds=3, seed=1, peer=0, train_indices=indices, step_weight=weight)
        return trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1).gradient.copy()

    mean = (gradient(everything[:24], 0.5) + gradient(everything[24:], 1.5)) / 2
    np.testing.assert_allclose(mean, gradient(everything, 1.0), rtol=0, atol=1e-7)


@pytest.mark.parametrize("momentum", ["none", "nesterov", "qg", "adam", "muon"])
def test_a_weight_is_the_factor_of_every_step(momentum: str):
    """Adam forgets the scale of its gradients; and the second local step starts where the weighted first one ends."""
    task = points()

    def steps(weight: float, local_steps: int) -> Vector:
        options = TrainingOptions(momentum=momentum, batch_size=8, local_steps=local_steps, label_adjustment=False)
        trainer = Trainer(task, options, rounds=9, seed=1, peer=0, train_indices=all_indices(task), step_weight=weight)
        return trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1 / weight).gradient.copy()

    assert np.array_equal(steps(2.0, 1), np.float32(2.0) * steps(1.0, 1))
    np.testing.assert_allclose(steps(2.0, 3), 2 * steps(1.0, 3), rtol=1e-5, atol=1e-6)


def test_quasi_global_momentum_of_local_steps_is_the_mean_displacement_of_one():
    trainer = make_trainer(momentum="qg", local_steps=4, mu=0.0, beta=0.5)
    z = trainer.initial_vector()
    trainer.after_round(z, z - np.float32(0.4), rate=0.1)
    np.testing.assert_allclose(trainer.state()["momentum.m"], 0.4 / (4 * 0.1), rtol=1e-3)
    assert trainer.needs_displacement
    assert not make_trainer(momentum="nesterov").needs_displacement


def test_rate_follows_the_configured_schedule():
    trainer = make_trainer(schedule="step", learning_rate=0.8, rounds=100, warmup_rounds=4, step_factor=0.5)
    assert [trainer.rate(t) for t in (0, 1, 3, 49, 50, 75)] == pytest.approx([0.2, 0.4, 0.8, 0.8, 0.4, 0.2])


@pytest.mark.parametrize("momentum", ["nesterov", "qg", "adam", "muon"])
def test_training_goes_on_from_its_state_bit_for_bit(momentum: str):
    whole, first, second = (make_trainer(images("batch"), momentum=momentum, batch_size=4) for _ in range(3))
    z = whole.initial_vector()
    expected = descend(whole, z, range(4))
    middle = descend(first, z, range(2))
    second.restore(first.state())
    assert np.array_equal(descend(second, middle, range(2, 4)), expected)
    assert all(np.array_equal(a, second.state()[name]) for name, a in whole.state().items())


def test_state_of_another_model_is_refused():
    small, large = make_trainer(momentum="nesterov"), make_trainer(resolve_task("digits"), momentum="nesterov")
    large.gradient(large.initial_vector(), 0, 0.1, 0.1)
    with pytest.raises(ValueError, match="momentum m has shape"):
        small.restore(large.state())
    with pytest.raises(KeyError):
        make_trainer(images("batch")).restore(make_trainer().state())


def test_training_learns_digits():
    trainer = make_trainer(
        resolve_task("digits"), batch_size=32, momentum="nesterov", schedule="cosine", rounds=300, warmup_rounds=20
    )
    z = trainer.initial_vector()
    assert trainer.evaluate(z).accuracy < 0.3
    assert trainer.evaluate(descend(trainer, z, range(300))).accuracy > 0.95


# Evaluation


def test_evaluation_counts_each_sample_once_and_by_class():
    task = points()
    trainer = make_trainer(task)
    z = descend(trainer, trainer.initial_vector(), range(40))
    result = trainer.evaluate(z)
    assert NUM_TEST > 256  # more than one batch
    labels = task.test_data().labels.numpy()
    with torch.no_grad():
        logits = trainer.model(task.test_data().batch(torch.arange(NUM_TEST))[0])
    right = logits.argmax(1).numpy() == labels
    assert result.total.tolist() == np.bincount(labels).tolist()
    assert result.correct.tolist() == [int(right[labels == c].sum()) for c in range(3)]
    assert result.accuracy == pytest.approx(right.mean())
    assert result.loss == pytest.approx(float(nn.functional.cross_entropy(logits, torch.from_numpy(labels))), rel=1e-5)


def test_evaluation_splits_are_the_peers_own():
    task = points()
    trainer = Trainer(
        task,
        TrainingOptions(batch_size=4),
        rounds=10,
        seed=0,
        peer=0,
        train_indices=np.arange(20, dtype=np.int64),
        holdout_indices=np.array([90, 91, 95]),
    )
    z = trainer.initial_vector()
    labels = task.train_data().labels.numpy()
    assert trainer.evaluate(z, "train").total.tolist() == np.bincount(labels[:20], minlength=3).tolist()
    assert trainer.evaluate(z, "holdout").total.tolist() == np.bincount(labels[[90, 91, 95]], minlength=3).tolist()


def test_evaluation_of_an_empty_holdout_says_nothing():
    trainer = make_trainer()
    result = trainer.evaluate(trainer.initial_vector(), "holdout")
    assert (result.total.sum(), np.isnan(result.accuracy), result.loss) == (0, True, None)


@pytest.mark.parametrize("norm", ["evonorm", "batch"])
def test_evaluation_changes_nothing_that_training_reads(norm: str):
    undisturbed, evaluated = make_trainer(images(norm), batch_size=4), make_trainer(images(norm), batch_size=4)
    z = undisturbed.initial_vector()
    expected = descend(undisturbed, z, range(2))
    for t in range(2):
        evaluated.evaluate(z, "test")
        before = {name: value.copy() for name, value in evaluated.state().items()}
        evaluated.evaluate(z, "train")
        assert all(np.array_equal(before[name], value) for name, value in evaluated.state().items())
        z = descend(evaluated, z, range(t, t + 1))
    assert np.array_equal(z, expected)
    assert evaluated.model.training


def test_evaluation_takes_the_models_own_form_for_it():
    dropping = points(model=lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.9)))
    plain = points(model=lambda: nn.Sequential(nn.Linear(2, 3)))
    z = make_trainer(plain).initial_vector()
    assert make_trainer(dropping).evaluate(z).loss == make_trainer(plain).evaluate(z).loss


class MomentumEncoder(nn.Module):
    """A network with a frozen copy that follows it, and a table that grows with the batches seen."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(2, 3), nn.Linear(2, 3)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.register_buffer("seen", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for slow, quick in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    slow.data.lerp_(quick.data, 0.1)
        longer = torch.zeros(1 if self.seen is None else len(self.seen) + 1)
        self.register_buffer("seen", longer)
        return self.online(inputs) + 0.1 * self.target(inputs) + 0.01 * len(longer)

    def get_extra_state(self) -> dict[str, int]:
        return {"plain": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("rounds", [2, 5])
def test_a_model_with_a_moving_copy_goes_on_where_it_was(tmp_path: Path, rounds: int) -> None:
    def make() -> Trainer:
        trainer = make_trainer(OwnTask(points(model=MomentumEncoder), UserCode("tests")))
        trainer.try_own_task()
        return trainer

    undisturbed, stopped = make(), make()
    # The try leaves nothing of what the model has moved.
    assert stopped.model.seen is None
    assert torch.equal(stopped.model.target.weight, make_trainer(points(model=MomentumEncoder)).model.target.weight)
    z = undisturbed.initial_vector()
    z = descend(undisturbed, z, range(rounds))
    middle = descend(stopped, stopped.initial_vector(), range(rounds))
    stopped.evaluate(middle)
    state = {name: np.array(value) for name, value in stopped.state().items()}
    again = make()
    again.restore(state)
    assert len(again.model.seen) == rounds
    assert torch.equal(again.model.target.weight, undisturbed.model.target.weight)
    assert not torch.equal(again.model.target.weight, make().model.target.weight)
    np.testing.assert_array_equal(descend(again, middle, range(rounds, 6)), descend(undisturbed, z, range(rounds, 6)))
    undisturbed.save_model(z, tmp_path / "model.safetensors")
    assert torch.equal(undisturbed.portable_model(z).target.weight, undisturbed.model.target.weight)


def test_buffers_that_an_own_model_writes_in_evaluation_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 3)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    trainer = make_trainer(points(model=Counting))
    z = trainer.initial_vector()
    trainer.gradient(z, 0, 0.1, 0.1)
    trainer.evaluate(z)
    assert trainer.state()["buffer.calls"].tolist() == [1.0]


# What is trained


def test_only_the_named_parameters_are_trained_and_sent():
    # The name of a module stands for its parameters.
    trainer = make_trainer(only=("4", "2.bias"))
    assert trainer.layout.names == ("2.bias", "4.weight", "4.bias")
    frozen = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if name.startswith("0.")}
    z = trainer.initial_vector()
    assert np.abs(descend(trainer, z, range(10)) - z).min() > 0
    for name, before in frozen.items():
        after = dict(trainer.model.named_parameters())[name]
        assert torch.equal(before, after)
        assert not after.requires_grad  # no time goes into its gradient


def test_frozen_parameters_are_part_of_the_start_digest():
    assert make_trainer(only=("4.*",), seed=1).start_model() != make_trainer(only=("4.*",), seed=2).start_model()


def test_a_pattern_that_matches_nothing_is_refused_with_the_names():
    with pytest.raises(ConfigError, match=r"training\.only: matches no parameter \(got 'head\.\*'\); valid: 0\.weight"):
        make_trainer(only=("4.*", "head.*"))


def test_parameters_that_the_model_froze_are_not_trained():
    def frozen_first() -> nn.Module:
        model = points().model()
        model[0].requires_grad_(False)
        return model

    trainer = make_trainer(points(model=frozen_first))
    assert trainer.layout.names == ("2.weight", "2.bias", "4.weight", "4.bias")


def test_a_model_without_parameters_is_refused():
    with pytest.raises(DataError, match="no trainable parameters"):
        make_trainer(points(model=nn.Identity))


def test_a_half_precision_parameter_is_refused_by_name():
    with pytest.raises(DataError, match=r"parameter 0\.weight has type torch\.float16"):
        make_trainer(points(model=lambda: nn.Sequential(nn.Linear(2, 3).half())))


# Warm start


def test_warm_start_begins_where_the_saved_model_ended(tmp_path: Path):
    trained = make_trainer(images("batch"), batch_size=4)
    z = descend(trained, trained.initial_vector(), range(2))
    trained.save_model(z, tmp_path / "model.safetensors")
    warm = make_trainer(images("batch"), warm_start=str(tmp_path / "model.safetensors"), seed=99)
    assert np.array_equal(warm.initial_vector(), z)
    assert np.array_equal(
        warm.state()["buffer.stem.norm.running_mean"], trained.state()["buffer.stem.norm.running_mean"]
    )


def test_relative_warm_start_begins_at_the_base_folder(tmp_path: Path):
    task = points()
    make_trainer(task).save_model(make_trainer(task).initial_vector(), tmp_path / "m.safetensors")
    options = TrainingOptions(batch_size=8, warm_start="m.safetensors")
    start = {"rounds": 5, "seed": 3, "peer": 0, "train_indices": all_indices(task)}
    warm = Trainer(task, options, base=tmp_path, **start)
    assert np.array_equal(warm.initial_vector(), make_trainer(task).initial_vector())
    with pytest.raises(DataError, match=r"model file .*nowhere.* does not exist"):
        Trainer(task, options, base=tmp_path / "nowhere", **start)


def test_warm_start_sets_frozen_parameters_too(tmp_path: Path):
    first = make_trainer(seed=1)
    first.save_model(first.initial_vector(), tmp_path / "m.safetensors")
    second = make_trainer(seed=2, only=("4.*",), warm_start=str(tmp_path / "m.safetensors"))
    assert torch.equal(second.model[0].weight, first.model[0].weight)
    assert second.start_model() == first.start_model()


# What a task may get wrong


def test_labels_outside_the_classes_are_refused():
    task = points()
    task.num_classes = 2
    with pytest.raises(DataError, match="labels from 0 to 2, but num_classes is 2"):
        make_trainer(task)


def test_a_loss_that_is_no_scalar_is_refused():
    class Vectorial(RecordingPoints):
        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    plain = points()
    task = Vectorial(name="points", num_classes=3, model=plain.model, train=plain.train, test=plain.test)
    trainer = make_trainer(task)
    with pytest.raises(DataError, match=r"shape \[8\]; it must be a scalar"):
        trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1)


def test_make_model_has_to_return_a_module():
    with pytest.raises(DataError, match=r"returned a dict; it must return a torch\.nn\.Module"):
        make_trainer(points(model=dict))


def test_a_peer_without_samples_is_refused():
    with pytest.raises(DataError, match="peer 4 has no training samples"):
        Trainer(points(), TrainingOptions(), rounds=1, seed=0, peer=4, train_indices=np.empty(0, np.int64))


def test_indices_outside_the_training_set_are_a_broken_contract():
    with pytest.raises(LocalProtocolError, match=f"between 0 and {NUM_TRAIN - 1}"):
        Trainer(points(), TrainingOptions(), rounds=1, seed=0, peer=0, train_indices=np.array([NUM_TRAIN]))


@pytest.mark.parametrize(("device", "sentence"), [("gpu", "is not a PyTorch device"), ("meta", "runs on cpu or cuda")])
def test_a_device_that_does_not_exist_is_refused(device: str, sentence: str):
    with pytest.raises(ConfigError, match=rf"peer\.device: .*{sentence}"):
        Trainer(
            points(), TrainingOptions(), rounds=1, seed=0, peer=0, train_indices=all_indices(points()), device=device
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_cuda_device_is_refused():
    with pytest.raises(ConfigError, match="PyTorch finds 0 CUDA devices"):
        Trainer(
            points(), TrainingOptions(), rounds=1, seed=0, peer=0, train_indices=all_indices(points()), device="cuda"
        )


def blocks(width: int) -> nn.Module:
    """Two blocks between an embedding, which is the last layer too, and positions: as many as a block's last matrix has
    rows."""
    parts = [nn.Sequential(nn.LayerNorm((2, width // 2)), nn.Linear(width, 64), nn.Linear(64, width)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(64, width), nn.Embedding(width, 64), *parts)


@pytest.mark.parametrize(
    ("model", "hidden"),
    [
        (blocks(16), ["2.1", "2.2", "3.1", "3.2"]),
        (blocks(64), ["2.1", "2.2", "3.1", "3.2"]),
        (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)), ["1"]),
        (nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3), nn.LayerNorm((2, 4))), ["0"]),
        (nn.ModuleDict({"head": nn.Linear(8, 3), "body": nn.Linear(6, 8)}), ["body"]),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)), ["0", "2"]),
    ],
)
def test_matrices_between_embeddings_and_last_layer_are_hidden(model: nn.Module, hidden: list[str]) -> None:
    trained = dict(model.named_parameters())
    numbers = local_step.hidden_matrices(model, trained, 3)
    assert [list(trained)[number] for number in numbers] == [f"{name}.weight" for name in hidden]
