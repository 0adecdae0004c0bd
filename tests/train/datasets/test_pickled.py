"""CIFAR's Python batches: read value by value, with nothing in them ever run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from peer.errors import DataError
from peer.train.datasets.image_files import CIFAR10, CIFAR100, read_cifar
from peer.train.datasets.pickled import read_values
from peer.train.tasks import resolve_task

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)


def official(labels: list[int], pixels: np.ndarray) -> bytes:
    """Return a batch as Python 2 wrote the published ones: its texts are byte strings, its array a call by name."""
    count = len(labels)
    content = pixels.tobytes()
    parts = [b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05("]
    parts += [b"K" + bytes([label]) for label in labels]
    parts += [
        b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t"
    ]
    parts += [b"(K\x01K", bytes([count]), b"M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b"]
    parts += [
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
        struct.pack("<i", len(content)),
        content,
    ]
    parts += [b"tbU\tfilenamesq\x0c]q\r(U\x05a.pngU\x05b.pngeu."]
    return b"".join(parts)


def test_a_batch_as_python_2_wrote_it_is_read():
    data = official([3, 9, 0, 1], PIXELS)
    # That the bytes above are what they are meant to be: Python's own reader agrees.
    expected = pickle.loads(data, encoding="bytes")
    values = read_values(data, "batch")
    assert np.array_equal(values["data"], expected[b"data"])
    assert values["labels"] == [3, 9, 0, 1]
    assert values["filenames"] == [b"a.png", b"b.png"]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_batches_written_by_later_pythons_are_read(protocol: int, as_bytes: bool):
    batch = {"data": PIXELS, "labels": [1, 2, 3, 4], "batch_label": "x"}
    keyed = {key.encode() if as_bytes else key: value for key, value in batch.items()}
    values = read_values(pickle.dumps(keyed, protocol=protocol), "batch")
    assert np.array_equal(values["data"], PIXELS)
    assert values["labels"] == [1, 2, 3, 4]


def test_cifar10_is_read_from_python_batches(tmp_path: Path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for index, name in enumerate((*CIFAR10.train, *CIFAR10.test)):
        (folder / name).write_bytes(official([index, 1, 2, 3], PIXELS))
    task = resolve_task("cifar10", directory=tmp_path)
    assert task.train_data().labels[::4].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(read_cifar(folder, CIFAR10)["test_batch"][0].view(4, -1), torch.from_numpy(PIXELS))


def test_cifar100_is_read_from_the_archive_of_its_python_batches(tmp_path: Path):
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as archive:
        for name in ("meta", "test", "train"):
            batch = {b"data": PIXELS, b"fine_labels": [5, 6, 7, 99], b"coarse_labels": [1, 1, 1, 1]}
            data = pickle.dumps(batch, protocol=2)
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    assert read_cifar(tmp_path, CIFAR100)["train"][1].tolist() == [5, 6, 7, 99]


class Calls:
    """Pickled, it asks its reader to make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_nothing_in_a_batch_is_called(tmp_path: Path, protocol: int):
    batch = {b"data": PIXELS, b"labels": [1, 2, 3, 4], b"extra": Calls(tmp_path / "made")}
    with pytest.raises(DataError, match=r"batch is no batch .*: it wants to call posix\.mkdir"):
        read_values(pickle.dumps(batch, protocol=protocol), "batch")
    assert not (tmp_path / "made").exists()


LIES = [
    (b"", "it ends too early"),
    (b"\x80\x02}", "it ends too early"),
    (b"\x80\x02]q\x00.", "holds a list, not the dictionary"),
    (b"e.", "a list ends that never began"),
    (b"}(K\x01K\x02u.", "a key is a int"),
    (b"}(((ttK\x02u.", "a key is a tuple"),
    (b"K\x01(K\x02e.", "values are appended to what is no list"),
    (b"T\xff\xff\xff\xff.", "it ends too early"),
    (b"\x8e" + b"\xff" * 8 + b".", "it ends too early"),
    (b"h\x05.", "no batch in the format"),
    (b"\x86.", "a tuple has too few values"),
    (b"c__builtin__\neval\n.", "it wants to call __builtin__.eval"),
    (b"cnumpy\ndtype\nU\x02O8\x85R.", "it calls numpy.dtype for something else"),
    (b"K\x01)R.", "it wants to call what is no function"),
    (b"I5\n.", "operation b'I' at byte 0 is not one that data needs"),
    (b"\x81.", "operation b'\\\\x81' at byte 0"),
    (pickle.dumps({"data": PIXELS.astype(np.float32)}, protocol=2), "numpy.dtype for something else"),
    (pickle.dumps({"data": np.asfortranarray(PIXELS)}, protocol=2), "not of bytes in rows"),
    (official([1, 2, 3, 4], PIXELS).replace(b"M\x00\x0c", b"M\x01\x0c"), r"an array of \[4, 3073\] in 12288 bytes"),
]


@pytest.mark.parametrize(("data", "sentence"), LIES)
def test_batches_that_lie_are_refused(data: bytes, sentence: str):
    with pytest.raises(DataError, match=sentence):
        read_values(data, "batch")


def test_a_damaged_batch_is_refused_wherever_it_ends():
    data = official([1, 2, 3, 4], PIXELS)
    for end in [*range(400), *range(len(data) - 60, len(data))]:
        with pytest.raises(DataError):
            read_values(data[:end], "batch")


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"labels": [1]}, "no array"),
        ({"data": PIXELS[:, :-1].copy(), "labels": [1] * 4}, "no array"),
        ({"data": PIXELS, "labels": [1, 2, 3]}, "no list of 4 labels under the key labels"),
        ({"data": PIXELS, "labels": [1, 2, 3, True]}, "no list of 4 labels"),
        ({"data": PIXELS, "labels": [1, 2, 3, 10]}, "holds the label 10; they go from 0 to 9"),
        ({"data": PIXELS, "labels": [1, 2, 3, -7]}, "holds the label -7"),
    ],
)
def test_batches_without_images_or_labels_are_refused(tmp_path: Path, batch: dict, sentence: str):
    for name in (*CIFAR10.train, *CIFAR10.test):
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match=f"data_batch_1 holds {sentence}|{sentence}"):
        read_cifar(tmp_path, CIFAR10)
