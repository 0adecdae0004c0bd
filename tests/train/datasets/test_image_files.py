"""MNIST and CIFAR files: small ones in the published formats, and every way in which a file can lie."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from peer.config.options import TrainingOptions
from peer.errors import ConfigError, DataError
from peer.train.datasets.image_files import (
    CIFAR10,
    CIFAR100,
    averaged_down,
    read_cifar,
    read_idx_images,
    read_idx_labels,
)
from peer.train.local_step import Trainer
from peer.train.tasks import resolve_task

IMAGES, LABELS = 0x00000803, 0x00000801
NUMBERS = np.random.default_rng(0)


def idx(magic: int, *dimensions: int, payload: bytes | None = None) -> bytes:
    if payload is None:
        payload = NUMBERS.integers(0, 10, int(np.prod(dimensions)), dtype=np.uint8).tobytes()
    return struct.pack(f">{1 + len(dimensions)}I", magic, *dimensions) + payload


def write_mnist(folder: Path, *, compress: bool = True, train: int = 40, test: int = 12) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, count in (("train", train), ("t10k", test)):
        for name, data in (
            (f"{stem}-images-idx3-ubyte", idx(IMAGES, count, 28, 28)),
            (f"{stem}-labels-idx1-ubyte", idx(LABELS, count)),
        ):
            if compress:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)


def cifar_batch(count: int, label_bytes: int = 1, num_classes: int = 10) -> bytes:
    labels = NUMBERS.integers(0, num_classes, (count, label_bytes), dtype=np.uint8)
    return np.hstack([labels, NUMBERS.integers(0, 256, (count, 3072), dtype=np.uint8)]).tobytes()


BATCHES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def write_cifar10(folder: Path) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{name}.bin": cifar_batch(4) for name in BATCHES}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def write_archive(path: Path, files: dict[str, bytes], *, kind: str, folder: str = "cifar-10-batches-bin/") -> None:
    with tarfile.open(path, f"w:{kind}") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def read10(directory: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return read_cifar(directory, CIFAR10)


# MNIST


@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("compress", [True, False])
def test_mnist_is_read_from_the_usual_places(tmp_path: Path, folder: str, compress: bool):
    write_mnist(tmp_path / folder, compress=compress)
    task = resolve_task("mnist", directory=tmp_path)
    assert (len(task.train_data()), len(task.test_data())) == (40, 12)
    images, labels = task.train_data().batch(torch.tensor([3, 5]))
    assert images.shape == (2, 1, 28, 28)
    assert images.dtype == torch.float32
    assert torch.equal(labels, task.train_data().labels[[3, 5]])


def test_pixels_and_labels_of_mnist_are_those_of_the_file(tmp_path: Path):
    write_mnist(tmp_path)
    raw = gzip.decompress((tmp_path / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    images = read_idx_images(tmp_path / "train-images-idx3-ubyte.gz")
    assert images.numpy().tobytes() == raw
    image = resolve_task("mnist", directory=tmp_path).train_data().batch(torch.tensor([7]))[0]
    expected = (images[7].float() / 255 - 0.1307) / 0.3081
    assert torch.allclose(image[0], expected, atol=1e-5)


@pytest.mark.parametrize(("model", "parameters"), [("logistic", 7850), ("mlp", 203530)])
def test_mnist_models_train(tmp_path: Path, model: str, parameters: int):
    write_mnist(tmp_path)
    task = resolve_task("mnist", {"model": model}, directory=tmp_path)
    trainer = Trainer(
        task, TrainingOptions(batch_size=8), rounds=5, seed=0, peer=0, train_indices=np.arange(40, dtype=np.int64)
    )
    assert trainer.layout.size == parameters
    assert np.isfinite(trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1).loss)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (idx(LABELS, 4, 28, 28), r"starts with 0x00000801, not with 0x00000803"),
        (idx(IMAGES, 4, 28, 28)[:10], "ends within its header"),
        (b"", "ends within its header"),
        (idx(IMAGES, 4, 28, 27), r"contains items of shape \[28, 27\], expected \[28, 28\]"),
        (idx(IMAGES, 4, 28, 28)[:-1], "should contain 3136 bytes after its header but contains 3135"),
        (idx(IMAGES, 4, 28, 28) + b"x", "should contain 3136 bytes after its header but contains more"),
        (idx(IMAGES, 0, 28, 28), "declares 0 items"),
        (idx(IMAGES, 2**32 - 1, 28, 28, payload=b""), "declares 4294967295 items"),
    ],
)
@pytest.mark.parametrize("compress", [True, False])
def test_idx_files_that_lie_are_refused(tmp_path: Path, data: bytes, sentence: str, compress: bool):
    path = tmp_path / ("images.gz" if compress else "images")
    path.write_bytes(gzip.compress(data) if compress else data)
    with pytest.raises(DataError, match=sentence):
        read_idx_images(path)


def test_labels_above_nine_are_refused(tmp_path: Path):
    path = tmp_path / "labels"
    path.write_bytes(idx(LABELS, 3, payload=bytes([1, 10, 2])))
    with pytest.raises(DataError, match="contains the label 10; labels range from 0 to 9"):
        read_idx_labels(path)


@pytest.mark.parametrize("damage", ["truncated", "not gzip", "flipped"])
def test_damaged_gzip_is_refused(tmp_path: Path, damage: str):
    data = bytearray(gzip.compress(idx(IMAGES, 4, 28, 28)))
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "not gzip":
        data[:2] = b"PK"
    else:
        data[-6] ^= 0xFF  # the checksum of the content
    path = tmp_path / "images.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match="cannot be read"):
        read_idx_images(path)


def test_a_compressed_file_is_read_no_further_than_its_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(idx(IMAGES, 1, 28, 28) + bytes(50_000_000)))
    asked = []
    read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: asked.append(size) or read(self, size))
    with pytest.raises(DataError, match="contains more"):
        read_idx_images(path)
    assert asked == [16, 785]


def test_mnist_with_different_numbers_of_images_and_labels_is_refused(tmp_path: Path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS, 39)))
    task = resolve_task("mnist", directory=tmp_path)
    with pytest.raises(DataError, match="40 images but 39 labels"):
        task.train_data()


def test_mnist_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data\.directory: is missing"):
        resolve_task("mnist")
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        resolve_task("mnist", directory=tmp_path / "nowhere").train_data()
    with pytest.raises(DataError, match=r"does not contain train-images-idx3-ubyte or train-images-idx3-ubyte\.gz"):
        resolve_task("mnist", directory=tmp_path).train_data()


# CIFAR


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_cifar10_is_read_from_a_folder(tmp_path: Path, place: str):
    files = write_cifar10(tmp_path / place)
    result = read10(tmp_path)
    for name, data in files.items():
        records = np.frombuffer(data, np.uint8).reshape(4, 3073)
        images, labels = result[name.removesuffix(".bin")]
        assert np.array_equal(labels, records[:, 0])
        assert np.array_equal(images.reshape(4, -1), records[:, 1:])


@pytest.mark.parametrize("kind", ["gz", "xz"])
@pytest.mark.parametrize("direct", [True, False])
def test_cifar10_is_read_straight_from_its_archive(tmp_path: Path, kind: str, direct: bool):
    files = write_cifar10(tmp_path / "unpacked")
    archive = tmp_path / f"cifar-10-binary.tar.{kind}"
    # The official archive does not hold its files in order, and has others beside them.
    write_archive(archive, {"readme.html": b"<html>"} | dict(reversed(files.items())), kind=kind)
    packed, unpacked = read10(archive if direct else tmp_path), read10(tmp_path / "unpacked")
    for name in BATCHES:
        assert torch.equal(packed[name][0], unpacked[name][0])
        assert torch.equal(packed[name][1], unpacked[name][1])


def test_cifar10_batches_follow_one_another_in_the_training_set(tmp_path: Path):
    files = write_cifar10(tmp_path)
    task = resolve_task("cifar10", directory=tmp_path)
    labels = [np.frombuffer(files[name], np.uint8).reshape(4, 3073)[:, 0] for name in files]
    assert task.train_data().labels.tolist() == np.concatenate(labels[:5]).tolist()
    assert task.test_data().labels.tolist() == labels[5].tolist()
    images, _ = task.test_data().batch(torch.tensor([2]))
    pixels = np.frombuffer(files["test_batch.bin"], np.uint8).reshape(4, 3073)[2, 1:].reshape(3, 32, 32) / 255
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    np.testing.assert_allclose(images[0], (pixels - mean[:, None, None]) / std[:, None, None], atol=1e-5)


@pytest.mark.parametrize("size", [32, 16, 8])
def test_averaging_down_takes_the_mean_of_each_block(size: int):
    images = torch.randint(256, (3, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    small = averaged_down(images, size)
    assert small.dtype == torch.uint8
    block = 32 // size
    for sample, channel, row, column in ((0, 0, 0, 0), (1, 2, 3, 7), (2, 1, size - 1, size - 2)):
        pixels = images[sample, channel, block * row : block * (row + 1), block * column : block * (column + 1)]
        assert small[sample, channel, row, column] == int(np.floor(pixels.numpy().mean() + 0.5))


def test_cifar10_can_be_trained_on_small_images(tmp_path: Path):
    write_cifar10(tmp_path)
    whole, small = (resolve_task("cifar10", {"size": size}, directory=tmp_path) for size in (32, 16))
    (image, label), (full, same) = (task.train_data().batch(torch.tensor([3])) for task in (small, whole))
    assert image.shape == (1, 3, 16, 16)
    assert torch.equal(label, same)
    # A level of 255, rounded by at most half, over a standard deviation of 0.24.
    assert (image - torch.nn.functional.avg_pool2d(full, 2)).abs().max() < 0.51 / (255 * 0.24)
    options = TrainingOptions(batch_size=4, momentum="none")
    trainer = Trainer(small, options, rounds=5, seed=0, peer=0, train_indices=np.arange(20, dtype=np.int64))
    assert trainer.layout.size == 273_258
    assert np.isfinite(trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1).gradient).all()


def test_cifar10_can_be_judged_by_its_first_images(tmp_path: Path):
    write_cifar10(tmp_path)
    whole, part = (resolve_task("cifar10", options, directory=tmp_path) for options in ({}, {"test_images": 1}))
    assert len(part.test_data()) == 1 < len(whole.test_data())
    assert len(part.train_data()) == len(whole.train_data())
    for first, same in zip(*(task.test_data().batch(torch.tensor([0])) for task in (part, whole)), strict=True):
        assert torch.equal(first, same)


def test_cifar10_trains_with_and_without_augmentation(tmp_path: Path):
    write_cifar10(tmp_path)
    gradients = []
    for augmentation in (True, False, True):
        task = resolve_task("cifar10", {"augmentation": augmentation}, directory=tmp_path)
        options = TrainingOptions(batch_size=4, momentum="none")
        trainer = Trainer(task, options, rounds=5, seed=0, peer=0, train_indices=np.arange(20, dtype=np.int64))
        assert trainer.layout.size == 273_258
        gradients.append(trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1).gradient.copy())
    assert np.array_equal(gradients[0], gradients[2])
    assert not np.array_equal(gradients[0], gradients[1])


def test_cifar100_takes_the_fine_labels(tmp_path: Path):
    data = {"train.bin": cifar_batch(6, 2, 20), "test.bin": cifar_batch(3, 2, 20)}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    task = resolve_task("cifar100", {"model": "vgg11"}, directory=tmp_path)
    fine = np.frombuffer(data["train.bin"], np.uint8).reshape(6, 3074)[:, 1]
    assert task.num_classes == 100
    assert task.train_data().labels.tolist() == fine.tolist()
    assert len(task.test_data()) == 3


def test_cifar100_is_read_from_its_archive(tmp_path: Path):
    files = {"train.bin": cifar_batch(6, 2, 20), "test.bin": cifar_batch(3, 2, 20)}
    write_archive(tmp_path / "cifar-100-binary.tar.gz", files, kind="gz", folder="cifar-100-binary/")
    assert len(resolve_task("cifar100", directory=tmp_path).train_data()) == 6


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (cifar_batch(4)[:-1], "has 12291 bytes, which is not a multiple of the record size, 3073"),
        (cifar_batch(4) + b"x", "has 12293 bytes, which is not a multiple"),
        (b"", "has 0 bytes"),
        (bytes([10]) + bytes(3072), "contains the label 10; labels range from 0 to 9"),
    ],
)
def test_cifar_batches_that_lie_are_refused(tmp_path: Path, content: bytes, sentence: str):
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(DataError, match=f"data_batch_3.bin {sentence}"):
        read10(tmp_path)


def test_a_missing_cifar_batch_is_named(tmp_path: Path):
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"holds data_batch_1\.bin but not data_batch_2\.bin"):
        read10(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"neither cifar-10-batches-bin/data_batch_1\.bin nor cifar-10-binary\.tar\.gz"):
        read10(empty)


@pytest.mark.parametrize("name", ["cifar-10-batches-py/data_batch_1", "data_batch_1", "cifar-10-python.tar.gz"])
def test_whoever_has_the_pickled_version_of_cifar_reads_what_to_fetch(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(
        DataError, match=r"Python version of cifar10.*cifar-10-binary\.tar\.gz: `sotto data fetch cifar10`"
    ):
        read10(tmp_path)
    write_cifar10(tmp_path)
    assert len(read10(tmp_path)) == 6


def test_an_archive_of_the_pickled_version_is_named_as_such(tmp_path: Path):
    write_archive(tmp_path / "a.tar.gz", {"meta": b"x", "train": b"x"}, kind="gz", folder="cifar-100-python/")
    with pytest.raises(
        DataError, match=r"a\.tar\.gz holds the Python version of cifar100.* `sotto data fetch cifar100`"
    ):
        read_cifar(tmp_path / "a.tar.gz", CIFAR100)


def test_an_archive_that_lacks_a_batch_is_refused(tmp_path: Path):
    files = write_cifar10(tmp_path / "unpacked")
    del files["test_batch.bin"]
    write_archive(tmp_path / "a.tar.gz", files, kind="gz")
    with pytest.raises(DataError, match=r"a\.tar\.gz lacks test_batch\.bin"):
        read10(tmp_path / "a.tar.gz")


def test_an_archive_with_the_same_batch_twice_is_refused(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for folder in ("one", "two"):
            member = tarfile.TarInfo(f"{folder}/data_batch_1.bin")
            archive.addfile(member)
    with pytest.raises(DataError, match=r"holds data_batch_1\.bin twice"):
        read10(tmp_path / "a.tar.gz")


def test_an_archive_member_that_is_no_file_or_too_large_is_refused(tmp_path: Path):
    link = tarfile.TarInfo("data_batch_1.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        archive.addfile(link)
    with pytest.raises(DataError, match=r"lacks data_batch_1\.bin"):
        read10(tmp_path / "link.tar")
    huge = tarfile.TarInfo("data_batch_1.bin")
    huge.size = 2**40
    (tmp_path / "huge.tar").write_bytes(huge.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(DataError, match=r"data_batch_1\.bin is larger than"):
        read10(tmp_path / "huge.tar")


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_a_damaged_archive_is_refused(tmp_path: Path, kind: str):
    files = write_cifar10(tmp_path / "unpacked")
    path = tmp_path / f"a.tar.{kind}"
    write_archive(path, files, kind=kind)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(DataError, match="cannot be read"):
        read10(path)
    path.write_bytes(b"no archive at all")
    with pytest.raises(DataError, match="cannot be read"):
        read10(path)
