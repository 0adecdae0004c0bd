"""A disk in memory that forgets, as real ones do.

What a program wrote is seen by every later reader, and survives the death of the process. The power is another matter:
then only what was synced is sure. Of writes since the last sync any part may be there, torn at any byte or grown with
zeros; of the folder's entries those up to some instant since the folder was synced. POSIX promises no more than that.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from peer.state.disk import Buffer


class ProcessKilled(BaseException):
    """The process ends here, in the middle of an operation. Not an `Exception`: no program catches its own death."""


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


class VirtualDisk:
    """One folder on one disk. Implements `disk.Disk`. Every call that changes something is one operation, which may
    fail, take (virtual) time, or be the last thing that the process does."""

    def __init__(self, random: Random) -> None:
        """`random` decides what a loss of power leaves."""
        self.capacity_bytes: int | None = None
        """The disk is full where its files come to this; None: it never is."""
        self.operation_s = 0.0
        self.sync_s = 0.0
        """Virtual seconds of an operation, and of a sync more."""
        self.spent_s = 0.0
        """Virtual seconds that operations have taken since somebody put this to 0."""
        self.operations = 0
        """Operations so far, those that failed included."""
        self.kill_at: int | None = None
        """The process dies in this operation (counted as `operations`): it is done, not done, or done in part."""
        self.refused = 0
        """Writes that found the disk full."""
        self._random = random
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

    @property
    def used_bytes(self) -> int:
        """The sizes of all files together."""
        return sum(len(file.content) for file in self._names.values())

    def create(self, name: str) -> VirtualHandle:
        with self._operation() as done:
            if done:
                file = self._names.get(name)
                if file is None:
                    file = self._names[name] = _File()
                    self._renames.append((name, name, file))
                elif file.content:
                    file.apply(0, b"")
        return VirtualHandle(self, self._file(name))

    def open(self, name: str) -> VirtualHandle:
        return VirtualHandle(self, self._file(name))

    def truncate(self, name: str, size: int) -> None:
        with self._operation() as done:
            if done:
                file = self._file(name)
                if size < len(file.content):
                    file.apply(size, b"")
                file.sync()
            self.spent_s += self.sync_s

    def rename(self, old: str, new: str) -> None:
        with self._operation() as done:
            if done:
                self._names[new] = self._take(old)
                self._renames.append((old, new, None))

    def unlink(self, name: str) -> None:
        with self._operation() as done:
            if done and name in self._names:
                self._take(name)
                self._renames.append((name, None, None))

    def where(self, name: str) -> str:
        return name

    def sync_folder(self) -> None:
        with self._operation() as done:
            self.spent_s += self.sync_s
            if done:
                self._synced_names, self._renames = dict(self._names), []

    def append(self, file: _File, parts: Sequence[Buffer]) -> None:
        """Put data at the end of a file. Raises OSError, after a part of it was written, if the disk is full."""
        data = b"".join(parts)
        room = len(data)
        if self.capacity_bytes is not None:
            room = min(room, max(0, self.capacity_bytes - self.used_bytes))
        with self._operation(partly=True) as done:
            if not done:
                room = self._random.randint(0, room)
            if room:
                file.apply(len(file.content), data[:room])
        if room < len(data):
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self, file: _File) -> None:
        """Return when the content of a file, though not its name, would survive the loss of power."""
        with self._operation() as done:
            self.spent_s += self.sync_s
            if done:
                file.sync()

    # -- misfortune ----------------------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        """Keep what was synced, and of the rest what chance leaves."""
        random = self._random
        self._names = dict(self._synced_names)
        for name, new_name, file in self._renames[: random.randint(0, len(self._renames))]:
            if file is not None:
                self._names[name] = file
                continue
            moved = self._names.pop(name, None)
            if new_name is not None and moved is not None:
                self._names[new_name] = moved
        self._synced_names, self._renames = dict(self._names), []
        for file in {id(file): file for file in self._names.values()}.values():
            content = bytearray(file.synced)
            for offset, data in file.since:
                # Pages reach the platter in any order: a later write may be there without an earlier one.
                fate = random.random()
                if fate < 0.4:
                    _write_into(content, offset, data)
                elif fate < 0.6 and data:
                    _write_into(content, offset, data[: random.randint(1, len(data))])
                elif fate < 0.8 and data:
                    # The length was written, the data was not.
                    _write_into(content, offset, bytes(len(data)))
            file.content = content
            file.sync()

    def flip_bit(self, name: str, position: int) -> None:
        """Damage one bit of a file, as a worn-out card does."""
        file = self._file(name)
        file.content[position // 8] ^= 1 << (position % 8)
        file.sync()

    @contextmanager
    def _operation(self, *, partly: bool = False) -> Iterator[bool]:
        """Count an operation; the value says whether to do it (as the process dies in it, perhaps not)."""
        self.operations += 1
        self.spent_s += self.operation_s
        if self.kill_at is None or self.operations < self.kill_at:
            yield True
            return
        self.kill_at = None
        yield not partly and self._random.random() < 0.5
        raise ProcessKilled

    def _take(self, name: str) -> _File:
        file = self._file(name)
        del self._names[name]
        return file

    def _file(self, name: str) -> _File:
        try:
            return self._names[name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name) from None


class VirtualHandle:
    """A file that is open for appending. Implements `disk.Handle`."""

    def __init__(self, disk: VirtualDisk, file: _File) -> None:
        self._disk, self._file = disk, file

    @property
    def size(self) -> int:
        return len(self._file.content)

    def append(self, parts: Sequence[Buffer]) -> None:
        self._disk.append(self._file, parts)

    def sync(self) -> None:
        self._disk.sync(self._file)

    def close(self) -> None: ...
