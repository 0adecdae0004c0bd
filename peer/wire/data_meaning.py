"""Meaning of the numbers in a device's data: the class of number 0, the piece of text of number 7, the first column.

Models fit each other by their shapes, and would be mixed even if the dog of one device is the fox of another. Peers
therefore tell digests of the names, in their order, and compare them before they train together. Names are compared as
text, however a file system writes "Ä". Pure: knows no data. A neighbour's digests take at most 8 × 4 kB, and no text of
its gets into a sentence: names are this peer's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peer.foreign_text import normal_name, quote

DIGEST_BYTES = 32
ENTRY_BYTES = 4
MOST_ENTRIES = 1024
"""Most entries; in a longer list, each entry stands for several consecutive names."""
MOST_KINDS = 8
MAX_KIND = 64
CLASSES = "classes"


@dataclass(frozen=True)
class Meaning:
    """The names of one kind, in the order of their numbers."""

    kind: str
    """Kind of the names, in the plural, as in "classes"."""
    names: tuple[str, ...]
    """In Unicode's normal form C; not told."""
    digest: bytes
    """SHA-256 over the names."""
    entries: bytes
    """4 bytes for each name, or for several: they only locate differences."""

    @classmethod
    def of(cls, kind: str, names: Sequence[str]) -> Meaning:
        """Return the digests of some names."""
        normal = tuple(map(normal_name, names))
        each = per_entry(len(normal))
        runs = (normal[start : start + each] for start in range(0, len(normal), each))
        return cls(kind, normal, _digest(normal), b"".join(_digest(run)[:ENTRY_BYTES] for run in runs))

    def difference(self, digest: bytes, entries: bytes, count: int, *, here: str, there: str) -> str | None:
        """Return a sentence on how a neighbour's `count` names differ from these; None if they are the same.

        Only the digest decides: entries are short, and may be anything. The sentence is read at both ends, so it calls
        them by the names `here` and `there`.
        """
        if digest == self.digest:
            return None
        where = self._where(entries, count, here, there)
        return f"the {self.kind} of {there} are not those of {here}: {where}; {_advice(self.kind)}"

    def _where(self, entries: bytes, count: int, here: str, there: str) -> str:
        each = per_entry(len(self.names))
        if count == len(self.names) or max(count, len(self.names)) <= MOST_ENTRIES:
            ours, theirs = (cut(told, ENTRY_BYTES) for told in (self.entries, entries))
            for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
                if mine != other:
                    last = min((number + 1) * each, len(self.names)) - 1
                    if each > 1:
                        return f"they differ between numbers {number * each} and {last}"
                    return f"number {number} is {quote(self.names[number])} at {here}, and another one at {there}"
        if count != len(self.names):
            return f"{there} has {count} and {here} {len(self.names)}"
        return "it says not where"


def meanings_of(names: Mapping[str, Sequence[str]]) -> tuple[Meaning, ...]:
    """Return the digests of the names of each kind. Raises ValueError for names that cannot be told."""
    if len(names) > MOST_KINDS or any(not 0 < len(kind) <= MAX_KIND or not kind.isprintable() for kind in names):
        raise ValueError(f"at most {MOST_KINDS} kinds can be told, whose names have up to {MAX_KIND} characters")
    if any(isinstance(of_kind, str) for of_kind in names.values()):
        raise ValueError("a text is no list of names")
    return tuple(Meaning.of(kind, of_kind) for kind, of_kind in sorted(names.items()))


def refuse_told(kind: str, digest: bytes, entries: bytes) -> None:
    """Raise ValueError for digests that no peer tells."""
    if len(kind) > MAX_KIND or len(digest) != DIGEST_BYTES:
        raise ValueError("what it tells of them is no digest")
    refuse_entries(entries, ENTRY_BYTES)


def per_entry(count: int) -> int:
    """Return the number of consecutive things, of `count` in all, for which one entry stands."""
    return max(1, math.ceil(count / MOST_ENTRIES))


def refuse_entries(entries: bytes, size: int) -> None:
    """Raise ValueError for bytes that no peer tells as entries of `size` bytes each."""
    if len(entries) % size or len(entries) > MOST_ENTRIES * size:
        raise ValueError(f"{len(entries)} bytes are no list of up to {MOST_ENTRIES} entries")


def cut(entries: bytes, size: int) -> list[bytes]:
    """Return entries of so many bytes each, one by one."""
    return [entries[start : start + size] for start in range(0, len(entries), size)]


def _digest(names: Sequence[str]) -> bytes:
    return hashlib.sha256(json.dumps(names).encode()).digest()


def _advice(kind: str) -> str:
    same = f"use the same {kind}, in the same order, on all devices"
    return f"{same}; for folders, data.classes lists them" if kind == CLASSES else same
