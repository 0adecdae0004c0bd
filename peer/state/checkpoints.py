"""The checkpoints of a peer, and the lock on its state folder.

A checkpoint is one safetensors file: arrays by name, and one JSON text under the key "state" of its metadata, with a
checksum over the whole file. It is written under another name, synced and renamed, so that a crash at any instant
leaves the previous one whole. Checkpoints are taken between rounds only; the journal (`peer.state.journal`) covers the
time between two of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import operator
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from peer.errors import StateError, remedy
from peer.files import safetensors_head
from peer.foreign_values import parse_json
from peer.state import disk as disks
from peer.state.disk import Buffer, Disk, Readable, make_private

FORMAT = 2
"""Version of the file format, raised when an old file would be misunderstood; the changelog explains old files."""

_MOST_HEADER_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 20
"""Bytes of a file that are in memory at once while its checksum is taken, or while they are copied from it."""

_ASIDE = "aside.new"
"""Name that arrays on their way to a checkpoint have for an instant."""

_TYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
}
"""numpy's names of number types, and those of safetensors."""

_NUMPY = {theirs: np.dtype(ours) for ours, theirs in _TYPES.items()}

_PREFIX, _SUFFIX = "checkpoint-", ".safetensors"
_PATTERN = f"{_PREFIX}*{_SUFFIX}"

_DAMAGED = "damaged"
"""New name, without suffix, of an unreadable checkpoint, which is kept for inspection."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a peer between two rounds."""

    round: int
    """Rounds completed."""
    state: Mapping[str, Any]
    """JSON values."""
    arrays: Mapping[str, npt.NDArray[Any]]


class StoredArrays(Mapping[str, npt.NDArray[Any]]):
    """The arrays of a safetensors file. Each is read when it is asked for, into memory of its own, for as long as this
    object lives, whatever becomes of the name of the file."""

    def __init__(self, file: Readable, start: int, entries: Mapping[str, Mapping[str, Any]], name: str) -> None:
        """`entries` of the file's header, which passed `_check_entries`; `start`: where the first array begins."""
        self._file, self._start, self._entries, self._name = file, start, entries, name
        weakref.finalize(self, file.close)

    def __getitem__(self, item: str) -> npt.NDArray[Any]:
        """Return an array, in memory of its own."""
        return self.vector(item)[:].reshape(self._entries[item]["shape"])

    def __iter__(self) -> Iterator[str]:
        """Yield the names, in the order of the file."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        """Return whether there is an array of that name, without reading it."""
        return item in self._entries

    def mapped(self) -> memoryview:
        """Return what stands behind the header, in pages that the kernel may take back at any time."""
        return memoryview(mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ))[self._start :]

    def vector(self, item: str) -> StoredVector:
        """Return an array that is read in parts."""
        entry = self._entries[item]
        return StoredVector(self, _NUMPY[entry["dtype"]], math.prod(entry["shape"]), entry["data_offsets"][0])

    def read(self, at: int, into: npt.NDArray[Any]) -> None:
        """Fill a vector with what stands at a byte behind the header. Raises StateError."""
        rest = into.view(np.uint8).data
        with _reading(self._name):
            self._file.seek(self._start + at)
            while rest:
                if not (count := self._file.readinto(rest)):
                    raise StateError(f"{self._name}: was cut off while it was read")
                rest = rest[count:]


class StoredVector:
    """A vector in a file, of which slices of consecutive numbers are read when they are asked for."""

    def __init__(self, arrays: StoredArrays, dtype: np.dtype[Any], size: int, at: int) -> None:
        """`at`: the byte behind the header at which it begins."""
        self._arrays, self.dtype, self.size, self._at = arrays, dtype, size, at
        self.shape, self.nbytes = (size,), size * dtype.itemsize

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        """Return consecutive numbers, in memory of their own."""
        begin, end, _ = part.indices(self.size)
        values = np.empty(max(0, end - begin), self.dtype.newbyteorder("<"))
        self._arrays.read(self._at + begin * self.dtype.itemsize, values)
        return values.astype(self.dtype, copy=False)

    def mapped(self) -> memoryview:
        """Return its bytes, as `StoredArrays.mapped` does."""
        return self._arrays.mapped()[self._at : self._at + self.nbytes]

    def blocks(self) -> Iterator[memoryview]:
        """Yield its bytes, so many at a time."""
        step = _BLOCK_BYTES // self.dtype.itemsize
        return (_bytes_of(self[at : at + step]) for at in range(0, self.size, step))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return all of it, for numpy."""
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)


class Checkpoints:
    """The checkpoints on one disk."""

    def __init__(self, disk: Disk, *, keep: int = 2, regular: int = 0) -> None:
        """Keep the newest `keep`, and as many of rounds that are multiples of `regular` (0: none of these): peers that
        are put back, or exported, together need one of the same round."""
        self._disk, self._keep, self._regular = disk, keep, regular

    def rounds(self) -> list[int]:
        """Return the rounds of all checkpoints, oldest first."""
        return sorted(round_ for name in self._disk.names() if (round_ := _round_of(name)) is not None)

    def save(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint durably, then delete those that are no longer kept; return its name. Raises StateError."""
        name = checkpoint_name(checkpoint.round)
        with disks.writing(name):
            disks.replace(self._disk, name, _file(checkpoint))
            for round_ in set(self.rounds()) - set(self._kept()):
                self._disk.unlink(checkpoint_name(round_))
        return name

    def load(self, round_: int) -> Checkpoint:
        """Return a checkpoint. Raises StateError if the file is damaged or of another format."""
        name = checkpoint_name(round_)
        with _reading(name):
            file = self._disk.reader(name)
        return parse_checkpoint(file, name)

    def set_aside(self, round_: int) -> None:
        """Take a damaged checkpoint out of the way."""
        with disks.writing(checkpoint_name(round_)):
            self._disk.rename(checkpoint_name(round_), _DAMAGED + _SUFFIX)

    def go_back(self, round_: int, aside: str) -> int:
        """Rename the checkpoints above `round_`, with `aside` before their names; return the round of the newest that
        is left (0: the start).

        Frames for later rounds in that one are forgotten: their senders go back too and send them anew. A copy with
        them is set aside as well. Raises OSError, and StateError for a damaged checkpoint.
        """
        rounds = self.rounds()
        # The newest first: a crash in between leaves a peer that went back less far.
        for newer in [each for each in reversed(rounds) if each > round_]:
            self._disk.rename(checkpoint_name(newer), aside + checkpoint_name(newer))
        kept = [each for each in rounds if each <= round_]
        if not kept:
            return 0
        name = checkpoint_name(kept[-1])
        checkpoint = self.load(kept[-1])
        if checkpoint.state.get("inbox"):
            with self._disk.reader(name) as file:
                disks.replace(self._disk, aside + name, disks.blocks(file))
            self.save(replace(checkpoint, state={**checkpoint.state, "inbox": []}, arrays=dict(checkpoint.arrays)))
        return kept[-1]

    def _kept(self) -> list[int]:
        rounds = self.rounds()
        regular = [round_ for round_ in rounds if self._regular and round_ % self._regular == 0]
        return sorted({*rounds[-self._keep :], *regular[-self._keep :]})


class StateFolder:
    """The state folder of one peer, locked against a second process."""

    def __init__(self, directory: Path, *, keep: int = 2, regular: int = 0) -> None:
        """Create and lock the folder; `keep` and `regular` are those of `Checkpoints`. Raises StateError if that
        fails."""
        self.directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Whose file it is does not matter: nothing is written to it.
            self._lock = os.fdopen(os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise StateError(f"{directory}: is in use by another peer process; stop that process first") from None
        except OSError as error:
            raise StateError(
                f"{directory}: cannot be used as a state folder: {error.strerror}; {remedy(error)}"
            ) from None
        self.why_not_private: str | None = None
        """Reason why the folder cannot be kept from other users of this machine; None if it can."""
        try:
            # Earlier releases left it and its files to the umask.
            make_private(directory)
        except OSError as error:
            self.why_not_private = error.strerror
        self.disk = Disk(directory)
        self.checkpoints = Checkpoints(self.disk, keep=keep, regular=regular)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def is_in_use(directory: Path) -> bool:
    """Return whether a process has the state folder of a peer now."""
    try:
        with (directory / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # There is no peer that could have it.
    return False


def checkpoint_name(round_: int) -> str:
    """Return the file name of the checkpoint after so many rounds."""
    return f"{_PREFIX}{round_:08d}{_SUFFIX}"


def find_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted(directory.glob(_PATTERN), key=checkpoint_round)


def checkpoint_round(path: Path) -> int:
    """Return the round of a checkpoint that `find_checkpoints` found."""
    return _round_of(path.name) or 0


def read_description(path: Path) -> tuple[int, Mapping[str, Any]]:
    """Return the round of a checkpoint and its JSON values, without reading its arrays. Raises StateError."""
    with _reading(path):
        with path.open("rb", buffering=0) as file:
            metadata = _head(file)[0]["__metadata__"]
        return int(metadata["round"]), _state(metadata)


def load_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint. Raises StateError if the file is damaged or of another format."""
    with _reading(path):
        file = path.open("rb", buffering=0)
    return parse_checkpoint(file, str(path))


def parse_checkpoint(file: Readable, name: str) -> Checkpoint:
    """Return the checkpoint that a file holds, with `StoredArrays`, which close the file. Raises StateError."""
    try:
        with _reading(name):
            header, start, size = _head(file)
            metadata = header.pop("__metadata__", {})
            format_ = int(metadata.get("format", 0))
            if format_ != FORMAT:
                why = "a later release wrote it" if format_ > FORMAT else "release 0.2 reads it, and writes this format"
                raise StateError(f"{name}: has format {format_}, but this release reads {FORMAT}; {why}")
            blocks = iter(lambda: file.read(_BLOCK_BYTES), b"")
            if metadata.pop("checksum") != _checksum({"__metadata__": metadata, **header}, blocks):
                raise ValueError("its checksum does not match")
            _check_entries(header, size - start)
            return Checkpoint(int(metadata["round"]), _state(metadata), StoredArrays(file, start, header, name))
    except BaseException:
        file.close()
        raise


def stored_arrays(path: Path) -> StoredArrays:
    """Return the arrays of any safetensors file. Raises StateError."""
    with _reading(path, ""), contextlib.ExitStack() as opened:
        file = opened.enter_context(path.open("rb", buffering=0))
        header, start, size = _head(file)
        header.pop("__metadata__", None)
        _check_entries(header, size - start)
        opened.pop_all()
        return StoredArrays(file, start, header, str(path))


@contextlib.contextmanager
def _reading(name: object, as_what: str = " as a checkpoint") -> Iterator[None]:
    """Raise StateError, naming the file, if what is inside cannot read it, or finds something else in it."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{name}: cannot be read{as_what}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"{name}: cannot be read{as_what}: {error}") from None


def _head(file: Readable) -> tuple[dict[str, Any], int, int]:
    """Return the header of a safetensors file, where its arrays begin, and its size. Raises ValueError."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begin = file.read(8)
    if len(begin) < 8 or (start := 8 + int.from_bytes(begin, "little")) > size:
        raise ValueError("it is cut off")
    return _parsed(file.read(start - 8)), start, size


def _parsed(text: str | bytes) -> Any:
    return parse_json(text, most_bytes=_MOST_HEADER_BYTES, infinite="kept")


def _state(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON values beside the arrays. Raises ValueError if they are none."""
    state = _parsed(metadata["state"])
    if not isinstance(state, dict):
        raise ValueError("its state is no object")
    return state


def arrays_of(entries: Mapping[str, Mapping[str, Any]], body: memoryview) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that the entries of a safetensors header describe, in memory of their own. Raises KeyError,
    TypeError or ValueError if they do not fill the body."""
    _check_entries(entries, len(body))
    arrays = {}
    for item, entry in entries.items():
        first, last = entry["data_offsets"]
        # Copied into memory of our own: in the file an array starts at any multiple of its item size.
        values = np.frombuffer(body[first:last], _NUMPY[entry["dtype"]].newbyteorder("<"))
        arrays[item] = values.reshape(entry["shape"]).astype(_NUMPY[entry["dtype"]], copy=True)
    return arrays


def _check_entries(entries: Mapping[str, Mapping[str, Any]], size: int) -> None:
    end = 0
    for entry in entries.values():
        first, last = entry["data_offsets"]
        if first != end or not first <= last <= size:
            raise ValueError("its arrays do not follow each other")
        count = math.prod(map(operator.index, entry["shape"]))
        if min(entry["shape"], default=0) < 0 or count * _NUMPY[entry["dtype"]].itemsize != last - first:
            raise ValueError("the shape of an array is not that of its bytes")
        end = last
    if end != size:
        raise ValueError("it is cut off" if end > size else "something follows its arrays")


def laid_aside(disk: Disk, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, StoredVector]:
    """Return flat arrays as they are now, from a file that is gone with the last of them. Raises StateError."""
    entries, pieces = entries_of(arrays)
    with disks.writing(_ASIDE), contextlib.closing(disk.create(_ASIDE)) as handle:
        handle.append(pieces)
        stored = StoredArrays(disk.reader(_ASIDE), 0, entries, _ASIDE)
        disk.unlink(_ASIDE)
    return {name: stored.vector(name) for name in stored}


def entries_of(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[str, dict[str, Any]], list[memoryview]]:
    """Return the entries of a safetensors header for some arrays, and the memory of each in that order, never a
    copy."""
    entries = _entries_of(arrays)
    ordered = map(arrays.__getitem__, entries)
    return entries, [each.mapped() if isinstance(each, StoredVector) else _bytes_of(each) for each in ordered]


def _entries_of(arrays: Mapping[str, npt.NDArray[Any] | StoredVector]) -> dict[str, dict[str, Any]]:
    # Wide numbers first: the library reads only files whose arrays start at multiples of their item size.
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name in order:
        start, end = end, end + arrays[name].nbytes
        entries[name] = {
            "dtype": _TYPES[arrays[name].dtype.name],
            "shape": arrays[name].shape,
            "data_offsets": (start, end),
        }
    return entries


def _file(checkpoint: Checkpoint) -> Iterator[Buffer]:
    """Return the pieces of a safetensors file: its header, then the memory of each array itself, never a copy; of one
    in a file, block after block.

    The library joins everything to one piece first, which takes twice the state's memory.
    """
    entries = _entries_of(checkpoint.arrays)

    def parts() -> Iterator[memoryview]:
        for array in map(checkpoint.arrays.__getitem__, entries):
            yield from array.blocks() if isinstance(array, StoredVector) else (_bytes_of(array),)

    metadata = {"state": json.dumps(checkpoint.state), "round": str(checkpoint.round), "format": str(FORMAT)}
    header: dict[str, object] = {"__metadata__": metadata, **entries}
    metadata["checksum"] = _checksum(header, parts())
    yield safetensors_head(json.dumps(header).encode())
    yield from parts()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def _checksum(header: Mapping[str, Any], parts: Iterable[Buffer]) -> str:
    """Return XXH3-64 over the header (without the checksum itself) and all arrays, in hex."""
    checksum = xxhash.xxh3_64(json.dumps(header).encode())
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()


def _round_of(name: str) -> int | None:
    digits = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    matches = name.startswith(_PREFIX) and name.endswith(_SUFFIX) and digits.isdecimal()
    return int(digits) if matches else None
