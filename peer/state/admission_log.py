"""The admission log of a peer: arrivals, departures, refusals and orders, each entry chained to the last one.

    line := JSON object with "number", "at" (UTC), "what", further keys, and "chain"

"chain" is the SHA-256, in hexadecimal digits, of the chain of the line before it (64 zeros before the first), a line
feed, and the line without "chain" as it would be written. Nobody can thus change, remove or insert a line without
changing all that follow, which the last chain reveals (`sotto status --json` shows it). The file only grows.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from peer.errors import StateError
from peer.foreign_values import parse_json
from peer.state.disk import Disk, Handle, writing

FILE = "admissions.jsonl"
_FIRST = "0" * 64


class AdmissionLog:
    """Writes the log. May be used from several threads."""

    def __init__(self, disk: Disk, now: Callable[[], float]) -> None:
        """`now()`: seconds since 1970. A log that is damaged is set aside: a new one begins with an entry that says so.
        Raises StateError if the disk refuses."""
        self._disk, self._now, self._lock = disk, now, threading.Lock()
        self._handle: Handle | None = None
        self.known: list[Mapping[str, Any]] = []
        """Entries of earlier processes."""
        data = _read(disk) if FILE in disk.names() else b""
        # A line without its end was being written when the process ended.
        whole, problem = data.rfind(b"\n") + 1, None
        try:
            self.known = list(entries(data[:whole]))
            if whole < len(data):
                disk.truncate(FILE, whole)
        except StateError as error:
            problem = str(error)
            disk.rename(FILE, f"{FILE}.damaged")
        self.count = len(self.known)
        self.chain: str = self.known[-1]["chain"] if self.known else _FIRST
        """Chain of the last entry."""
        if problem is not None:
            self.add("damaged", problem=problem, set_aside=f"{FILE}.damaged")

    def add(self, what: str, **details: object) -> None:
        """Write an entry, for good. Raises StateError if the disk refuses."""
        with self._lock:
            at = datetime.datetime.fromtimestamp(self._now(), datetime.UTC).isoformat(timespec="seconds")
            entry = {"number": self.count + 1, "at": at, "what": what, **details}
            chain = _chained(self.chain, entry)
            with writing(FILE):
                if self._handle is None:
                    is_new = FILE not in self._disk.names()
                    self._handle = self._disk.create(FILE) if is_new else self._disk.open(FILE)
                    if is_new:
                        self._disk.sync_folder()
                self._handle.append([_text({**entry, "chain": chain}) + b"\n"])
                self._handle.sync()
            self.count, self.chain = self.count + 1, chain

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._handle is not None:
                self._handle.close()
                self._handle = None


def entries(data: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of a log. Raises StateError at the first that does not follow from those before it."""
    chain = _FIRST
    for number, line in enumerate(data.splitlines(), 1):
        try:
            entry = parse_json(line)
            found = entry.pop("chain")
            follows = entry["number"] == number and found == _chained(chain, entry)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StateError(f"{FILE}: line {number} is damaged") from None
        if not follows:
            raise StateError(f"{FILE}: line {number} was changed, or one before it was added or removed")
        chain = found
        yield {**entry, "chain": chain}


def read_entries(disk: Disk) -> list[Mapping[str, Any]]:
    """Return the entries of a log; none where there is none yet. Raises StateError, see `entries`."""
    data = _read(disk) if FILE in disk.names() else b""
    return list(entries(data[: data.rfind(b"\n") + 1]))  # Of what is being written, the end is left out.


def _read(disk: Disk) -> bytes:
    try:
        return disk.read(FILE)
    except OSError as error:
        raise StateError(f"{FILE}: cannot be read: {error.strerror}") from None


def _chained(before: str, entry: Mapping[str, object]) -> str:
    return hashlib.sha256(before.encode() + b"\n" + _text(entry)).hexdigest()


def _text(entry: Mapping[str, object]) -> bytes:
    return json.dumps(entry, ensure_ascii=True, separators=(",", ":")).encode()
