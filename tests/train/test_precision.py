"""`training.precision`: which models can compute in 8 bits, which do unless told otherwise, and that a run goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from peer.config.options import TrainingOptions
from peer.errors import ConfigError
from peer.train.eight_bit import Network
from peer.train.local_step import Trainer
from peer.train.model_file import load_model_
from peer.train.precision import precision_of
from peer.train.stacked import StackedTrainer
from peer.train.tasks import resolve_task
from tests.train.small_tasks import points
from tests.train.test_stacked import all_gradients

DIGITS = resolve_task("digits", {"hidden": 32})


def digits_trainer(**options: object) -> Trainer:
    shard = np.arange(0, len(DIGITS.train_data()), 3)
    chosen = TrainingOptions(**{"batch_size": 16, "schedule": "constant", "warmup_rounds": 0, **options})  # type: ignore[arg-type]
    return Trainer(DIGITS, chosen, rounds=100, seed=4, peer=2, train_indices=shard)


def train(trainer: Trainer, z: np.ndarray, first: int, last: int) -> np.ndarray:
    for t in range(first, last):
        step = trainer.gradient(z, t, 0.1, 0.1)
        z = z - np.float32(0.1) * step.gradient
    return z


def test_digits_train_in_8_bits_and_own_tasks_in_float32_unless_told_otherwise() -> None:
    assert precision_of(DIGITS, TrainingOptions()) == "int8"
    assert precision_of(DIGITS, TrainingOptions(precision="float32")) == "float32"
    assert precision_of(points(), TrainingOptions()) == "float32"
    assert isinstance(digits_trainer().model, Network)
    assert not isinstance(digits_trainer(precision="float32").model, Network)


def test_both_precisions_start_from_the_same_vector() -> None:
    assert np.array_equal(digits_trainer().initial_vector(), digits_trainer(precision="float32").initial_vector())


def test_a_model_of_float32_layers_is_refused() -> None:
    task, options = points(), TrainingOptions(precision="int8")
    with pytest.raises(ConfigError, match=r"training\.precision") as caught:
        Trainer(task, options, rounds=1, seed=0, peer=0, train_indices=np.arange(9))
    assert "points" in str(caught.value)


def test_an_own_task_computes_in_8_bits_where_its_model_takes_layers() -> None:
    task = points()
    task.model = lambda layers: layers.network({"hidden": layers.linear(2, 8), "relu": layers.relu(),
                                                "out": layers.linear(8, 3)})  # fmt: skip
    trainer = Trainer(task, TrainingOptions(precision="int8"), rounds=1, seed=0, peer=0, train_indices=np.arange(96))
    z = train(trainer, trainer.initial_vector(), 0, 60)
    assert trainer.evaluate(z).accuracy > 0.8


def test_what_is_restored_goes_on_with_the_same_bits() -> None:
    whole, first, second = digits_trainer(), digits_trainer(), digits_trainer()
    expected = train(whole, whole.initial_vector(), 0, 12)
    half = train(first, first.initial_vector(), 0, 5)
    first.evaluate(half)
    second.restore(first.state())
    assert np.array_equal(train(second, half, 5, 12), expected)
    assert any(name.endswith("running_range") for name in first.state())


def test_without_its_ranges_it_would_not() -> None:
    """The test above would notice a range that is missing from the state."""
    whole, other = digits_trainer(momentum="none"), digits_trainer(momentum="none")
    half = train(whole, whole.initial_vector(), 0, 5)
    assert not np.array_equal(train(whole, half, 5, 12), train(other, half, 5, 12))


def test_a_stack_of_peers_computes_8_bits_one_by_one_with_the_bits_of_single_trainers() -> None:
    shards = [np.arange(0, 700), np.arange(700, 1400)]
    options = TrainingOptions(batch_size=16)
    stacked = StackedTrainer(DIGITS, options, rounds=9, seed=1, shards=shards, how="stacked")
    singles = [
        Trainer(DIGITS, options, rounds=9, seed=1, peer=peer, train_indices=shard) for peer, shard in enumerate(shards)
    ]
    z = np.stack([stacked.initial_vector()] * 2)
    for t in range(3):
        found = all_gradients(stacked, z, t, 0.1).gradients
        expected = np.stack([single.gradient(z[peer], t, 0.1, 0.1).gradient for peer, single in enumerate(singles)])
        assert np.array_equal(found, expected)
        z = z - np.float32(0.1) * found


@pytest.mark.parametrize("written", ["int8", "float32"])
@pytest.mark.parametrize("read", ["int8", "float32"])
def test_model_files_fit_either_precision(written: str, read: str, tmp_path: Path) -> None:
    writer, reader = digits_trainer(precision=written), digits_trainer(precision=read)
    z = train(writer, writer.initial_vector(), 0, 2)
    writer.save_model(z, tmp_path / "model.safetensors")
    load_model_(reader.model, tmp_path / "model.safetensors")
    found = torch.cat([parameter.detach().reshape(-1) for parameter in reader.model.parameters()])
    assert np.array_equal(found.numpy(), z)


def test_the_averaged_model_gets_ranges_of_its_own() -> None:
    trainer = digits_trainer()
    z = train(trainer, trainer.initial_vector(), 0, 3)
    own = {name: value.copy() for name, value in trainer.state().items() if name.startswith("buffer.")}
    alone, averaged = trainer.evaluate(z), trainer.evaluate(z, averaged=True)
    assert alone.loss != averaged.loss
    assert abs(alone.loss - averaged.loss) < 0.05
    for name, value in trainer.state().items():
        if name in own:
            assert np.array_equal(value, own[name])
