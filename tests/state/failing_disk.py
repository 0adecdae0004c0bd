"""A disk in memory that ends the process, or fills up, at an operation of the test's choice."""

from __future__ import annotations

import errno
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from peer.state.disk import Buffer


class ProcessEnds(BaseException):
    """The process ends here. Nobody may catch it but the test."""


@dataclass
class Inode:
    data: bytearray = field(default_factory=bytearray)
    synced: int = 0
    """So many bytes would survive a power cut."""


class FailingDisk:
    """Files in memory, with what of them would survive a power cut."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        """Everything that changed something, such as "append journal-00000000.log"."""
        self.end_at: int | None = None
        """The operation at which the process ends, counted from 0."""
        self.torn: float = 0.0
        """Which part of an `append` is done when the process ends in it."""
        self.full = False
        self._now: dict[str, Inode] = {}
        self._after_power_cut: dict[str, Inode] = {}

    def lose_power(self) -> None:
        """Keep only what was synced."""
        self._now = dict(self._after_power_cut)
        for inode in self._now.values():
            del inode.data[inode.synced :]

    def restart(self) -> None:
        """Let the next process use the disk without an accident."""
        self.end_at, self.full = None, False

    def change(self, name: str, at: int, value: int) -> None:
        """Damage a byte."""
        self._now[name].data[at] ^= value

    def names(self) -> list[str]:
        return list(self._now)

    def size(self, name: str) -> int:
        return len(self._inode(name).data)

    def read(self, name: str) -> bytes:
        return bytes(self._inode(name).data)

    def reader(self, name: str) -> io.BytesIO:
        return io.BytesIO(self.read(name))

    def create(self, name: str) -> FailingHandle:
        self.happens(f"create {name}")
        self._now[name] = Inode()
        return FailingHandle(self, name, self._now[name])

    def open(self, name: str) -> FailingHandle:
        return FailingHandle(self, name, self._inode(name))

    def truncate(self, name: str, size: int) -> None:
        self.happens(f"truncate {name}")
        inode = self._inode(name)
        del inode.data[size:]
        inode.synced = min(inode.synced, size)

    def rename(self, old: str, new: str) -> None:
        self.happens(f"rename {old} {new}")
        self._now[new] = self._now.pop(old)

    def unlink(self, name: str) -> None:
        self.happens(f"unlink {name}")
        self._now.pop(name, None)

    def where(self, name: str) -> str:
        return name

    def sync_folder(self) -> None:
        self.happens("sync_folder")
        self._after_power_cut = dict(self._now)

    def happens(self, what: str) -> None:
        self.operations.append(what)
        if self.end_at is not None and len(self.operations) > self.end_at:
            raise ProcessEnds(what)

    def _inode(self, name: str) -> Inode:
        if name not in self._now:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return self._now[name]


class FailingHandle:
    def __init__(self, disk: FailingDisk, name: str, inode: Inode) -> None:
        self._disk, self._name, self._inode = disk, name, inode

    @property
    def size(self) -> int:
        return len(self._inode.data)

    def append(self, parts: Sequence[Buffer]) -> None:
        data = b"".join(map(bytes, parts))
        if self._disk.full:
            self._inode.data += data[: len(data) // 2]
            raise OSError(errno.ENOSPC, "No space left on device")
        try:
            self._disk.happens(f"append {self._name}")
        except ProcessEnds:
            self._inode.data += data[: int(len(data) * self._disk.torn)]
            raise
        self._inode.data += data

    def sync(self) -> None:
        self._disk.happens(f"sync {self._name}")
        self._inode.synced = len(self._inode.data)

    def close(self) -> None:
        """Nothing is buffered."""
