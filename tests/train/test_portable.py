"""Models in forms that load elsewhere: what stays free, what is handed over by name, what cannot be exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from peer.errors import DataError
from peer.train.data import TensorData
from peer.train.models.resnet import resnet20
from peer.train.portable import OnnxModel, check_onnx, example_of, save_onnx, save_onnx_int8, trace
from peer.train.task import Task
from peer.train.tasks import resolve_task
from tests.train.small_tasks import points


class Texts:
    """Pieces of text of 8 or 16 numbers."""

    labels = torch.arange(64) % 2

    def __len__(self) -> int:
        return 64

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        length = 16 if int(indices.max()) > 40 else 8
        return indices[:, None].expand(-1, length) % 11, indices % 2


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(11, 4), nn.Linear(4, 2)

    def forward(self, pieces: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.embedding(pieces).mean(1))
        return result


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(inputs)
        return result if result.sum().item() > 0 else -result


def test_lengths_in_which_batches_differ_stay_free(tmp_path: Path) -> None:
    example = example_of(points(), Texts())
    assert example.free == (frozenset({0, 1}),)
    model = Bag().eval()
    save_onnx(trace(model, example, "bag"), tmp_path / "m.onnx", "bag")
    check_onnx(model, tmp_path / "m.onnx", example, "bag")
    longer = torch.arange(24)[None] % 11
    torch.testing.assert_close(OnnxModel(tmp_path / "m.onnx")(longer), model(longer).detach())


def test_inputs_of_dicts_keep_their_names(tmp_path: Path) -> None:
    task: Task = resolve_task("tests.train.measured_tasks:detector")
    data = task.train_data()
    example = example_of(task, data)
    assert example.names == ("points",)
    model = task.make_model().eval()
    save_onnx(trace(model, example, task.name), tmp_path / "m.onnx", task.name)
    assert check_onnx(model, tmp_path / "m.onnx", example, task.name) == ["points"]


def test_a_model_that_branches_on_values_is_named() -> None:
    with pytest.raises(DataError, match=r"the model of task points cannot be exported by torch\.export: \S"):
        trace(Branches().eval(), example_of(points(), points().train_data()), "points")


def test_a_file_of_another_model_does_not_pass_for_the_export(tmp_path: Path) -> None:
    task = points()
    example = example_of(task, task.train_data())
    save_onnx(trace(task.make_model().eval(), example, "points"), tmp_path / "m.onnx", "points")
    with pytest.raises(DataError, match="ONNX Runtime computes other values than PyTorch"):
        check_onnx(task.make_model().eval(), tmp_path / "m.onnx", example, "points")


@pytest.mark.slow
def test_a_network_of_convolutions_keeps_its_answers_in_int8(tmp_path: Path) -> None:
    torch.manual_seed(1)
    images = torch.randn(64, 3, 8, 8)
    model = resnet20(norm="evonorm").eval()
    data = TensorData(images, torch.arange(64) % 10)
    example = example_of(points(), data)
    save_onnx(trace(model, example, "images"), tmp_path / "m.onnx", "images")
    check_onnx(model, tmp_path / "m.onnx", example, "images")
    save_onnx_int8(tmp_path / "m.onnx", tmp_path / "m.int8.onnx", data, seed=0)
    expected, found = model(images).detach(), OnnxModel(tmp_path / "m.int8.onnx")(images)
    assert float((found - expected).norm() / expected.norm()) < 0.2
    assert (tmp_path / "m.int8.onnx").stat().st_size < 0.5 * (tmp_path / "m.onnx").stat().st_size
