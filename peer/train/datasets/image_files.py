"""Reading MNIST (IDX files) and CIFAR (binary batches), byte by byte as their authors published them.

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
from peer.files import instead_of

_MAX_ITEMS = 2**20
"""Images of one IDX file: far above any data set in that format, and 822 MB of pixels."""
_MAX_BATCH_BYTES = 2**28
"""One CIFAR file; the largest published one has 154 MB."""
_DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError)

PIXELS = 3 * 32 * 32
CIFAR_SIZES = (32, 16, 8)
"""Heights and widths to which `averaged_down` brings images of 32×32 pixels."""


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
        raise DataError(f"{path} contains the label {labels.max()}; labels range from 0 to {num_classes - 1}")
    return torch.from_numpy(labels).to(torch.int64)


def find_idx(directory: str | Path, stem: str) -> Path:
    """Return the path of an IDX file in a folder, or in `mnist` or `MNIST/raw` under it; plain or .gz."""
    folder = _folder(directory)
    for place in (folder, folder / "mnist", folder / "MNIST" / "raw"):
        for name in (f"{stem}.gz", stem):
            if (place / name).is_file():
                return place / name
    raise DataError(f"data.directory: {folder} does not contain {stem} or {stem}.gz")


@dataclass(frozen=True, kw_only=True)
class CifarLayout:
    """In which files one of the two CIFAR sets lies."""

    task: str
    folder: str
    """Folder of the unpacked batches."""
    archive: str
    """Name of the archive without .tar.gz or .tar.xz."""
    train: tuple[str, ...]
    """Names of the files without the ending .bin."""
    test: tuple[str, ...]
    label_bytes: int
    """Labels at the head of a record, of which the last counts."""
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Those of the pixels of each channel, in [0, 1]."""
    test_images: int | None = None
    """Number of images in the test set; None: all."""


CIFAR10 = CifarLayout(
    task="cifar10",
    folder="cifar-10-batches-bin",
    archive="cifar-10-binary",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    label_bytes=1,
    num_classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
CIFAR100 = CifarLayout(
    task="cifar100",
    folder="cifar-100-binary",
    archive="cifar-100-binary",
    train=("train",),
    test=("test",),
    label_bytes=2,
    num_classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


def read_cifar(directory: str | Path, layout: CifarLayout) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return images uint8[m, 3, 32, 32] and labels int64[m] of each batch by its name, without .bin.

    `directory` is the folder of the batches or of their folder, the official archive (.tar.gz or .tar.xz), or a folder
    with that archive. A record is the labels and 3,072 pixels, channel by channel. Raises DataError for anything else.
    """
    result = {}
    for name, data in _find_batches(_folder(directory), layout).items():
        records = _records(data, name, layout.label_bytes, layout.num_classes)
        pixels = np.ascontiguousarray(records[:, layout.label_bytes :])
        labels = records[:, layout.label_bytes - 1].astype(np.int64)
        result[name.removesuffix(".bin")] = torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels)
    return result


def averaged_down(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return `images: uint8[m, c, s, s]` as uint8[m, c, size, size]: means of square blocks, rounded, halves up."""
    block = images.shape[-1] // size
    if block == 1:
        return images
    sums = images.view(*images.shape[:2], size, block, size, block).sum((3, 5), dtype=torch.int32)
    return sums.add_(block * block // 2).div_(block * block, rounding_mode="floor").to(torch.uint8)


def _folder(directory: str | Path) -> Path:
    path = Path(directory).expanduser()
    if not path.exists():
        raise DataError(f"data.directory: {path.absolute()} does not exist{instead_of(path)}")
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
                raise DataError(f"{path} contains items of shape {dimensions}, expected {list(shape)}")
            if not 1 <= items <= _MAX_ITEMS:
                raise DataError(f"{path} declares {items} items; 1 to {_MAX_ITEMS} are allowed")
            size = items * int(np.prod(shape, dtype=np.int64))
            data = file.read(size + 1)
    except _DAMAGED as error:
        raise _unreadable(path, error) from None
    if len(data) != size:
        raise DataError(f"{path} should contain {size} bytes after its header but contains {_or_more(len(data), size)}")
    return np.frombuffer(bytearray(data), np.uint8).reshape(items, *shape)


def _find_batches(path: Path, layout: CifarLayout) -> dict[str, bytes]:
    """Return the batches by the names of their files."""
    names = tuple(f"{name}.bin" for name in (*layout.train, *layout.test))
    archives = tuple(f"{layout.archive}{suffix}" for suffix in (".tar.gz", ".tar.xz"))
    if path.is_file():
        return _read_archive(path, names, layout)
    for place in (path, path / layout.folder):
        found = [name for name in names if (place / name).is_file()]
        if found:
            lacking = [name for name in names if name not in found]
            if lacking:
                raise DataError(f"data.directory: {place} holds {found[0]} but not {', '.join(lacking)}")
            return {name: _read_bounded(place / name) for name in names}
    for archive in archives:
        if (path / archive).is_file():
            return _read_archive(path / archive, names, layout)
    # cifar-10-batches-py, cifar-100-python and their archives.
    pickled = path.glob(f"{layout.archive.removesuffix('binary')}*py*")
    if any(pickled) or (path / layout.train[0]).is_file():
        raise _python_version(path, layout)
    raise DataError(f"data.directory: {path} holds neither {layout.folder}/{names[0]} nor {archives[0]}")


def _python_version(path: Path, layout: CifarLayout) -> DataError:
    return DataError(
        f"data.directory: {path} holds the Python version of {layout.task}. Its files are pickles, which can run code "
        f"and are never read; fetch the binary version, {layout.archive}.tar.gz: `sotto data fetch {layout.task}`"
    )


def _read_bounded(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BATCH_BYTES:
            raise DataError(f"{path} is larger than {_MAX_BATCH_BYTES} bytes: no CIFAR batch")
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _read_archive(path: Path, names: tuple[str, ...], layout: CifarLayout) -> dict[str, bytes]:
    """Return the files of an archive that `names` lists, all of them, found by their last path component; nothing is
    written to disk."""
    found: dict[str, bytes] = {}
    is_python = False
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                is_python = is_python or name in layout.train
                if name not in names or not member.isreg():
                    continue
                if name in found:
                    raise DataError(f"{path} holds {name} twice")
                if member.size > _MAX_BATCH_BYTES:
                    raise DataError(f"{path}: {name} is larger than {_MAX_BATCH_BYTES} bytes: no CIFAR batch")
                file = archive.extractfile(member)
                assert file is not None
                found[name] = file.read()
                if len(found) == len(names):
                    return {name: found[name] for name in names}
    except _DAMAGED as error:
        raise _unreadable(path, error) from None
    if is_python and not found:
        raise _python_version(path, layout)
    raise DataError(f"{path} lacks {', '.join(name for name in names if name not in found)}")


def _records(data: bytes, name: str, label_bytes: int, num_classes: int) -> npt.NDArray[np.uint8]:
    record = label_bytes + PIXELS
    if not data or len(data) % record:
        raise DataError(f"{name} has {len(data)} bytes, which is not a multiple of the record size, {record}")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    highest = int(records[:, label_bytes - 1].max())
    if highest >= num_classes:
        raise DataError(f"{name} contains the label {highest}; labels range from 0 to {num_classes - 1}")
    return records


def _unreadable(path: Path, error: BaseException) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(f"{path} cannot be read: {reason}")


def _or_more(found: int, size: int) -> str:
    return str(found) if found <= size else "more"
