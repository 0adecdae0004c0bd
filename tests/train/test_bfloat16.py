"""`training.precision = "bfloat16"`: which types go where, and what it does and does not change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from peer.config.options import TrainingOptions
from peer.native import lib
from peer.train.bfloat16 import compute_in_bfloat16_, computes_in_bfloat16
from peer.train.full_precision.norms import NORMS, Norm
from peer.train.local_step import Trainer, Vector
from peer.train.model_file import load_model_
from peer.train.models.resnet import resnet20
from peer.train.precision import precision_of
from peer.train.stacked import StackedTrainer
from peer.train.task import Task
from peer.train.tasks import resolve_task
from tests.train.small_tasks import descend, images, points
from tests.train.test_stacked import all_gradients

DIGITS = resolve_task("digits", {"hidden": 32})


def trainer_of(
    task: Task, *, precision: str = "bfloat16", peer: int = 1, rounds: int = 20, **chosen: object
) -> Trainer:
    settings = {"batch_size": 4, "schedule": "constant", "warmup_rounds": 0, **chosen}
    options = TrainingOptions(precision=precision, **settings)  # type: ignore[arg-type]
    everything = np.arange(len(task.train_data()), dtype=np.int64)
    return Trainer(task, options, rounds=rounds, seed=4, peer=peer, train_indices=everything)


def kept_types(model: nn.Module, inputs: torch.Tensor) -> set[torch.dtype]:
    """Return the types of the activations and copies of weights that are kept for the backward pass."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    types = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 1000 and tensor.untyped_storage().data_ptr() not in own:
            types.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs)
    return types


@pytest.mark.skipif(lib is None, reason="the torch operators of EvoNorm keep float32")
def test_what_is_kept_for_the_backward_pass_is_bfloat16() -> None:
    model, pixels = resnet20(), torch.randn(2, 3, 32, 32)
    assert kept_types(model, pixels) == {torch.float32}
    compute_in_bfloat16_(model)
    assert kept_types(model, pixels) == {torch.bfloat16}


@pytest.mark.parametrize("norm", NORMS)
def test_layers_pass_bfloat16_on_and_norms_add_up_in_float32(norm: Norm) -> None:
    torch.manual_seed(3)
    model = resnet20(norm=norm)
    compute_in_bfloat16_(model)
    # Far from zero beside their spread: sums or squares in bfloat16 would lose them.
    shifted = (20 + torch.randn(8, 16, 16, 16)).bfloat16()
    seen = {}
    layer = model.get_submodule("stem.norm")
    layer.register_forward_hook(lambda _, inputs, output: seen.update(x=inputs[0], y=output))
    logits = model(torch.randn(8, 3, 32, 32))
    assert seen["x"].dtype == seen["y"].dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    short, wide = layer(shifted).float(), layer(shifted.float())
    assert (short - wide).abs().max() <= 2.0**-8 * wide.abs().max()


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_float32_and_point_where_those_of_float32_do(norm: Norm) -> None:
    half, full = (trainer_of(images(norm), precision=precision, batch_size=24) for precision in ("bfloat16", "float32"))
    z = full.initial_vector()
    assert np.array_equal(z, half.initial_vector())
    a, b = (trainer.gradient(z, 0, 0.1, 0.1) for trainer in (half, full))
    assert a.gradient.dtype == np.float32
    assert a.gradient @ b.gradient > 0.95 * np.linalg.norm(a.gradient) * np.linalg.norm(b.gradient)
    assert a.loss == pytest.approx(b.loss, abs=0.01)
    assert a.loss != b.loss
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}


def test_digits_reach_what_they_reach_in_float32() -> None:
    """Four seeds each; the means may differ by twice the standard error of their difference, or half a point."""
    reached: dict[str, list[float]] = {"bfloat16": [], "float32": []}
    for precision, accuracies in reached.items():
        for peer in range(4):
            trainer = trainer_of(DIGITS, precision=precision, peer=peer, batch_size=32, momentum="nesterov", rounds=150)
            losses: list[float] = []
            z = trainer.initial_vector()
            for t in range(150):
                step = trainer.gradient(z, t, 0.05, 0.05)
                z = z - np.float32(0.05) * step.gradient
                losses.append(step.loss)
            assert np.mean(losses[-10:]) < 0.2 * np.mean(losses[:5])
            accuracies.append(trainer.evaluate(z).accuracy)
    half, full = np.array(reached["bfloat16"]), np.array(reached["float32"])
    error = np.sqrt(half.var(ddof=1) / 4 + full.var(ddof=1) / 4)
    assert half.min() > 0.9
    assert abs(half.mean() - full.mean()) < max(2 * error, 0.005)


@pytest.mark.parametrize("task", [points(), images("evonorm"), images("batch")], ids=["points", "evonorm", "batch"])
def test_what_is_restored_goes_on_with_the_same_bits(task: Task) -> None:
    whole, first, second = (trainer_of(task, momentum="nesterov") for _ in range(3))
    expected = descend(whole, whole.initial_vector(), range(4))
    half = descend(first, first.initial_vector(), range(2))
    first.evaluate(half)
    second.restore(first.state())
    assert np.array_equal(descend(second, half, range(2, 4)), expected)


@pytest.mark.parametrize("how", ["auto", "stacked", "one by one"])
def test_a_stack_computes_convolutions_with_the_bits_of_single_trainers(how: str) -> None:
    assert_stacked(images("evonorm"), how, rtol=0.0, atol=0.0)


def test_a_stack_of_linear_layers_computes_the_same_up_to_rounding() -> None:
    assert_stacked(points(), "stacked", rtol=0.02, atol=0.02)


def assert_stacked(task: Task, how: str, *, rtol: float, atol: float) -> None:
    options = TrainingOptions(precision="bfloat16", batch_size=4)
    shards = [np.arange(0, 12), np.arange(12, 24)]
    stacked = StackedTrainer(task, options, rounds=5, seed=1, shards=shards, how=how)  # type: ignore[arg-type]
    singles = [
        Trainer(task, options, rounds=5, seed=1, peer=peer, train_indices=shard) for peer, shard in enumerate(shards)
    ]
    z = np.stack([stacked.initial_vector()] * 2)
    found = all_gradients(stacked, z, 0, 0.1).gradients
    expected = np.stack([single.gradient(z[peer], 0, 0.1, 0.1).gradient for peer, single in enumerate(singles)])
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def test_evaluation_computes_in_the_same_precision() -> None:
    half, full = (trainer_of(DIGITS, precision=precision) for precision in ("bfloat16", "float32"))
    z: Vector = descend(full, full.initial_vector(), range(20))
    assert 0 < abs(half.evaluate(z).loss - full.evaluate(z).loss) < 0.01


def test_a_task_may_ask_for_it_and_model_files_fit_every_precision(tmp_path: Path) -> None:
    task = points()
    task.precision = "bfloat16"
    assert precision_of(task, TrainingOptions()) == "bfloat16"
    trainer, plain = trainer_of(task, precision="auto"), trainer_of(task, precision="float32")
    assert computes_in_bfloat16(trainer.model)
    assert not computes_in_bfloat16(plain.model)
    z = descend(trainer, trainer.initial_vector(), range(2))
    trainer.save_model(z, tmp_path / "model.safetensors")
    load_model_(plain.model, tmp_path / "model.safetensors")
    assert np.array_equal(plain.vector(), z)
    assert not computes_in_bfloat16(trainer.in_precision(z, "float32"))


def test_models_may_return_more_than_a_tensor() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, *, twice: bool = False) -> dict[str, object]:
            y = self.linear(x)
            return {"both": (y, [y + y]) if twice else (y,), "inputs": x, "count": len(x)}

    model = Two()
    compute_in_bfloat16_(model)
    found = model(torch.ones(4, 3), twice=True)
    (y, (doubled,)), inputs, count = found.values()
    assert y.dtype == doubled.dtype == inputs.dtype == torch.float32
    assert torch.equal(doubled, 2 * y)
    assert torch.equal(y, y.bfloat16().float())
    assert count == 4
