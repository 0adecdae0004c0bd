"""Reading MNIST (IDX files) and CIFAR (binary and Python batches), byte by byte as their authors published them.

The files come from outside: sizes are checked before anything is allocated, no archive is unpacked to disk, and a
compressed file is read no further than its header says it goes.
"""

from __future__ import annotations

import gzip
import lzma
import struct
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import torch

from peer.errors import DataError
from peer.train.datasets.pickled import read_values

_MAX_ITEMS = 2**20
"""Images of one IDX file: far above any data set in that format, and 822 MB of pixels."""
_MAX_BATCH_BYTES = 2**28
"""One CIFAR file; the largest published one has 154 MB."""
_DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError)

PIXELS = 3 * 32 * 32


def read_idx_images(path: Path, *, height: int = 28, width: int = 28) -> torch.Tensor:
    """Return the images of an IDX file, plain or .gz, as uint8[m, 1, height, width].

    Raises DataError unless magic number, dimensions and length are exactly those of such images.
    """
    pixels = _read_idx(path, magic=0x00000803, shape=(height, width))
    return torch.from_numpy(pixels).view(-1, 1, height, width)


def read_idx_labels(path: Path, *, num_classes: int = 10) -> torch.Tensor:
    """Return the labels of an IDX file, plain or .gz, as int64[m]. Raises DataError as `read_idx_images` does."""
    labels = _read_idx(path, magic=0x00000801, shape=())
    if labels.max() >= num_classes:
        raise DataError(f"{path} holds the label {labels.max()}; they go from 0 to {num_classes - 1}")
    return torch.from_numpy(labels).to(torch.int64)


def find_idx(directory: str | Path, stem: str) -> Path:
    """Return the path of an IDX file in a folder, or in `mnist` or `MNIST/raw` under it; plain or .gz."""
    folder = _folder(directory)
    for place in (folder, folder / "mnist", folder / "MNIST" / "raw"):
        for name in (f"{stem}.gz", stem):
            if (place / name).is_file():
                return place / name
    raise DataError(f"data.directory: {folder} does not hold {stem}.gz")


@dataclass(frozen=True, kw_only=True)
class CifarLayout:
    """In which files one of the two CIFAR sets lies."""

    folder: str
    """Of the binary batches."""
    python_folder: str
    train: tuple[str, ...]
    """Without the ending .bin, which Python batches do not have."""
    test: tuple[str, ...]
    label_bytes: int
    """Labels at the head of a binary record, of which the last counts."""
    label_key: str
    """Of the labels of a Python batch."""
    num_classes: int


CIFAR10 = CifarLayout(
    folder="cifar-10-batches-bin",
    python_folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    label_bytes=1,
    label_key="labels",
    num_classes=10,
)
CIFAR100 = CifarLayout(
    folder="cifar-100-binary",
    python_folder="cifar-100-python",
    train=("train",),
    test=("test",),
    label_bytes=2,
    label_key="fine_labels",
    num_classes=100,
)


def read_cifar(directory: str | Path, layout: CifarLayout) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return images uint8[m, 3, 32, 32] and labels int64[m] of each batch by its name, without .bin.

    `directory` is the folder of the batches or of their folder, the official archive (.tar.gz or .tar.xz), or a folder
    with that archive; binary batches are taken before Python batches. A binary record is the labels and 3,072 pixels,
    channel by channel. Raises DataError for anything else.
    """
    result = {}
    for name, data in _find_batches(_folder(directory), layout).items():
        if name.endswith(".bin"):
            records = _records(data, name, layout.label_bytes, layout.num_classes)
            pixels = np.ascontiguousarray(records[:, layout.label_bytes :])
            labels = records[:, layout.label_bytes - 1].astype(np.int64)
        else:
            pixels, labels = _python_batch(data, name, layout)
        result[name.removesuffix(".bin")] = torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels)
    return result


def _folder(directory: str | Path) -> Path:
    path = Path(directory).expanduser()
    if not path.exists():
        raise DataError(f"data.directory: there is no {path}")
    return path


def _read_idx(path: Path, *, magic: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return the payload of an IDX file of unsigned bytes as uint8[m, *shape]."""
    header = struct.Struct(f">{2 + len(shape)}I")
    try:
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else open(path, "rb")) as file:
            head = file.read(header.size)
            if len(head) < header.size:
                raise DataError(f"{path} ends within its header")
            found, items, *dimensions = header.unpack(head)
            if found != magic:
                raise DataError(f"{path} starts with {found:#010x}, not with {magic:#010x}")
            if tuple(dimensions) != shape:
                raise DataError(f"{path} holds items of {dimensions}, expected {list(shape)}")
            if not 1 <= items <= _MAX_ITEMS:
                raise DataError(f"{path} claims {items} items; at least 1 and at most {_MAX_ITEMS} can be")
            size = items * int(np.prod(shape, dtype=np.int64))
            data = file.read(size + 1)
    except _DAMAGED as error:
        raise _unreadable(path, error) from None
    if len(data) != size:
        raise DataError(f"{path} should hold {size} bytes after its header and holds {_or_more(len(data), size)}")
    return np.frombuffer(bytearray(data), np.uint8).reshape(items, *shape)


def _find_batches(path: Path, layout: CifarLayout) -> dict[str, bytes]:
    """Return the batches by the names of their files."""
    python = (*layout.train, *layout.test)
    binary = tuple(f"{name}.bin" for name in python)
    if path.is_file():
        return _read_archive(path, (binary, python))
    for names, folder in ((binary, layout.folder), (python, layout.python_folder)):
        for place in (path, path / folder):
            found = [name for name in names if (place / name).is_file()]
            if found:
                lacking = [name for name in names if name not in found]
                if lacking:
                    raise DataError(f"data.directory: {place} holds {found[0]} but not {', '.join(lacking)}")
                return {name: _read_bounded(place / name) for name in names}
    stem, python_stem = (
        folder.replace("-batches-bin", "-binary").replace("-batches-py", "-python")
        for folder in (layout.folder, layout.python_folder)
    )
    for archive in (stem, python_stem):
        for suffix in (".tar.gz", ".tar.xz"):
            if (path / f"{archive}{suffix}").is_file():
                return _read_archive(path / f"{archive}{suffix}", (binary, python))
    raise DataError(
        f"data.directory: {path} holds neither {layout.folder}/{binary[0]} nor {stem}.tar.gz, nor the Python batches "
        f"({layout.python_folder}/{python[0]} or {python_stem}.tar.gz)"
    )


def _read_bounded(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BATCH_BYTES:
            raise DataError(f"{path} is larger than {_MAX_BATCH_BYTES} bytes: no CIFAR batch")
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _read_archive(path: Path, choices: tuple[tuple[str, ...], ...]) -> dict[str, bytes]:
    """Return the files of an archive that one of `choices` names, all of them, found by their last path component;
    nothing is written to disk."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if not any(name in names for names in choices) or not member.isreg():
                    continue
                if name in found:
                    raise DataError(f"{path} holds {name} twice")
                if member.size > _MAX_BATCH_BYTES:
                    raise DataError(f"{path}: {name} is larger than {_MAX_BATCH_BYTES} bytes: no CIFAR batch")
                file = archive.extractfile(member)
                assert file is not None
                found[name] = file.read()
                for names in choices:
                    if all(name in found for name in names):
                        return {name: found[name] for name in names}
    except _DAMAGED as error:
        raise _unreadable(path, error) from None
    begun = next((names for names in choices if any(name in found for name in names)), choices[0])
    raise DataError(f"{path} lacks {', '.join(name for name in begun if name not in found)}")


def _records(data: bytes, name: str, label_bytes: int, num_classes: int) -> npt.NDArray[np.uint8]:
    record = label_bytes + PIXELS
    if not data or len(data) % record:
        raise DataError(f"{name} has {len(data)} bytes, no multiple of the {record} of a record")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    highest = int(records[:, label_bytes - 1].max())
    if highest >= num_classes:
        raise DataError(f"{name} holds the label {highest}; they go from 0 to {num_classes - 1}")
    return records


def _python_batch(data: bytes, name: str, layout: CifarLayout) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return pixels uint8[m, 3072] and labels int64[m] of a Python batch."""
    values = read_values(data, name)
    pixels, labels = values.get("data"), values.get(layout.label_key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS or not len(pixels):
        raise DataError(f"{name} holds no array [images, {PIXELS}] under the key data")
    if not isinstance(labels, list) or len(labels) != len(pixels) or not all(type(label) is int for label in labels):
        raise DataError(f"{name} holds no list of {len(pixels)} labels under the key {layout.label_key}")
    low, high = min(labels), max(labels)
    if low < 0 or high >= layout.num_classes:
        wrong = low if low < 0 else high
        raise DataError(f"{name} holds the label {wrong}; they go from 0 to {layout.num_classes - 1}")
    return pixels, np.array(labels, np.int64)


def _unreadable(path: Path, error: BaseException) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(f"{path} cannot be read: {reason}")


def _or_more(found: int, size: int) -> str:
    return str(found) if found <= size else "more"
