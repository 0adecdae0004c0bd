"""Conversion of states to the arrays of a checkpoint and back: groups of arrays, lists of frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.errors import RemoteProtocolError, StateError

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


def grouped(**groups: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of all groups, each under "group/name"."""
    return {f"{group}/{name}": value for group, arrays in groups.items() for name, value in arrays.items()}


def group(arrays: Arrays, name: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of one group under their own names."""
    return dict(Group(arrays, name))


class Group(Mapping[str, npt.NDArray[Any]]):
    """The arrays of one group under their own names, each taken when it is asked for: those of a checkpoint are then
    not in memory all at once."""

    def __init__(self, arrays: Arrays, name: str) -> None:
        """`name` of the group."""
        self._arrays, self._prefix = arrays, f"{name}/"

    def __getitem__(self, item: str) -> npt.NDArray[Any]:
        """Return an array of the group."""
        return self._arrays[self._prefix + item]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return (key.removeprefix(self._prefix) for key in self._arrays if key.startswith(self._prefix))

    def __len__(self) -> int:
        """Return the number of arrays."""
        return sum(1 for _ in self)


def joined(frames: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Return frames one after the other: uint8[bytes]. Their lengths have to be kept separately."""
    return np.frombuffer(b"".join(frames), dtype=np.uint8)


def cut(blob: npt.NDArray[Any], lengths: Sequence[int]) -> list[bytes]:
    """Return the frames that `joined` was given."""
    data, frames, start = blob.tobytes(), [], 0
    for length in lengths:
        frames.append(data[start : start + length])
        start += length
    return frames


@contextmanager
def refusing_what_does_not_fit() -> Iterator[None]:
    """Raise StateError for any error inside with a checkpoint's values: they are another configuration's."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RemoteProtocolError) as error:
        raise StateError(f"the checkpoint does not fit this configuration: {error}") from None
