"""A folder of files as the durable state needs it: few operations, each of them a point at which a process may die.

`Disk` is a folder of the file system. Tests and the fault simulator put another one in its place, which tears writes,
loses unsynced bytes, and fills up. The operations promise what POSIX promises:

- `append` hands bytes to the operating system. When it returns they survive the end of the process, not a power cut;
  when it fails, any part of them may be there.
- `sync` makes all bytes appended to a file survive a power cut.
- `rename` replaces the target in one step; like `create` and `unlink`, it survives a power cut after `sync_folder`.

All of them raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from peer.errors import StateError, remedy

Buffer: TypeAlias = bytes | memoryview
Readable: TypeAlias = io.FileIO | io.BytesIO

_DIRECT_FROM_BYTES = 1 << 20
"""A new file of this size goes past the page cache. Only a starting peer reads a checkpoint, and filling fresh pages
with one takes ten times the processor time of the rest of saving it (1 to 2 s/GB on a virtual machine)."""
_DIRECT_BLOCK_BYTES = 4 << 20
"""Bytes handed to the disk at a time. An addition to a file goes past the page cache from this size on: a peer waits
for each addition to its journal, and a smaller one is done sooner through the cache."""
_DIRECT_UNIT_BYTES = 4096
"""Offsets, lengths and memory are multiples of this; no file system in use asks for more."""


_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
"""A model and its history reveal something of the data: only their owner may read them."""


def cannot_be_written(name: str, error: Exception) -> StateError:
    """Return the error for a disk that refuses."""
    problem = error.strerror if isinstance(error, OSError) and error.strerror else error
    return StateError(
        f"{name}: cannot be written: {problem}; the saved state is intact: {remedy(error)}, then start the peer again"
    )


@contextlib.contextmanager
def writing(name: str) -> Iterator[None]:
    """Raise StateError, naming the file, if the disk refuses a write inside."""
    try:
        yield
    except OSError as error:
        raise cannot_be_written(name, error) from None


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Let only their owner read the files and folders that any code of this process creates inside."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_private(folder: Path) -> None:
    """Let only their owner read a folder and its content. Raises OSError if that is not ours to do."""
    if folder.stat().st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "it is a folder for the files of everybody")
    folder.chmod(_PRIVATE_FOLDER)
    for path, folders, files in os.walk(folder):
        for names, mode in ((folders, _PRIVATE_FOLDER), (files, _PRIVATE_FILE)):
            for name in names:
                below = Path(path, name)
                # The target of a link is no part of the folder, and a file may be gone by now.
                with contextlib.suppress(FileNotFoundError):
                    if not below.is_symlink():
                        below.chmod(mode)


def blocks(file: Readable | io.BufferedIOBase, size: int | None = None) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file in blocks of 4 MB; all that is left without a size. Fewer where it ends."""
    while size is None or size > 0:
        block = file.read(_DIRECT_BLOCK_BYTES if size is None else min(size, _DIRECT_BLOCK_BYTES))
        if not block:
            return
        size = None if size is None else size - len(block)
        yield block


def replace(disk: Disk, name: str, parts: Iterable[Buffer]) -> None:
    """Replace a file so that after a crash it holds either the old or the new content, whole. Parts that are made as
    they are asked for are not all held at once."""
    beside = f".{name}.new"
    handle = disk.create(beside)
    try:
        turn: list[Buffer] = []
        size = 0
        for part in parts:
            turn.append(part)
            size += len(part)
            # In large pieces: those go past the page cache.
            if size >= _DIRECT_BLOCK_BYTES:
                handle.append(turn)
                turn, size = [], 0
        handle.append(turn)
        handle.sync()
    finally:
        handle.close()
    disk.rename(beside, name)
    # The rename itself is durable only once the folder is.
    disk.sync_folder()


class Disk:
    """A folder of the file system. Names are plain file names."""

    def __init__(self, folder: Path) -> None:
        """`folder` exists, unless the caller only reads a file that may be there."""
        self.folder = folder

    def where(self, name: str) -> str:
        """Return the path of a file, which need not exist: messages to people name it, who may have several folders."""
        return str(self.folder / name)

    def names(self) -> list[str]:
        """Return the names of all files, in any order."""
        return os.listdir(self.folder)

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def reader(self, name: str) -> Readable:
        """Open a file to read parts of it, as it is now, without a buffer."""
        return (self.folder / name).open("rb", buffering=0)

    def create(self, name: str) -> Handle:
        """Open a new, empty file; one of that name is emptied."""
        return Handle(self.folder / name, os.O_CREAT | os.O_TRUNC)

    def open(self, name: str) -> Handle:
        """Open an existing file to append to it."""
        return Handle(self.folder / name, 0)

    def truncate(self, name: str, size: int) -> None:
        """Cut a file off and make that survive a power cut."""
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.truncate(file, size)
            os.fsync(file)
        finally:
            os.close(file)

    def rename(self, old: str, new: str) -> None:
        os.replace(self.folder / old, self.folder / new)

    def unlink(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class Handle:
    """A file that is open for appending, without a buffer in this process: bytes appended outlive it."""

    def __init__(self, path: Path, flags: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | flags, _PRIVATE_FILE)
        self.size = os.fstat(self._file).st_size
        """Bytes of the file."""
        self._block: mmap.mmap | None = None
        """Aligned memory for writes past the page cache, kept because fresh pages are expensive."""

    def append(self, parts: Sequence[Buffer]) -> None:
        """Add bytes at the end."""
        rest = [memoryview(part) for part in parts if len(part)]
        if sum(map(len, rest)) >= (_DIRECT_BLOCK_BYTES if self.size else _DIRECT_FROM_BYTES):
            self._append_through_cache(rest, -self.size % _DIRECT_UNIT_BYTES)
            self._append_directly(rest)
        self._append_through_cache(rest, sum(map(len, rest)))

    def _append_through_cache(self, rest: list[memoryview], size: int) -> None:
        """Write the first `size` bytes of `rest` and remove them from it."""
        end = self.size + size
        while self.size < end:
            # A few parts at a time: the kernel takes no more than 1024.
            some = _first(rest[:64], end - self.size)
            self._advance(rest, os.writev(self._file, some))

    def _append_directly(self, rest: list[memoryview]) -> None:
        """Write the whole units of `rest` past the page cache and remove them from it; none if the file system cannot
        do that."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            return
        try:
            block = self._block = self._block or mmap.mmap(-1, _DIRECT_BLOCK_BYTES)
            while (filled := _fill(block, rest)) >= _DIRECT_UNIT_BYTES:
                with memoryview(block) as view, view[: filled - filled % _DIRECT_UNIT_BYTES] as units:
                    written = os.write(self._file, units)
                self._advance(rest, written)
                if written % _DIRECT_UNIT_BYTES:
                    return
        except OSError as error:
            # It wants other units than ours: the rest goes through the cache.
            if error.errno != errno.EINVAL:
                raise
        finally:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)

    def _advance(self, rest: list[memoryview], written: int) -> None:
        """Remove the bytes written from the front of `rest`."""
        self.size += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]

    def sync(self) -> None:
        """Make everything appended so far survive a power cut. May be called from another thread than `append`."""
        os.fdatasync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._block is not None:
            self._block.close()
            self._block = None


def _first(parts: Iterable[memoryview], size: int) -> list[memoryview]:
    """Return the first `size` bytes of `parts`."""
    taken = []
    for part in parts:
        taken.append(part[:size])
        size -= len(taken[-1])
        if not size:
            break
    return taken


def _fill(block: mmap.mmap, parts: Iterable[memoryview]) -> int:
    """Copy the beginning of `parts` into the block; return the number of bytes copied."""
    end = 0
    for part in parts:
        piece = part[: len(block) - end]
        block[end : end + len(piece)] = piece
        end += len(piece)
        if end == len(block):
            break
    return end
