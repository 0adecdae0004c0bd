"""What a peer keeps on disk: checkpoints, and the lock on its state folder.

A checkpoint is one safetensors file: arrays by name, and one JSON text under the key "state" of its metadata. It is
written beside, fsynced and renamed, so that a crash at any instant leaves the previous one whole. Checkpoints are
taken between rounds only.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors

from peer.errors import StateError

Buffer: TypeAlias = bytes | memoryview

FORMAT = 1
"""Raised when an old file would be misunderstood; the changelog says what an old file means."""

_TYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
}
"""numpy's names of number types, and those of safetensors."""

_PATTERN = "checkpoint-*.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a peer between two rounds."""

    round: int
    """Rounds completed."""
    state: Mapping[str, Any]
    """JSON values."""
    arrays: Mapping[str, npt.NDArray[Any]]


def write_durably(path: Path, parts: Iterable[Buffer]) -> None:
    """Replace a file so that after a crash it holds either the old or the new content, whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    with open(beside, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    # The rename itself is durable only once the folder is.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class StateFolder:
    """The state folder of one peer, locked against a second process."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        """Create and lock the folder. Raises StateError if that fails."""
        self.directory, self._keep = directory, keep
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = open(directory / "lock", "w")  # noqa: SIM115 - held open for as long as the lock
        except OSError as error:
            raise StateError(f"{directory}: cannot be used as state folder: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StateError(f"{directory}: in use by another peer process; stop that one first") from None

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint durably, then delete those that are no longer kept; return its path."""
        metadata = {"state": json.dumps(checkpoint.state), "round": str(checkpoint.round), "format": str(FORMAT)}
        path = self.directory / f"checkpoint-{checkpoint.round:08d}.safetensors"
        try:
            write_durably(path, _safetensors(checkpoint.arrays, metadata))
        except OSError as error:
            raise StateError(f"{path}: cannot be written: {error.strerror}") from None
        for old in find_checkpoints(self.directory)[: -self._keep]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint, or None in a new folder."""
        paths = find_checkpoints(self.directory)
        return load_checkpoint(paths[-1]) if paths else None

    def go_back(self, round_: int) -> int:
        """Delete the checkpoints above `round_`; return the round of the newest that is left (0: the start)."""
        paths = find_checkpoints(self.directory)
        kept = [path for path in paths if _round_of(path) <= round_]
        for path in paths[len(kept) :]:
            path.unlink()
        return _round_of(kept[-1]) if kept else 0


def find_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted(directory.glob(_PATTERN), key=_round_of)


def load_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint. Raises StateError if the file is damaged or of another format."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            # Copied into memory of our own: safetensors hands out views that start at any multiple of 4 bytes.
            arrays = {name: np.array(file.get_tensor(name), copy=True) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise StateError(f"{path}: cannot be read as a checkpoint: {error}") from None
    if metadata.get("format") != str(FORMAT):
        raise StateError(f"{path}: has format {metadata.get('format')}, this version reads {FORMAT}")
    try:
        return Checkpoint(int(metadata["round"]), json.loads(metadata["state"]), arrays)
    except (KeyError, ValueError) as error:
        raise StateError(f"{path}: the description inside is damaged: {error}") from None


def _safetensors(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> Iterator[Buffer]:
    """Return the pieces of a safetensors file: its header, then the memory of each array itself, never a copy.

    The library joins everything to one piece first, which takes twice the state's memory.
    """
    # Wide numbers first: the library reads only files whose arrays start at multiples of their item size.
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        start, end = end, end + arrays[name].nbytes
        header[name] = {
            "dtype": _TYPES[arrays[name].dtype.name],
            "shape": arrays[name].shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        array = np.ascontiguousarray(arrays[name], arrays[name].dtype.newbyteorder("<"))
        yield array.reshape(-1).view(np.uint8).data


def _round_of(path: Path) -> int:
    digits = path.stem.removeprefix("checkpoint-")
    return int(digits) if digits.isdigit() else -1
