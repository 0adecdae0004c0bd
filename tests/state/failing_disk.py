"""A disk in memory that ends the process, fills up, takes its time, and forgets as real ones do.

What a program wrote is seen by every later reader, and survives the end of the process. The power is another matter:
then only what was synced is sure. Of writes since the last sync any part may be there, torn at any byte or grown with
zeros; of the folder's entries those up to some instant since the folder was synced. POSIX promises no more than that.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from peer.state.disk import Buffer, Disk, Handle


class ProcessEnds(BaseException):
    """The process ends here, in the middle of an operation. Not an `Exception`: no program catches its own end."""


@dataclass
class _File:
    """One file, whatever its name is."""

    content: bytearray = field(default_factory=bytearray)
    """What readers see."""
    synced: bytes = b""
    """What would survive the loss of power for sure."""
    since: list[tuple[int, bytes]] = field(default_factory=list)
    """Writes since the last sync: (offset, data); the data of a truncation to `offset` is empty."""

    def sync(self) -> None:
        self.synced, self.since = bytes(self.content), []

    def apply(self, offset: int, data: bytes) -> None:
        self.since.append((offset, data))
        _write_into(self.content, offset, data)


def _write_into(content: bytearray, offset: int, data: bytes) -> None:
    if not data:
        del content[offset:]
        return
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _keep_some_writes(content: bytearray, writes: Sequence[tuple[int, bytes]], random: Random) -> None:
    for offset, data in writes:
        # Pages reach the platter in any order: a later write may be there without an earlier one.
        fate = random.random()
        if fate < 0.4:
            _write_into(content, offset, data)
        elif fate < 0.6 and data:
            _write_into(content, offset, data[: random.randint(1, len(data))])
        elif fate < 0.8 and data:
            # The length was written, the data was not.
            _write_into(content, offset, bytes(len(data)))


def _unobserved(operation: str, *more: object) -> None: ...


class FailingDisk(Disk):
    """One folder on one disk. Every call that changes something is one operation, which may
    fail, take (virtual) time, or be the last thing that the process does."""

    def __init__(self, random: Random | None = None, observe: Callable[..., None] = _unobserved) -> None:
        """`random` decides what accidents leave; without it they leave as little as they may. `observe(operation,
        *more)` is told of every operation before it is done, and of its data or size."""
        self.operations: list[str] = []
        """Everything that changed something or failed to, such as "append journal-00000000.log"."""
        self.end_at: int | None = None
        """The operation in which the process ends, counted from 0: it is done, not done, or done in part."""
        self.torn = 0.0
        """Which part of an `append` is done then, unless chance decides."""
        self.capacity_bytes: int | None = None
        """The disk is full where its files come to this; None: it never is."""
        self.refused = 0
        """Writes that found the disk full."""
        self.operation_s = 0.0
        self.sync_s = 0.0
        """Virtual seconds of an operation, and of a sync more."""
        self.spent_s = 0.0
        """Virtual seconds that operations have taken since somebody put this to 0."""
        self.forgets = False
        """Whether nothing that is appended from now on is kept: for runs that nobody restarts."""
        self._random, self._observe = random, observe
        self._names: dict[str, _File] = {}
        self._synced_names: dict[str, _File] = {}
        self._renames: list[tuple[str, str | None, _File | None]] = []
        """What happened to names since the folder was synced: (name, new name or None if it is gone, file if new)."""

    def names(self) -> list[str]:
        return sorted(self._names)

    def size(self, name: str) -> int:
        return len(self._file(name).content)

    def read(self, name: str) -> bytes:
        return bytes(self._file(name).content)

    def reader(self, name: str) -> io.BytesIO:
        return io.BytesIO(self.read(name))

    def create(self, name: str) -> FailingHandle:
        with self._operation(f"create {name}") as done:
            if done:
                file = self._names.get(name)
                if file is None:
                    file = self._names[name] = _File()
                    self._renames.append((name, name, file))
                elif file.content:
                    file.apply(0, b"")
        return self.open(name)

    def open(self, name: str) -> FailingHandle:
        return FailingHandle(self, name, self._file(name))

    def truncate(self, name: str, size: int) -> None:
        with self._operation(f"truncate {name}", size) as done:
            if done:
                file = self._file(name)
                if size < len(file.content):
                    file.apply(size, b"")
                file.sync()
            self.spent_s += self.sync_s

    def rename(self, old: str, new: str) -> None:
        with self._operation(f"rename {old} {new}") as done:
            if done:
                self._file(old)
                self._names[new] = self._names.pop(old)
                self._renames.append((old, new, None))

    def unlink(self, name: str) -> None:
        with self._operation(f"unlink {name}") as done:
            if done and self._names.pop(name, None) is not None:
                self._renames.append((name, None, None))

    def where(self, name: str) -> str:
        return name

    def sync_folder(self) -> None:
        with self._operation("sync folder") as done:
            self.spent_s += self.sync_s
            if done:
                self._synced_names, self._renames = dict(self._names), []

    def append(self, name: str, file: _File, parts: Sequence[Buffer]) -> None:
        """Put data at the end of a file. Raises OSError, after a part of it was written, if the disk is full."""
        if self.forgets:
            return
        data = b"".join(parts)
        room = len(data)
        if self.capacity_bytes is not None:
            room = min(room, max(0, self.capacity_bytes - self.used_bytes))
        with self._operation(f"append {name}", data, partly=True) as done:
            if not done:
                room = int(room * self.torn) if self._random is None else self._random.randint(0, room)
            if room:
                file.apply(len(file.content), data[:room])
        if room < len(data):
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self, name: str, file: _File) -> None:
        """Return when the content of a file, though not its name, would survive the loss of power."""
        with self._operation(f"sync {name}") as done:
            self.spent_s += self.sync_s
            if done:
                file.sync()

    # -- misfortune ----------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """The sizes of all files together."""
        return sum(len(file.content) for file in self._names.values())

    def fill(self, room_bytes: int = 1) -> None:
        """Leave room for so many bytes more."""
        self.capacity_bytes = self.used_bytes + room_bytes

    def restart(self) -> None:
        """Let the next process use the disk without an accident."""
        self.end_at = self.capacity_bytes = None

    def lose_power(self) -> None:
        """Keep what was synced, and of the rest what chance leaves."""
        self._names = dict(self._synced_names)
        if self._random is not None:
            self._keep_some_names(self._random)
        self._synced_names, self._renames = dict(self._names), []
        for file in {id(file): file for file in self._names.values()}.values():
            content = bytearray(file.synced)
            if self._random is not None:
                _keep_some_writes(content, file.since, self._random)
            file.content = content
            file.sync()

    def _keep_some_names(self, random: Random) -> None:
        for name, new_name, file in self._renames[: random.randint(0, len(self._renames))]:
            if file is not None:
                self._names[name] = file
                continue
            moved = self._names.pop(name, None)
            if new_name is not None and moved is not None:
                self._names[new_name] = moved

    def change(self, name: str, at: int, value: int) -> None:
        """Damage the bits of `value` in a byte, as a worn-out card does."""
        file = self._file(name)
        file.content[at] ^= value
        file.sync()

    @contextmanager
    def _operation(self, operation: str, *more: object, partly: bool = False) -> Iterator[bool]:
        """Count an operation; the value says whether to do it (as the process ends in it, perhaps not)."""
        if self.forgets:
            yield True
            return
        self._observe(operation, *more)
        self.operations.append(operation)
        self.spent_s += self.operation_s
        if self.end_at is None or len(self.operations) <= self.end_at:
            yield True
            return
        self.end_at = None
        yield not partly and self._random is not None and self._random.random() < 0.5
        raise ProcessEnds(operation)

    def _file(self, name: str) -> _File:
        try:
            return self._names[name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name) from None


class FailingHandle(Handle):
    """A file that is open for appending."""

    def __init__(self, disk: FailingDisk, name: str, file: _File) -> None:
        self._disk, self._name, self._content = disk, name, file
        self.size = len(file.content)

    def append(self, parts: Sequence[Buffer]) -> None:
        self._disk.append(self._name, self._content, parts)
        self.size = len(self._content.content)

    def sync(self) -> None:
        self._disk.sync(self._name, self._content)

    def close(self) -> None: ...
