"""A task that fails in the place of its choice, as own code does. Tests look up the lines by what they raise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from peer.errors import ConfigError
from peer.train.data import Classification, TensorData
from peer.train.task import Task


class BackwardFails(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise KeyError("backward")


class Model(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.linear, self.norm = where, nn.Linear(2, 2), nn.BatchNorm1d(2)
        if where == "model":
            raise KeyError("model")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise KeyError("forward")
        if self.where == "vmap" and float(inputs.sum().item()) > 0:
            inputs = inputs + 1
        outputs = self.norm(self.linear(inputs))
        return BackwardFails.apply(outputs) if self.where == "backward" else outputs


class Samples:
    """64 points in two classes."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.points = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        if self.where == "len":
            raise KeyError("len")
        return len(self.points)

    @property
    def labels(self) -> Any:
        if self.where == "labels":
            raise KeyError("labels")
        labels = torch.arange(64) % 2
        return {"labels-list": labels.tolist(), "labels-float": labels.float()}.get(self.where, labels)

    def batch(self, indices: torch.Tensor) -> Any:
        if self.where == "batch":
            raise KeyError("batch")
        batch = self.points[indices], indices % 2
        return {
            "batch-numpy": (batch[0].numpy(), batch[1]),
            "batch-tensor": batch[0],
        }.get(self.where, batch)


class Broken:
    name = "broken"
    num_classes = 2

    def __init__(self, where: str) -> None:
        self.where, self.losses = where, 0

    def make_model(self) -> nn.Module:
        return Model(self.where)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Any:
        if self.where == "loss":
            raise KeyError("loss")
        self.losses += 1
        if self.where == "later" and self.losses == 10:
            raise KeyError("later")
        if self.where == "loss-refuses":
            raise ConfigError("too few lamps", key="training.task_options.lamps")
        if self.where == "interrupt":
            raise KeyboardInterrupt
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if self.where == "nan-later" and self.losses == 10:
            return loss * float("nan")
        return {
            "loss-vector": loss.repeat(3),
            "loss-float": float(loss.detach()) if self.where == "loss-float" else None,
            "loss-detached": loss.detach(),
            "loss-of-nothing": torch.ones((), requires_grad=True) * 2,
            "loss-nan": loss * float("nan"),
        }.get(self.where, loss)

    def adjusted_loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...], adjustment: torch.Tensor) -> Any:
        if self.where == "adjusted_loss":
            raise KeyError("adjusted_loss")
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs) + adjustment, targets)
        return loss[None] if self.where == "adjusted_loss-vector" else loss

    def train_data(self) -> Samples:
        if self.where == "train_data":
            raise KeyError("train_data")
        return Samples(self.where)

    def test_data(self) -> Samples:
        if self.where == "test_data":
            raise KeyError("test_data")
        return Samples("")

    def correct(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Any:
        if self.where == "correct":
            raise KeyError("correct")
        right = model(batch[0]).argmax(1) == batch[1]
        return {"correct-mean": right.float().mean(), "correct-numpy": np.ones(8, bool)}.get(self.where, right)

    def augment(self, batch: tuple[torch.Tensor, ...], uniforms: torch.Tensor) -> Any:
        if self.where == "augment":
            raise KeyError("augment")
        return None if self.where == "augment-none" else batch


def make_task(*, where: str = "") -> Task:
    if where == "make_task":
        raise KeyError("make_task")
    if where == "exit":
        raise SystemExit("exit")
    return Broken(where)


def misfit() -> Task:
    """Return a classification whose model, of torch's layers alone, does not fit its data."""
    data = TensorData(torch.randn(64, 2), torch.arange(64) % 2)
    return Classification(name="misfit", num_classes=2, model=lambda: nn.Linear(3, 2), train=data, test=data)
