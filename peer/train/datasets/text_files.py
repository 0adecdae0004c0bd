"""Sentences and their labels from the files of AG News, SST-2 and SentEval, plain or compressed (.gz, .xz).

The files come from outside: lines and totals are bounded, and lines not in the published format are refused with their
number.
"""

from __future__ import annotations

import csv
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from peer.errors import DataError

MAX_LINES = 2**24
MAX_CHARACTERS = 2**16
"""Longest line; the longest in these sets has some 4,000."""


@dataclass(frozen=True)
class Sentences:
    """One split of a text data set."""

    texts: tuple[str, ...]
    labels: torch.Tensor
    """int64[m]."""


def read_ag_news(directory: str | Path, split: str) -> Sentences:
    """Return `split` ("train" or "test") of AG News: rows of class 1 to 4, title and description, quoted.

    Title and description become one text; the backslashes that stand for line ends become blanks.
    """
    path = find_text(directory, f"{split}.csv")
    texts, labels = [], []
    with opened(path) as file:
        for number, row in enumerate(csv.reader(_bounded(path, file)), start=1):
            if len(row) != 3:
                raise DataError(f"{path}, line {number}: {len(row)} fields instead of class, title and description")
            labels.append(_label(path, number, row[0], 1, 4) - 1)
            texts.append(f"{row[1]} {row[2]}".replace("\\n", " ").replace("\\", " "))
    return _sentences(path, texts, labels)


def read_sst2(directory: str | Path, split: str) -> Sentences:
    """Return `split` ("train", "dev" or "test") of SST-2 as SentEval has it: a sentence, a tab, 0 or 1. With that
    split, the files of GLUE (train.tsv, dev.tsv, with a heading) will do as well."""
    path = find_text(directory, f"sentiment-{split}", f"{split}.tsv")
    texts, labels = [], []
    with opened(path) as file:
        for number, line in enumerate(_bounded(path, file), start=1):
            text, tab, label = line.rstrip("\r\n").rpartition("\t")
            if number == 1 and label == "label":
                continue
            if not tab:
                raise DataError(f"{path}, line {number}: missing tab between sentence and label")
            labels.append(_label(path, number, label, 0, 1))
            texts.append(text.strip())
    return _sentences(path, texts, labels)


def read_sentence_lengths(directory: str | Path) -> dict[str, Sentences]:
    """Return the splits "tr", "va" and "te" of SentEval's probing task on the length of sentences: lines of split,
    class 0 to 5 and sentence, with tabs between them."""
    path = find_text(directory, "sentence_length.txt")
    texts: dict[str, list[str]] = {"tr": [], "va": [], "te": []}
    labels: dict[str, list[int]] = {"tr": [], "va": [], "te": []}
    with opened(path) as file:
        for number, line in enumerate(_bounded(path, file), start=1):
            fields = line.rstrip("\r\n").split("\t")
            if len(fields) != 3 or fields[0] not in texts:
                raise DataError(f"{path}, line {number}: expected tr, va or te, then a class and a sentence")
            labels[fields[0]].append(_label(path, number, fields[1], 0, 5))
            texts[fields[0]].append(fields[2])
    return {split: _sentences(path, texts[split], labels[split]) for split in texts}


def find_text(directory: str | Path, *names: str) -> Path:
    """Return the first of these files that a folder holds, plain, .gz or .xz."""
    folder = Path(directory).expanduser()
    for name in names:
        for suffix in ("", ".gz", ".xz"):
            if (folder / f"{name}{suffix}").is_file():
                return folder / f"{name}{suffix}"
    raise DataError(f"data.directory: {folder} does not contain {' or '.join(names)}")


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open a text file; errors while it is read become a DataError with its name."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="strict", newline="") as file:  # type: ignore[operator]
            yield file
    except (EOFError, OSError, zlib.error, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _bounded(path: Path, file: TextIO) -> Iterator[str]:
    for number in range(1, MAX_LINES + 2):
        line = file.readline(MAX_CHARACTERS + 1)
        if not line:
            return
        if len(line) > MAX_CHARACTERS:
            raise DataError(f"{path}, line {number}: more than {MAX_CHARACTERS} characters")
        yield line
    raise DataError(f"{path} has more than {MAX_LINES} lines")


def _label(path: Path, number: int, text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text[:9]) <= high:
        raise DataError(f"{path}, line {number}: the class is {text[:20]!r}; classes range from {low} to {high}")
    return int(text)


def _sentences(path: Path, texts: list[str], labels: list[int]) -> Sentences:
    if not texts:
        raise DataError(f"{path} contains no sentences")
    return Sentences(tuple(texts), torch.tensor(labels, dtype=torch.int64))
