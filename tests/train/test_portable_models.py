"""A saved model loads into the task's model in float32, in whatever precision it trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from peer.config.options import TrainingOptions
from peer.train.data import Classification, TensorData
from peer.train.full_precision.norms import NORMS, Norm
from peer.train.layers import FULL_PRECISION, Layers
from peer.train.local_step import Trainer
from peer.train.models.resnet import resnet20


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("norm", NORMS)
def test_what_was_trained_loads_strictly(norm: Norm, precision: str, tmp_path: Path) -> None:
    pixels = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    data = TensorData(pixels, torch.arange(16) % 10)

    def model(layers: Layers = FULL_PRECISION) -> torch.nn.Module:
        return resnet20(norm=norm, layers=layers)

    task = Classification(name="images", num_classes=10, model=model, train=data, test=data)
    options = TrainingOptions(batch_size=4, precision=precision)  # type: ignore[arg-type]
    trainer = Trainer(task, options, rounds=1, seed=0, peer=0, train_indices=np.arange(16))
    z = trainer.initial_vector()
    trainer.gradient(z, 0, 0.1, 0.1)
    trainer.save_model(z, tmp_path / "m.safetensors")
    fresh = task.make_model()
    fresh.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    np.testing.assert_array_equal(torch.cat([p.detach().reshape(-1) for p in fresh.parameters()]).numpy(), z)
