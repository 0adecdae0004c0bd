"""Small tasks for the tests: quick, and with every kind of layer that the local step has to carry."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from peer.train.data import Classification, TensorData, crop_and_flip
from peer.train.full_precision.norms import Norm
from peer.train.local_step import Trainer, Vector
from peer.train.models.resnet import resnet20

NUM_TRAIN, NUM_TEST = 96, 300


def points(*, model: type[nn.Module] | None = None) -> Classification:
    """Return three classes of points in the plane, for a small network with a frozen layer in its middle."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    return Classification(
        name="points", num_classes=3, model=model or make, train=_points(NUM_TRAIN, 1), test=_points(NUM_TEST, 2)
    )


def normed_points() -> Classification:
    """Return the points for a network with a batch norm."""
    task = points()
    task.model = lambda: nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return task


def _points(count: int, seed: int) -> TensorData:
    numbers = np.random.default_rng(seed)
    labels = numbers.integers(0, 3, count)
    centres = np.array([[0.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    inputs = centres[labels] + 0.5 * numbers.normal(size=(count, 2))
    return TensorData(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels))


def images(norm: Norm, *, augmented: bool = False) -> Classification:
    """Return random colour images for ResNet-20."""
    generator = torch.Generator().manual_seed(3)
    pixels, labels = torch.randn(24, 3, 32, 32, generator=generator), torch.arange(24) % 10
    data = TensorData(pixels, labels)
    return Classification(
        name="images",
        num_classes=10,
        model=lambda: resnet20(norm=norm),
        train=data,
        test=data,
        augmentation=crop_and_flip if augmented else None,
    )


def all_indices(task: Classification) -> np.ndarray:
    return np.arange(len(task.train_data()), dtype=np.int64)


def descend(trainer: Trainer, z: Vector, rounds: range) -> Vector:
    """Return z after these rounds of plain local training."""
    for t in rounds:
        rate = trainer.rate(t)
        step = trainer.gradient(z, t, rate, rate)
        before, z = z, z - np.float32(rate) * step.gradient
        trainer.after_round(before, z, rate)
    return z
