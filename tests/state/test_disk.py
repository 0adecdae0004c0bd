"""A folder of files: what is appended is there, whichever way it goes to the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from peer.state.disk import Disk, cannot_be_written, replace

_LARGE = 9 << 20
"""More than two of the blocks that go past the page cache."""


def pieces(*sizes: int) -> list[memoryview]:
    """Return memory of the given sizes, all of it different."""
    generator = np.random.default_rng(5)
    return [generator.integers(0, 256, size, dtype=np.uint8).data for size in sizes]


def test_what_a_person_can_do_goes_by_what_the_system_refused() -> None:
    """Each cause has its own advice: nobody frees space for a file system that is read-only."""
    said = {
        number: str(cannot_be_written("file", OSError(number, os.strerror(number))))
        for number in (
            errno.ENOSPC,
            errno.EROFS,
            errno.EMFILE,
            errno.EACCES,
            errno.EIO,
            errno.ESTALE,
            errno.ENAMETOOLONG,
        )
    }
    assert all(os.strerror(number) in sentence for number, sentence in said.items())
    advice = {sentence.partition("intact: ")[2] for sentence in said.values()}
    assert len(advice) == len(said)
    assert [number for number, sentence in said.items() if "make room" in sentence] == [errno.ENOSPC]
    assert "LimitNOFILE" in said[errno.EMFILE]


def test_what_sqlite_says_of_the_disk_has_the_same_advice(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "db")
    connection.execute("PRAGMA page_size = 512")
    connection.execute("CREATE TABLE t (x)")
    connection.execute("PRAGMA max_page_count = 4")
    with pytest.raises(sqlite3.OperationalError) as caught:
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    assert "make room" in str(cannot_be_written("db", caught.value))


@pytest.mark.parametrize(
    "sizes", [(0,), (5, 7), (1 << 20,), ((1 << 20) + 1,), (4 << 20,), (_LARGE,), (17, _LARGE, 3), (3_000_001,) * 3]
)
def test_a_file_holds_what_it_was_made_of_however_large(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    parts = pieces(*sizes)
    disk = Disk(tmp_path)
    replace(disk, "file", parts)
    assert disk.read("file") == b"".join(parts)
    assert disk.names() == ["file"]


def test_what_follows_a_large_beginning_is_appended_to_it(tmp_path: Path) -> None:
    large, small, more = pieces(_LARGE + 100, 50, 2 << 20)
    handle = Disk(tmp_path).create("file")
    for part in (large, small, more):
        handle.append([part])
    assert handle.size == len(large) + len(small) + len(more)
    handle.close()
    assert Disk(tmp_path).read("file") == b"".join((large, small, more))


def test_large_parts_may_be_appended_anywhere(tmp_path: Path) -> None:
    parts = pieces(100, _LARGE, 7, _LARGE + 3, 4096 - 10, 4 << 20, (4 << 20) - 1, 5)
    handle = Disk(tmp_path).create("file")
    for part in parts:
        handle.append([memoryview(b"before "), part, memoryview(b" after")])
    handle.close()
    expected = b"".join(b"before " + part + b" after" for part in parts)
    assert handle.size == len(expected)
    assert Disk(tmp_path).read("file") == expected


def test_a_large_part_goes_past_the_page_cache_in_whole_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, direct = os.write, []

    def write(file: int, data: memoryview) -> int:
        direct.append((os.fstat(file).st_size % 4096, len(data) % 4096))
        return really(file, data)

    monkeypatch.setattr(os, "write", write)
    small, large = pieces(100, _LARGE)
    handle = Disk(tmp_path).create("file")
    handle.append([small])
    assert not direct
    handle.append([large])
    handle.close()
    assert direct == [(0, 0)] * 3
    assert Disk(tmp_path).read("file") == small.tobytes() + large.tobytes()


def test_a_file_system_that_cannot_pass_the_page_cache_is_written_to_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, command: int, argument: int = 0) -> int:
        if argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    parts = pieces(17, _LARGE)
    replace(Disk(tmp_path), "file", parts)
    assert Disk(tmp_path).read("file") == b"".join(parts)


def test_a_disk_that_takes_other_units_gets_the_rest_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, calls = os.write, []

    def write(file: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return really(file, data[: 1 << 20])
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "write", write)
    parts = pieces(17, _LARGE)
    replace(Disk(tmp_path), "file", parts)
    assert Disk(tmp_path).read("file") == b"".join(parts)


def test_a_full_disk_is_an_error_also_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    disk = Disk(tmp_path)
    disk.create("file").append(pieces(10))
    with pytest.raises(OSError, match="No space"):
        replace(disk, "file", pieces(_LARGE))
    assert disk.size("file") == 10
