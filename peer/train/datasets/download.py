"""One file over HTTP, whole or not at all: resumed after an interruption, checked, and put in place in one step.

The part received so far lies beside the target as NAME.part. A later call asks for the rest of it, and starts anew
where the server cannot send a part or has another file by now. It knows files and HTTP, and nothing of data sets.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from peer import __version__
from peer.errors import DataError, remedy
from peer.files import open_own, write_whole

ATTEMPTS = 6
"""Most resumptions in a row without a byte of progress."""
TIMEOUT_S = 30.0
"""Timeout of connecting, and of waiting for more bytes."""
PIECE = 2**18
LARGEST = 2**34
"""Bytes of a file whose size nobody told."""


@dataclass(frozen=True)
class Downloaded:
    """A file that is in place."""

    path: Path
    sha256: str
    size: int
    fetched: int
    """Bytes that came over the network in this call; 0 where the file was there."""


def download(
    url: str,
    target: Path,
    *,
    sha256: str | None = None,
    size: int | None = None,
    on_progress: Callable[[int, int | None], None] = lambda done, total: None,
    pause: Callable[[float], None] = time.sleep,
) -> Downloaded:
    """Fetch `url` to `target`, unless it is there with the right checksum; return the file found there.

    `on_progress` gets the bytes so far, and in all where that is known. Raises DataError: no connection, not found, a
    wrong checksum (received data is thrown away), a full disk (received data is kept), another process at the same
    file.
    """
    if target.exists():
        return _present(target, sha256)
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_own(part, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            _lock(file, target)
            transfer = _Transfer(url, file, part, size, on_progress)
            transfer.run(pause)
            file.flush()
            os.fsync(file.fileno())
            found = _digest(part)
            if sha256 is not None and found != sha256:
                part.unlink()
                transfer.tag.forget()
                raise DataError(f"{url}: the file received has the SHA-256 {found}, expected {sha256}; try again later")
            part.replace(target)
            transfer.tag.forget()
    except OSError as error:
        raise DataError(
            f"{part}: cannot be written: {error.strerror or error}; {remedy(error)}, and run the same command again to"
            " resume"
        ) from None
    return Downloaded(target, found, target.stat().st_size, transfer.fetched)


class _Transfer:
    """The bytes of one file, over as many connections as it takes."""

    def __init__(
        self, url: str, file: BinaryIO, part: Path, size: int | None, on_progress: Callable[[int, int | None], None]
    ) -> None:
        self._url, self._file, self._size, self._on_progress = url, file, size, on_progress
        self.tag = _Tag(part)
        self._done = file.seek(0, os.SEEK_END)
        self.fetched = 0

    def run(self, pause: Callable[[float], None]) -> None:
        """Leave the whole file in the part."""
        failures = 0
        while True:
            before = self._done
            try:
                if self._connect():
                    return
                reason = "the connection was closed"
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (408, 429):
                    raise DataError(f"{self._url}: the server answered {error.code} {error.reason}") from None
                reason = f"the server answered {error.code} {error.reason}"
            except urllib.error.URLError as error:
                reason = str(error.reason)
            except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
                reason = str(error) or type(error).__name__
            failures = 1 if self._done > before else failures + 1
            if failures >= ATTEMPTS:
                raise DataError(
                    f"{self._url}: {reason}, {ATTEMPTS} times in a row; run the same command again later to "
                    f"resume after {self._done} bytes"
                )
            pause(min(2.0 ** (failures - 1), 15.0))

    def _connect(self) -> bool:
        """Take the data of one connection; return whether the file is whole."""
        if self._size is not None and self._done == self._size:
            return True
        if self._done and (self._size is not None and self._done > self._size):
            self._start_anew()
        headers = {"User-Agent": f"sottovoce/{__version__}", "Accept-Encoding": "identity"}
        if self._done:
            headers["Range"] = f"bytes={self._done}-"
            # The rest of the same file, or all of another one.
            if self.tag.value:
                headers["If-Range"] = self.tag.value
        request = urllib.request.Request(self._url, headers=headers)
        try:
            response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code != 416 or not self._done:
                raise
            # Nothing after what is there: it was whole, unless the server names another length.
            length = (error.headers.get("Content-Range") or "").rpartition("/")[2]
            if length == str(self._done) and self._size is None:
                return True
            self._start_anew()
            return False
        with response:
            total = self._begin(response)
            if total is not None:
                self._refuse_without_room(total)
            self._on_progress(self._done, total)
            while piece := response.read(PIECE):
                self._file.write(piece)
                self._done += len(piece)
                self.fetched += len(piece)
                if self._done > (total or LARGEST):
                    raise DataError(f"{self._url}: the server sent more than the expected {total or LARGEST} bytes")
                self._on_progress(self._done, total)
        self._file.flush()
        return total is None or self._done == total

    def _begin(self, response: http.client.HTTPResponse) -> int | None:
        """Keep or drop the present part, as the answer says; return the length of the whole file where it is known."""
        length = response.headers.get("Content-Length")
        rest = int(length) if length is not None and length.isdigit() else None
        if response.status == 206:
            span = response.headers.get("Content-Range", "")
            if not span.startswith(f"bytes {self._done}-"):
                self._start_anew()
                raise ConnectionError("the server sends another part than was asked for")
        else:
            self._start_anew()
        self.tag.keep(response.headers.get("ETag") or response.headers.get("Last-Modified"))
        total = self._size if rest is None else self._done + rest
        if self._size is not None and total != self._size:
            raise DataError(
                f"{self._url}: the file on the server has {total} bytes, expected {self._size}; it is a different file"
            )
        return total

    def _start_anew(self) -> None:
        self._file.truncate(0)
        self._done = 0

    def _refuse_without_room(self, total: int) -> None:
        free = shutil.disk_usage(self.tag.path.parent).free
        if total - self._done > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Tag:
    """By what the server knows the version of the file that the part belongs to, kept beside it."""

    def __init__(self, part: Path) -> None:
        self.path = part.with_name(f"{part.name}.tag")
        self.value = self.path.read_text(encoding="ascii", errors="replace")[:500] if self.path.exists() else ""

    def keep(self, value: str | None) -> None:
        # Weak tags may not be asked for a part (RFC 9110, section 13.1.5).
        value = "" if value is None or value.startswith("W/") or not value.isascii() else value
        if value != self.value:
            self.value = value
            write_whole(self.path, value)

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def _present(target: Path, sha256: str | None) -> Downloaded:
    found = _digest(target)
    if sha256 is not None and found != sha256:
        raise DataError(f"{target} exists with the SHA-256 {found}, expected {sha256}; move it away to download it")
    return Downloaded(target, found, target.stat().st_size, 0)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lock(file: BinaryIO, target: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{target}: another process is downloading this file") from None
