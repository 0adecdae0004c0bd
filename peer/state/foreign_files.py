"""Reading of JSON files within bounds, from a folder that somebody else may have written or a crash damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from peer.errors import StateError
from peer.foreign_values import Infinite, as_kind, parse_json

_MOST_BYTES = 64 << 20

T = TypeVar("T")


def read_json(file: Path, *, infinite: Infinite = "refused") -> Any:
    """Return the value of a file. Raises OSError if it cannot be read, ValueError as `parse_json`."""
    with file.open("rb") as opened:
        text = opened.read(_MOST_BYTES + 1)
    return parse_json(text, most_bytes=_MOST_BYTES, infinite=infinite)


def read_as(kind: type[T], file: Path, *, infinite: Infinite = "refused") -> T:
    """Return the value of a file as one of `kind`, see `as_kind`. Raises OSError if the file cannot be read, StateError
    where it holds something else."""
    try:
        value = read_json(file, infinite=infinite)
    except ValueError as error:
        raise StateError(f"{file}: is damaged, or another kind of file: {error}") from None
    return as_kind(kind, value, file)
