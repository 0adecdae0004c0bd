"""An own task with every member written out: a regression, which has no classes.

[training]
task = "own_task_in_full:make_task"
"""

import math

import torch
from sottovoce import RMSE
from torch import nn


class Waves:
    """(x, y) pairs of a sine with noise, computed when they are asked for."""

    def __init__(self, first: int, count: int) -> None:
        self.numbers = torch.arange(first, first + count)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def labels(self) -> torch.Tensor:
        # What label skew sorts by: here which of eight parts of the circle a sample lies in.
        return (self._angles(self.numbers) / (2 * math.pi) * 8).to(torch.int64)

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angles = self._angles(self.numbers[indices])
        noise = 0.05 * torch.sin(self.numbers[indices] * 12.9898)
        return torch.stack([angles.sin(), angles.cos()], dim=1), (torch.sin(3 * angles) + noise)[:, None]

    @staticmethod
    def _angles(numbers: torch.Tensor) -> torch.Tensor:
        return (numbers * 0.6180339887498949 % 1.0) * 2 * math.pi


class WaveTask:
    name = "waves"
    num_classes = 0
    metrics = (RMSE,)

    def __init__(self, hidden: int, tolerance: float) -> None:
        self.hidden, self.tolerance = hidden, tolerance

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def train_data(self) -> Waves:
        return Waves(0, 2000)

    def test_data(self) -> Waves:
        return Waves(2000, 500)

    def correct(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        inputs, targets = batch
        return (model(inputs) - targets).abs().squeeze(1) < self.tolerance

    def measure(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        inputs, targets = batch
        return {"squared_error": (model(inputs) - targets) ** 2}

    def augment(self, batch: tuple[torch.Tensor, ...], uniforms: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs, targets = batch
        return inputs + 0.02 * (uniforms[:, :2] - 0.5), targets


def make_task(*, hidden: int = 64, tolerance: float = 0.25) -> WaveTask:
    return WaveTask(hidden, tolerance)
