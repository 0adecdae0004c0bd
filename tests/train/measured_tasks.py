"""Tasks with metrics of their own, whose batches are dicts."""

from __future__ import annotations

import torch
from torch import nn

from peer.train.data import Classification, TensorData
from peer.train.metrics import F1, PERPLEXITY, RMSE, TEST_LOSS, Metric
from peer.train.task import Task

Named = dict[str, torch.Tensor]


class Lines:
    """x and 3x − 1, with a quarter of the numbers at each of four places."""

    def __init__(self, count: int) -> None:
        self.x = torch.linspace(-1, 1, count)[:, None]

    def __len__(self) -> int:
        return len(self.x)

    @property
    def labels(self) -> torch.Tensor:
        return torch.arange(len(self)) * 4 // len(self)

    def batch(self, indices: torch.Tensor) -> Named:
        return {"x": self.x[indices], "y": 3 * self.x[indices] - 1}


class OtherKeys(Lines):
    def batch(self, indices: torch.Tensor) -> Named:
        batch = super().batch(indices)
        return batch if len(indices) == 8 else {**batch, "z": batch["x"]}


class Regression:
    """Without `correct`: there is no accuracy."""

    name = "lines"
    num_classes = 0

    def __init__(self, where: str = "") -> None:
        self.where = where
        self.metrics: object = (RMSE, TEST_LOSS, PERPLEXITY)
        if where == "metric":
            self.metrics = (Metric("ratio", lambda means: means["nothing"]),)
        if where == "metric-text":
            self.metrics = (Metric("text", lambda means: "good"),)  # type: ignore[arg-type, return-value]

    def make_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: Named) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def measure(self, model: nn.Module, batch: Named) -> Named:
        if self.where == "measure":
            raise KeyError("measure")
        error = (model(batch["x"]) - batch["y"]) ** 2
        return {"measure-list": [error], "measure-float": {"squared_error": 1.0}}.get(  # type: ignore[return-value]
            self.where, {"squared_error": error}
        )

    def train_data(self) -> Lines:
        return Lines(64)

    def test_data(self) -> Lines:
        return OtherKeys(20) if self.where == "keys" else Lines(20)

    def augment(self, batch: Named, uniforms: torch.Tensor) -> Named:
        # In another order: what counts are the keys.
        return {"y": batch["y"], "x": batch["x"]}


def regression(*, where: str = "") -> Task:
    return Regression(where)  # type: ignore[return-value]


class NamedPoints(TensorData):
    def batch(self, indices: torch.Tensor) -> Named:  # type: ignore[override]
        first, second = super().batch(indices)
        return {"points": first, "target": second}


class Threshold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, *, points: torch.Tensor) -> torch.Tensor:
        return self.linear(points)


def positives(model: nn.Module, batch: Named) -> Named:
    found, wanted = model(points=batch["points"]).argmax(1) == 1, batch["target"] == 1
    return {"true_positive": found & wanted, "false_positive": found & ~wanted, "false_negative": ~found & wanted}


def detector() -> Classification:
    """Return a classification whose batches are dicts, judged by F1; one sample in four is positive."""

    def data(count: int, seed: int) -> NamedPoints:
        points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
        return NamedPoints(points, (points.sum(1) > 0.95).to(torch.int64))

    return Classification(
        name="detector",
        num_classes=2,
        model=Threshold,
        train=data(400, 1),
        test=data(200, 2),
        metrics=(F1,),
        measures=positives,  # type: ignore[arg-type]
    )


def wrong_metrics(*, metrics: str) -> Task:
    task = Regression()
    task.metrics = {
        "list of names": ["RMSE"],
        "twice": (RMSE, RMSE),
        "accuracy": (Metric("accuracy", lambda means: 1.0),),
        "empty name": (Metric("", lambda means: 1.0),),
        "many": tuple(Metric(f"m{number}", lambda means: 1.0) for number in range(17)),
    }[metrics]
    return task  # type: ignore[return-value]
