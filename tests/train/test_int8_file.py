"""Models with 8-bit weights on disk: small, exact, and refused when they do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from peer.config.options import TrainingOptions
from peer.errors import ConfigError, DataError
from peer.train.int8_file import FORMAT, load_int8, quantized, save_int8
from peer.train.local_step import Trainer, Vector
from peer.train.task import Task
from peer.train.tasks import resolve_task
from tests.train.small_tasks import all_indices, descend, points


@pytest.fixture(scope="module")
def trained() -> tuple[Trainer, Vector]:
    """The digits after a few rounds in full precision."""
    task = resolve_task("digits", {"hidden": 24})
    options = TrainingOptions(precision="float32", batch_size=32, warmup_rounds=0)
    trainer = Trainer(task, options, rounds=80, seed=3, peer=0, train_indices=np.arange(1437, dtype=np.int64))
    return trainer, descend(trainer, trainer.initial_vector(), range(80))


def digits() -> Task:
    return resolve_task("digits", {"hidden": 24})


def test_matrices_are_codes_and_everything_else_is_not(trained: tuple[Trainer, Vector], tmp_path: Path):
    trainer, z = trained
    save_int8(trainer.in_precision(z, "int8"), tmp_path / "m.safetensors", metadata={"task": "digits"})
    stored = load_file(tmp_path / "m.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items() if "linear" in name and "output" not in name} == {
        "linear1.weight": torch.int8,
        "linear1.weight.scale": torch.float32,
        "linear1.bias": torch.float32,
        "linear2.weight": torch.int8,
        "linear2.weight.scale": torch.float32,
        "linear2.bias": torch.float32,
    }
    for name in ("linear1", "linear2"):
        weight = trainer.model.get_parameter(f"{name}.weight")
        error = stored[f"{name}.weight"].float() * stored[f"{name}.weight.scale"] - weight
        assert error.abs().max() <= 0.501 * stored[f"{name}.weight.scale"]
        assert stored[f"{name}.weight"].abs().max() == 127
    ranges = [name for name in stored if name.endswith("running_range")]
    assert len(ranges) >= 2
    assert all(stored[name][0] < stored[name][1] for name in ranges if "linear2" not in name)


def test_a_model_from_the_file_computes_what_was_written(trained: tuple[Trainer, Vector], tmp_path: Path):
    trainer, z = trained
    written = trainer.in_precision(z, "int8")
    save_int8(written, tmp_path / "m.safetensors")
    loaded = load_int8(digits(), tmp_path / "m.safetensors")
    batch = trainer.task.test_data().batch(torch.arange(100))[0]
    with torch.no_grad():
        assert torch.allclose(loaded(batch), written.eval()(batch), rtol=1e-5, atol=1e-5)
    # Nothing that was a matrix of float32 is one again.
    assert {tensor.dtype for tensor in loaded.state_dict().values() if tensor.ndim > 1} == {torch.int8}
    full = trainer.judge(trainer.in_precision(z, "float32")).accuracy
    assert full > 0.9
    assert abs(trainer.judge(loaded).accuracy - full) < 0.02


def test_writing_what_was_read_gives_the_same_codes(trained: tuple[Trainer, Vector], tmp_path: Path):
    trainer, z = trained
    save_int8(trainer.in_precision(z, "int8"), tmp_path / "first")
    save_int8(load_int8(digits(), tmp_path / "first"), tmp_path / "second")
    first, second = load_file(tmp_path / "first"), load_file(tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_the_file_has_a_quarter_of_the_size(trained: tuple[Trainer, Vector], tmp_path: Path):
    trainer, z = trained
    save_int8(trainer.in_precision(z, "int8"), tmp_path / "small")
    trainer.save_model(z, tmp_path / "large")
    numbers = trainer.layout.size
    assert (tmp_path / "large").stat().st_size >= 4 * numbers
    assert (tmp_path / "small").stat().st_size < 1.2 * numbers + 1500


def test_a_weight_of_zeros_stays_zero():
    codes, scale = quantized(torch.zeros(3, 4))
    assert (codes.tolist(), scale) == (torch.zeros(3, 4).tolist(), 0.0)


def test_a_task_that_knows_float32_only_is_refused(tmp_path: Path):
    task = points()
    trainer = Trainer(task, TrainingOptions(), rounds=5, seed=0, peer=0, train_indices=all_indices(task))
    with pytest.raises(ConfigError, match=r"training\.precision"):
        trainer.in_precision(trainer.initial_vector(), "int8")
    with pytest.raises(ConfigError, match=r"training\.precision"):
        load_int8(task, tmp_path / "m.safetensors")


def test_files_that_do_not_fit_are_refused(trained: tuple[Trainer, Vector], tmp_path: Path):
    trainer, z = trained
    path = tmp_path / "m.safetensors"
    with pytest.raises(DataError, match=r"model file .* does not exist"):
        load_int8(digits(), path)
    path.write_bytes(b"no such file")
    with pytest.raises(DataError, match="not a valid safetensors"):
        load_int8(digits(), path)
    trainer.save_model(z, path)
    with pytest.raises(DataError, match=f"is not of the format {FORMAT}"):
        load_int8(digits(), path)
    save_int8(trainer.in_precision(z, "int8"), path)
    with pytest.raises(DataError, match=r"linear1\.weight has shape \[24, 64\], but the model needs \[25, 64\]"):
        load_int8(resolve_task("digits", {"hidden": 25}), path)
    good = load_file(path)
    lies = [
        ({"linear1.weight.scale": None}, r"lacks linear1\.weight\.scale"),
        ({"linear1.weight.scale": torch.tensor([torch.nan])}, "expected int8 codes"),
        ({"linear1.weight": good["linear1.weight"].float()}, "expected int8 codes"),
        ({"linear2.bias": torch.full((10,), torch.inf)}, r"linear2\.bias contains values that are not finite"),
    ]
    for change, sentence in lies:
        tensors = {name: tensor for name, tensor in {**good, **change}.items() if tensor is not None}
        save_file(tensors, path, metadata={"format": FORMAT})
        with pytest.raises(DataError, match=sentence):
            load_int8(digits(), path)
