"""Fetching a file: it comes whole and right, or the sentence says why not and what came is kept."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from peer.errors import DataError
from peer.train.datasets import download as downloads
from peer.train.datasets.download import ATTEMPTS, download
from tests.train.datasets.file_server import Shelf, serving

CONTENT = np.random.default_rng(0).integers(0, 256, 700_000, dtype=np.uint8).tobytes()
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with serving({"file": CONTENT}) as shelf:
        yield shelf


def get(shelf: Shelf, folder: Path, **options) -> downloads.Downloaded:
    options = {"sha256": DIGEST, "size": len(CONTENT), "pause": lambda seconds: None, **options}
    return download(f"{shelf.url}/file", folder / "new" / "file", **options)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "new").iterdir())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("length", [True, False])
def test_a_file_comes_whole(shelf: Shelf, tmp_path: Path, known: bool, length: bool):
    shelf.length = length
    seen: list[tuple[int, int | None]] = []
    options = {} if known else {"sha256": None, "size": None}
    result = get(shelf, tmp_path, on_progress=lambda done, total: seen.append((done, total)), **options)
    assert (result.sha256, result.size, result.fetched) == (DIGEST, len(CONTENT), len(CONTENT))
    assert result.path.read_bytes() == CONTENT
    assert left(tmp_path) == ["file"]
    assert seen[0][0] == 0
    assert seen[-1] == (len(CONTENT), len(CONTENT) if known or length else None)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_file_that_is_there_is_checked_and_not_fetched(shelf: Shelf, tmp_path: Path):
    get(shelf, tmp_path)
    assert get(shelf, tmp_path).fetched == 0
    assert len(shelf.asked) == 1
    (tmp_path / "new/file").write_bytes(b"other")
    with pytest.raises(DataError, match=r"exists with the SHA-256 .*; move it away"):
        get(shelf, tmp_path)
    assert (tmp_path / "new/file").read_bytes() == b"other"


def test_cut_connections_are_taken_up_where_they_ended(shelf: Shelf, tmp_path: Path):
    shelf.cut_after = [100_000, 250_000, 0]
    assert get(shelf, tmp_path).fetched == len(CONTENT)
    assert shelf.asked == [None, "bytes=100000-", "bytes=350000-", "bytes=350000-"]


def test_a_server_in_trouble_is_asked_again(shelf: Shelf, tmp_path: Path):
    shelf.errors = [503, 500, 429]
    pauses: list[float] = []
    assert get(shelf, tmp_path, pause=pauses.append).sha256 == DIGEST
    assert pauses == [1, 2, 4]


def test_a_later_call_goes_on(shelf: Shelf, tmp_path: Path):
    shelf.cut_after = [100_000] + ATTEMPTS * [0]
    with pytest.raises(DataError, match=r"closed, 6 times in a row; .* resume after 100000 bytes"):
        get(shelf, tmp_path)
    assert left(tmp_path) == ["file.part", "file.part.tag"]
    assert get(shelf, tmp_path).fetched == len(CONTENT) - 100_000
    assert left(tmp_path) == ["file"]


def test_a_server_without_ranges_is_fetched_from_the_start(shelf: Shelf, tmp_path: Path):
    shelf.ranges, shelf.cut_after = False, [100_000]
    assert get(shelf, tmp_path).fetched == len(CONTENT) + 100_000
    assert (tmp_path / "new/file").read_bytes() == CONTENT


def test_a_file_that_changed_meanwhile_is_fetched_from_the_start(shelf: Shelf, tmp_path: Path):
    shelf.cut_after = [100_000] + ATTEMPTS * [0]
    with pytest.raises(DataError):
        get(shelf, tmp_path, sha256=None, size=None)
    shelf.files["file"], shelf.tag = CONTENT[::-1], '"2"'
    result = get(shelf, tmp_path, sha256=None, size=None)
    assert result.path.read_bytes() == CONTENT[::-1]


def test_another_part_than_was_asked_for_is_not_taken(shelf: Shelf, tmp_path: Path):
    shelf.cut_after, shelf.shift = [100_000], 5
    assert get(shelf, tmp_path).path.read_bytes() == CONTENT
    assert shelf.asked == [None, "bytes=100000-", None]


def test_a_part_that_was_whole_is_put_in_place(shelf: Shelf, tmp_path: Path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new/file.part").write_bytes(CONTENT)
    assert get(shelf, tmp_path).fetched == 0
    assert shelf.asked == []
    (tmp_path / "new/file").rename(tmp_path / "new/file.part")
    assert get(shelf, tmp_path, sha256=None, size=None).fetched == 0
    assert shelf.asked == ["bytes=700000-"]


def test_a_part_that_is_too_long_is_dropped(shelf: Shelf, tmp_path: Path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new/file.part").write_bytes(CONTENT + b"x")
    assert get(shelf, tmp_path).sha256 == DIGEST
    (tmp_path / "new/file").rename(tmp_path / "new/file.part")
    (tmp_path / "new/file.part").open("ab").write(b"x")
    assert get(shelf, tmp_path, sha256=None, size=None).sha256 == DIGEST


def test_wrong_bytes_are_thrown_away(shelf: Shelf, tmp_path: Path):
    shelf.files["file"] = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match=r"has the SHA-256 .*, expected "):
        get(shelf, tmp_path)
    assert left(tmp_path) == []
    shelf.files["file"] = CONTENT
    assert get(shelf, tmp_path).sha256 == DIGEST


def test_a_file_of_another_length_is_refused_before_it_comes(shelf: Shelf, tmp_path: Path):
    shelf.files["file"] = CONTENT + b"x"
    with pytest.raises(DataError, match="has 700001 bytes, expected 700000; it is a different file"):
        get(shelf, tmp_path)
    shelf.length = False
    with pytest.raises(DataError, match="sent more than the expected 700000 bytes"):
        get(shelf, tmp_path)


def test_what_is_not_there_is_not_asked_for_again(shelf: Shelf, tmp_path: Path):
    with pytest.raises(DataError, match="the server answered 404 Not Found"):
        download(f"{shelf.url}/nothing", tmp_path / "file", pause=lambda seconds: None)
    assert len(shelf.asked) == 1


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path):
    with serving({}) as shelf:
        url = shelf.url
    with pytest.raises(DataError, match=r"refused.*6 times in a row"):
        download(f"{url}/file", tmp_path / "file", pause=lambda seconds: None)


def test_a_disk_without_room_is_noticed_before_the_transfer(shelf: Shelf, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=699_999))
    with pytest.raises(DataError, match="No space left on device; make room on that disk, and run the same command"):
        get(shelf, tmp_path)
    assert (tmp_path / "new/file.part").stat().st_size == 0


def test_a_disk_that_fills_up_keeps_what_came(shelf: Shelf, tmp_path: Path, monkeypatch):
    def full(done: int, total: int | None) -> None:
        if done >= 300_000:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match="make room on that disk"):
        get(shelf, tmp_path, on_progress=full)
    kept = (tmp_path / "new/file.part").stat().st_size
    assert kept >= 300_000
    assert get(shelf, tmp_path).fetched == len(CONTENT) - kept


def test_two_processes_do_not_write_one_file(shelf: Shelf, tmp_path: Path):
    (tmp_path / "new").mkdir()
    with open(tmp_path / "new/file.part", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is downloading this file"):
            get(shelf, tmp_path)
