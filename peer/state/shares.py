"""The shares of a final average on disk: the vector of each member of the last round, in chunks that come in any order.

The file is scratch space as large as all models together. What is in it is trusted only as far as the digests say that
its owner has told, so that a crash at any instant costs no more than the chunks that were not written yet.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from peer.files import open_own, replacing, safetensors_head
from peer.records import ModelForm
from peer.state.disk import writing

CHUNK_NUMBERS = 1 << 16
MOST_CHUNKS = 128
"""Most chunks of a share: their digests travel together, in one note."""
DIGEST_BYTES = 16

_NUMBER = np.dtype("<f4")


def digest(chunk: bytes) -> bytes:
    """Return the digest by which a chunk is known: nobody can make two chunks with the same one."""
    return hashlib.sha256(chunk).digest()[:DIGEST_BYTES]


class ShareFile:
    """Shares of `size` numbers of some owners, of which each is float32[size]. Its calls are for the worker thread."""

    def __init__(self, path: Path, size: int, owners: Sequence[int]) -> None:
        """Nothing is read or made before `open`."""
        self.path, self.size, self.owners = path, size, tuple(owners)
        self._numbers = max(CHUNK_NUMBERS, -(-size // MOST_CHUNKS))
        self.num_chunks = -(-size // self._numbers)
        self._file: int | None = None

    def length(self, index: int) -> int:
        """Return the bytes of a chunk."""
        return _NUMBER.itemsize * min(self._numbers, self.size - index * self._numbers)

    def open(self) -> None:
        """Open the file, or make it. Raises StateError, as all calls below do."""
        with writing(str(self.path)):
            self._file = open_own(self.path, os.O_RDWR | os.O_CREAT, 0o600)

    def put_all(self, owner: int, x: npt.NDArray[np.float32]) -> tuple[bytes, ...]:
        """Write a whole share, on disk by then; return the digests of its chunks."""
        found = []
        for index in range(self.num_chunks):
            chunk = x[index * self._numbers : (index + 1) * self._numbers].astype(_NUMBER).tobytes()
            self.put(owner, index, chunk)
            found.append(digest(chunk))
        with writing(str(self.path)):
            os.fsync(self._opened)
        return tuple(found)

    def put(self, owner: int, index: int, chunk: bytes) -> None:
        """Write a chunk of a share."""
        with writing(str(self.path)):
            rest, at = memoryview(chunk), self._at(owner, index)
            while rest:
                written = os.pwrite(self._opened, rest, at)
                rest, at = rest[written:], at + written

    def get(self, owner: int, index: int) -> bytes:
        """Return what stands in the place of a chunk; less of it where the file is shorter."""
        with writing(str(self.path)):
            return os.pread(self._opened, self.length(index), self._at(owner, index))

    def missing(self, owner: int, digests: Sequence[bytes]) -> set[int]:
        """Return the chunks of a share that are not there."""
        return {index for index, each in enumerate(digests) if digest(self.get(owner, index)) != each}

    def mean(self, begin: int, end: int, weight: float) -> Iterator[bytes]:
        """Yield some numbers of the sum of all shares over `weight`, float32. The sum is taken in float64, in the order
        of the owners, as `run.summary.average` does. At most a chunk of each share is in memory."""
        while begin < end:
            index, within = divmod(begin, self._numbers)
            count = min(end - begin, self._numbers - within)
            total = np.zeros(count, dtype=np.float64)
            for owner in self.owners:
                at = self._at(owner, index) + _NUMBER.itemsize * within
                total += np.frombuffer(os.pread(self._opened, _NUMBER.itemsize * count, at), _NUMBER)
            yield (total / weight).astype(_NUMBER).tobytes()
            begin += count

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def _opened(self) -> int:
        assert self._file is not None
        return self._file

    def _at(self, owner: int, index: int) -> int:
        return _NUMBER.itemsize * (self.owners.index(owner) * self.size + index * self._numbers)


Place = tuple[tuple[int, ...], int, int]
"""Shape of a tensor, and where it begins and ends in the vector of the exchanged parameters."""


def places(form: ModelForm) -> dict[str, Place]:
    """Return entry of a model's state_dict → its place, of those that hold exchanged parameters."""
    found, end = {}, 0
    for name, shape in form.trained.items():
        begin, end = end, end + math.prod(shape)
        found[name] = shape, begin, end
    return {entry: found[source] for entry, source in form.entries.items() if source in found}


def write_average(
    path: Path,
    tensors: Mapping[str, Place],
    values: Callable[[int, int], Iterable[bytes]],
    *,
    rounds: int,
    members: Sequence[int],
) -> bytes:
    """Write the average of the models of some members after so many rounds as a safetensors file; return its SHA-256.
    `values(begin, end)` yields that part of it, float32 with the low byte first. Raises StateError."""
    header: dict[str, object] = {
        "__metadata__": {"format": "pt", "rounds": str(rounds), "members": ", ".join(map(str, members))}
    }
    # A part that torch.compile wraps on one device is the same model.
    placed = sorted(
        (begin, name.replace("_orig_mod.", ""), shape, end) for name, (shape, begin, end) in tensors.items()
    )
    offset = 0
    for begin, name, shape, end in placed:
        size = _NUMBER.itemsize * (end - begin)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = safetensors_head(json.dumps(header, separators=(",", ":")).encode())
    told = hashlib.sha256()
    with writing(str(path)), replacing(path) as beside, beside.open("r+b") as file:
        contents = (values(begin, end) for begin, _, _, end in placed)
        for part in chain([head], chain.from_iterable(contents)):
            told.update(part)
            file.write(part)
    return told.digest()
