"""An own task in a few lines: a classifier on a CSV file whose last column is the class.

[training]
task = "own_task:make_task"
task_options = { hidden = 32 }

[data]
directory = "sensor"
"""

from pathlib import Path

import numpy as np
import torch
from sottovoce import Classification, TensorData
from torch import nn


def make_task(*, hidden: int = 16, directory: str = ".") -> Classification:
    def read(name: str) -> TensorData:
        table = np.loadtxt(Path(directory) / name, delimiter=",", skiprows=1, dtype=np.float32, ndmin=2)
        return TensorData(torch.from_numpy(table[:, :-1].copy()), torch.from_numpy(table[:, -1].astype(np.int64)))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    return Classification(
        name="sensor", num_classes=3, model=model, train=lambda: read("train.csv"), test=lambda: read("test.csv")
    )
