"""The texts of a folder as windows of tokens, for language models: .txt files are a document each, and the lines of
.jsonl files are objects with a "text". Any of them may be compressed (.gz, .xz).

A token is a byte unless a file says otherwise, and one token ends each document. A document is either trained on or
held out, by a hash of its content: it stays on its side when others come, and a copy of it is on the same side wherever
it lies. Only the first copy counts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peer.errors import DataError
from peer.foreign_values import parse_json
from peer.train.data import Batch
from peer.train.datasets.text_files import opened

SUFFIXES = (".txt", ".jsonl")
_HELD_OUT_BELOW = b"\x1a"
"""Documents whose hash begins with less are held out: 26 in 256. One is, and one is not, in any case."""
_MOST_HELD_OUT = 256
"""Held-out windows of a subfolder by which models are judged, evenly spread."""


def find_texts(directory: str | Path) -> dict[str, list[Path]]:
    """Return the files with texts by subfolder of a folder, in the order of their names; "" for those in none. Hidden
    ones are left out. Raises DataError if there are none, and for a folder that cannot be read."""
    folder = Path(directory).expanduser()
    found: dict[str, list[Path]] = {}

    def is_hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(folder).parts)

    def refuse(error: OSError) -> None:
        if not is_hidden(Path(error.filename)):
            raise DataError(f"data.directory: {error.filename} cannot be read: {error.strerror}")

    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        below = (Path(at, name) for at, _, names in os.walk(entry, onerror=refuse) for name in names)
        for path in sorted(below) if entry.is_dir() else [entry]:
            parts = path.relative_to(folder).parts
            plain = path.name.removesuffix(".gz").removesuffix(".xz")
            if plain.endswith(SUFFIXES) and path.is_file() and not is_hidden(path):
                found.setdefault(parts[0] if len(parts) > 1 else "", []).append(path)
    if not found:
        raise DataError(f"data.directory: {folder} holds no texts ({', '.join(SUFFIXES)})")
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Encoding:
    """How texts become tokens."""

    size: int
    """Number of different tokens."""
    end: int
    """The token behind each document."""
    encode: Callable[[Sequence[bytes]], torch.Tensor]
    """Returns the tokens of texts, `end` behind each, integers[n]."""
    names: tuple[str, ...] = ()
    """What has to be the same on all devices, token by token."""


BYTES = Encoding(256, 0, lambda texts: torch.frombuffer(bytearray(b"\0".join((*texts, b""))), dtype=torch.uint8))


@dataclass(frozen=True, eq=False)
class WindowData:
    """Windows of texts that lie one after the other."""

    tokens: torch.Tensor
    """Integers[n]."""
    tokens_per_byte: tuple[float, ...]
    """Of each subfolder's texts, and of all; the end of a document counts as a byte."""
    starts: torch.Tensor
    """int64[m], where each window begins."""
    labels: torch.Tensor
    """int64[m], the number of the subfolder."""
    length: int
    found: tuple[str, ...]
    """What was read, as sentences."""

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.starts)

    def batch(self, indices: torch.Tensor) -> Batch:
        """Return windows int64[b, length] and numbers of subfolders int64[b]."""
        places = self.starts[indices][:, None] + torch.arange(self.length)
        return self.tokens[places].long(), self.labels[indices]


def read_windows(
    folders: Mapping[str, Sequence[Path]], length: int, encoding: Encoding = BYTES
) -> tuple[WindowData, WindowData]:
    """Return windows of `length` tokens to train on, and held-out ones, of the texts in some files by subfolder. No
    window lies in two subfolders.

    Raises DataError for a file that is no text, and a subfolder with less than a window on one side.
    """
    known: set[bytes] = set()
    train, test = dict[str, list[bytes]](), dict[str, list[bytes]]()
    for name, paths in folders.items():
        own: dict[bytes, bytes] = {}
        for text in (text for path in paths for text in _texts_of(path)):
            digest = hashlib.sha256(text).digest()
            if digest not in known:
                own[digest] = text
            known.add(digest)
        where = f"subfolder {name}" if name else str(paths[0].parent)
        if len(own) < 2:
            raise DataError(
                f"data.directory: {where} holds {len(own)} texts that are in no other: one is held out, so it takes two"
                " or more"
            )
        ordered = [own[digest] for digest in sorted(own)]
        cut = min(max(1, sum(digest < _HELD_OUT_BELOW for digest in own)), len(ordered) - 1)
        train[where], test[where] = ordered[cut:], ordered[:cut]
    held_out = _windows(test, length, encoding, "held out", _MOST_HELD_OUT)
    return _windows(train, length, encoding, "to train on"), held_out


def _windows(
    texts: Mapping[str, Sequence[bytes]], length: int, encoding: Encoding, use: str, most: int | None = None
) -> WindowData:
    """Return the windows of one side, by subfolder."""
    joined, starts, found, end = list[torch.Tensor](), list[torch.Tensor](), list[str](), 0
    num_bytes = [sum(len(text) + 1 for text in own) for own in texts.values()]
    for (where, own), read in zip(texts.items(), num_bytes, strict=True):
        joined.append(encoding.encode(own))
        size = len(joined[-1])
        if size < length:
            unit = "tokens" if encoding.names else "bytes"
            raise DataError(
                f"data.directory: {where} holds {size} {unit} {use}, and a window takes {length}: add texts, or lower"
                " training.task_options.context"
            )
        count = size // length
        starts.append(end + length * torch.arange(0, count, 1 if most is None else -(-count // most)))
        end += size
        tokens = f", {size:,} tokens" if encoding.names else ""
        found.append(f"{where}: {len(own):,} different texts, {read:,} bytes{tokens}")
    labels = torch.cat([torch.full_like(each, number) for number, each in enumerate(starts)])
    ratios = [len(own) / read for own, read in zip(joined, num_bytes, strict=True)]
    ratios.append(end / sum(num_bytes))
    return WindowData(torch.cat(joined), tuple(ratios), torch.cat(starts), labels, length, tuple(found))


def _texts_of(path: Path) -> Iterator[bytes]:
    """Yield the texts of a file, which are not empty."""
    with opened(path) as file:
        if ".jsonl" not in path.suffixes:
            yield from _checked(file.read(), str(path))
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = parse_json(line)
            except ValueError as error:
                raise DataError(f"{where}: is not valid JSON: {error}") from None
            if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                raise DataError(f'{where}: is no object with a "text", as {{"text": "…"}}')
            yield from _checked(value["text"], where)


def _checked(text: str, where: str) -> Iterator[bytes]:
    if "\0" in text:
        raise DataError(f"{where} holds zero bytes, so it is no text; take it out of the folder")
    if text:
        yield text.encode()
