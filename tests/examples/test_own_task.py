"""The tasks that the guide shows are the files here, and they train."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from peer.config.options import TrainingOptions
from peer.train.local_step import Trainer
from peer.train.stacked import StackedTrainer
from peer.train.task import Task
from peer.train.tasks import resolve_task
from tests.train.test_stacked import all_gradients

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "own-task.md"

torch.set_num_threads(1)


@pytest.fixture
def beside_the_examples(monkeypatch: pytest.MonkeyPatch):
    """Stand in the folder of the example, as its user would."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("own_task", "own_task_in_full"):
        sys.modules.pop(name, None)


def write_sensor_files(folder: Path) -> None:
    numbers = np.random.default_rng(1)
    centres = np.array([[1, 1, 0, 0], [-1, 1, 1, 0], [0, -1, 0, 1]])
    for name, count in (("train.csv", 240), ("test.csv", 90)):
        labels = numbers.integers(0, 3, count)
        values = centres[labels] + 0.4 * numbers.normal(size=(count, 4))
        lines = [
            ",".join(f"{value:.4f}" for value in row) + f",{label}" for row, label in zip(values, labels, strict=True)
        ]
        (folder / name).write_text("a,b,c,d,class\n" + "\n".join(lines) + "\n")


def train_four_peers(task: Task, options: TrainingOptions, rounds: int) -> list[float]:
    """Return the accuracy of each of four peers that average their models after every round."""
    shards = np.array_split(np.arange(len(task.train_data()), dtype=np.int64), 4)
    trainers = [
        Trainer(task, options, rounds=rounds, seed=0, peer=peer, train_indices=shard)
        for peer, shard in enumerate(shards)
    ]
    z = trainers[0].initial_vector()
    for t in range(rounds):
        rate = trainers[0].rate(t)
        gradients = [trainer.gradient(z, t, rate, rate).gradient for trainer in trainers]
        z = z - np.float32(rate) * np.mean(gradients, axis=0, dtype=np.float32)
    return [trainer.evaluate(z).accuracy for trainer in trainers]


@pytest.mark.usefixtures("beside_the_examples")
def test_the_short_example_trains_on_csv_files(tmp_path: Path):
    write_sensor_files(tmp_path)
    task = resolve_task("own_task:make_task", {"hidden": 24}, directory=tmp_path)
    assert isinstance(task, Task)
    assert (len(task.train_data()), len(task.test_data())) == (240, 90)
    accuracies = train_four_peers(task, TrainingOptions(batch_size=16, warmup_rounds=5), rounds=120)
    assert min(accuracies) > 0.9


@pytest.mark.usefixtures("beside_the_examples")
def test_the_example_in_full_trains_a_regression():
    task = resolve_task("own_task_in_full:make_task", {"hidden": 48})
    assert isinstance(task, Task)
    accuracies = train_four_peers(task, TrainingOptions(batch_size=32, warmup_rounds=10), rounds=400)
    assert min(accuracies) > 0.9


@pytest.mark.usefixtures("beside_the_examples")
def test_the_example_in_full_can_be_stacked():
    task = resolve_task("own_task_in_full:make_task")
    options = TrainingOptions(batch_size=16, momentum="none")
    shards = np.array_split(np.arange(2000, dtype=np.int64), 3)
    stacked = StackedTrainer(task, options, rounds=9, seed=0, shards=shards)
    z = np.tile(stacked.initial_vector(), (3, 1))
    together = all_gradients(stacked, z, 1, 0.1).gradients
    for peer, shard in enumerate(shards):
        alone = Trainer(task, options, rounds=9, seed=0, peer=peer, train_indices=shard)
        np.testing.assert_allclose(together[peer], alone.gradient(z[peer], 1, 0.1, 0.1).gradient, atol=1e-5)


@pytest.mark.parametrize("name", ["own_task", "own_task_in_full"])
def test_the_guide_shows_the_example_as_it_is(name: str):
    code = (HERE / f"{name}.py").read_text()
    assert f"```python\n{code}```" in GUIDE.read_text()


def test_the_tokenizer_of_the_page_encodes_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tokenizers", reason="needs tokenizers: the extra text installs it")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("public.txt", "texts/one.txt", "texts/two.txt"):
        (tmp_path / name).write_text(f"{name}: {GUIDE.read_text('utf-8')}")
    _, code = GUIDE.read_text("utf-8").split("### A tokenizer")
    exec(code.split("```python\n")[1].split("```")[0], {})
    task = resolve_task("text", {"tokenizer": "tokenizer.json", "width": 8, "blocks": 1}, directory="texts")
    assert len(task.train_data()) > 10
    assert sum(task.test_data().tokens_per_byte) < 0.8
