"""The tasks on folders of images and on sentences, from files to a training step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from peer.config.options import TrainingOptions
from peer.errors import ConfigError, DataError
from peer.train.local_step import Trainer
from peer.train.task import Task
from peer.train.tasks import resolve_task

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "news", "short"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("ant", "bee", "cat")):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (50, 40), (80 * label, index, 0)).save(tmp_path / split / name / f"{index}.png")
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    (tmp_path / "train.csv").write_text('"1","good news","film"\n"4","bad news","film"\n' * 4)
    (tmp_path / "test.csv").write_text('"2","good","film"\n')
    (tmp_path / "sentiment-train").write_text("good film\t1\nbad film\t0\n" * 4)
    (tmp_path / "sentiment-dev").write_text("good\t1\n")
    lines = "tr\t0\tshort news\ntr\t1\tshort good news\n" * 4 + "va\t0\tshort\nte\t5\tbad\n"
    (tmp_path / "sentence_length.txt").write_text(lines)
    return tmp_path


def first_step(task: Task) -> float:
    everything = np.arange(len(task.train_data()), dtype=np.int64)
    trainer = Trainer(task, TrainingOptions(batch_size=4), rounds=3, seed=0, peer=0, train_indices=everything)
    step = trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1)
    assert np.isfinite(step.gradient).all()
    return step.loss


@pytest.mark.parametrize("name", ["image-folder", "imagenette"])
def test_a_folder_of_images_trains(folder: Path, name: str):
    options = {"size": 32, "model": "resnet20", "norm": "group"}
    task = resolve_task(name, options, directory=folder)
    assert (task.name, task.num_classes) == (name, 3)
    assert task.train_data().labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert len(task.test_data()) == 6
    assert 0.3 < first_step(task) < 5


def test_large_images_take_models_that_fit_them(folder: Path):
    assert 0.3 < first_step(resolve_task("image-folder", {"size": 96, "model": "mobilenetv2"}, directory=folder)) < 5
    with pytest.raises(ConfigError, match=r"options\.model: .*'resnet20'\); valid: resnet18, mobilenetv2, vgg11"):
        resolve_task("image-folder", {"size": 96, "model": "resnet20"}, directory=folder)


@pytest.mark.parametrize(
    ("name", "classes", "train", "test"), [("ag-news", 4, 8, 1), ("sst2", 2, 8, 1), ("senteval-length", 6, 8, 1)]
)
def test_sentences_train(folder: Path, name: str, classes: int, train: int, test: int):
    task = resolve_task(name, {"blocks": 1, "length": 16}, directory=folder)
    assert (task.num_classes, len(task.train_data()), len(task.test_data())) == (classes, train, test)
    assert first_step(task) == pytest.approx(np.log(classes), abs=0.3)


def test_the_model_for_sentences_can_be_narrower(folder: Path):
    options = {"blocks": 2, "width": 128, "length": 16}
    task = resolve_task("sst2", options, directory=folder)
    pieces = len((folder / "vocab.txt").read_text().splitlines())
    # Embeddings with their norm; of a block four products of 128 × 128, two of 128 × 512, two norms; the classifier.
    embeddings = (pieces + 512 + 2) * 128
    block = 4 * (128 + 1) * 128 + (128 + 1) * 512 + (512 + 1) * 128 + 4 * 128
    parameters = sum(each.numel() for each in task.make_model().parameters())
    assert parameters == embeddings + 2 * block + (128 + 1) * 128 + (128 + 1) * 2
    assert first_step(task) == pytest.approx(np.log(2), abs=0.3)


def test_the_vocabulary_may_lie_elsewhere(folder: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "vocab.txt").rename(tmp_path / "elsewhere" / "v.txt")
    with pytest.raises(DataError, match=r"vocabulary .*vocab\.txt cannot be read"):
        resolve_task("sst2", directory=folder)
    for place in ("elsewhere/v.txt", str(tmp_path / "elsewhere" / "v.txt")):
        resolve_task("sst2", {"vocabulary": place}, directory=folder)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("image-folder", {"size": 16}, r"options\.size: .*valid: 32 to 1024"),
        ("sst2", {"length": 2}, r"options\.length: .*valid: 3 to 512"),
        ("ag-news", {"blocks": 7}, r"options\.blocks: .*valid: 1 to 6"),
        ("sst2", {"width": 100}, r"options\.width: .*valid: multiples of 64"),
        ("sst2", {"width": 832}, r"options\.width: .*valid: 64 to 768"),
        ("senteval-length", {"hidden": 3}, r"no such option; valid: length, vocabulary, weights, blocks, width"),
    ],
)
def test_wrong_options_are_refused(folder: Path, name: str, options: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        resolve_task(name, options, directory=folder)


def test_the_folder_has_to_be_named():
    for name in ("image-folder", "imagenette", "ag-news", "sst2", "senteval-length"):
        with pytest.raises(ConfigError, match=r"data\.directory: is missing"):
            resolve_task(name)
