"""Files in folders where others may write, too: written whole under another name and renamed, never through a link.

Run folders are copied and shared, and /tmp belongs to everybody. Anyone that can make a file there can put a link in
the place of one about to be written, or a folder of their own in the place of ours. A file written as a whole gets its
name once it is complete, which replaces a link and does not follow it. A file written to in place, such as a log or a
lock, must be a plain file of this user.

What a kill interrupts stays as .NAME.X.part. Patterns of pathlib match names that begin with a dot, too, but none for
finished files matches this one; the next writer of the same file removes it.

All functions that write raise OSError. The last ones say what lies near a path or module that is not there, as a clause
of the sentence on that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from peer.errors import closest

MEANT = "; did you mean "
"""Beginning of the clause on a path that is spelt alike."""
_UNFINISHED = ".part"
_NO_FOLDERS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace a file, or make it; text is UTF-8. An interruption leaves the old file, and no link is followed."""
    with replacing(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def safetensors_head(header: bytes) -> bytes:
    """Return how a safetensors file with this header (JSON) begins: the arrays follow, the first of them aligned."""
    size = -(-len(header) // 8) * 8
    return size.to_bytes(8, "little") + header.ljust(size)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new, empty file in the same folder, which takes the name `path` at the end, on disk by then.
    A file that it replaces hands on its permissions. Files in /dev are written to in place."""
    if path.parent in _NO_FOLDERS:
        yield path
        return
    _remove_unfinished(path)
    beside, held = _begin(path)
    try:
        yield beside
        with contextlib.suppress(FileNotFoundError):
            old = path.lstat()
            if stat.S_ISREG(old.st_mode) and old.st_uid == os.geteuid():
                beside.chmod(stat.S_IMODE(old.st_mode))
        written = os.open(beside, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(written)
        finally:
            os.close(written)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    finally:
        os.close(held)


def _begin(path: Path) -> tuple[Path, int]:
    """Return a new, empty file beside another one, and a descriptor. It holds a lock for as long as the file is being
    written."""
    while True:
        beside = path.with_name(f".{path.name[-200:]}.{secrets.token_hex(8)}{_UNFINISHED}")
        held = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        # Where files cannot be locked, nobody takes them for unfinished either.
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        if os.fstat(held).st_nlink:
            return beside, held
        os.close(held)  # Another writer took it for unfinished before it was locked.


def _remove_unfinished(path: Path) -> None:
    """Remove what writers of a file left that were killed."""
    is_beside = re.compile(rf"\.{re.escape(path.name[-200:])}\.[0-9a-f]{{16}}{re.escape(_UNFINISHED)}").fullmatch
    with contextlib.suppress(OSError):
        for name in filter(is_beside, os.listdir(path.parent)):
            with contextlib.suppress(OSError):
                found = open_own(path.with_name(name), os.O_WRONLY)
                try:
                    # Whoever still writes it holds the lock.
                    fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.with_name(name).unlink()
                finally:
                    os.close(found)


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Return the descriptor of a file that is written to in place: a plain file of this user, made if `flags` say so
    (os.O_APPEND, os.O_CREAT, …). Raises PermissionError for a link, and for a file of somebody else."""
    try:
        # Without O_NONBLOCK, a pipe in its place would make this process wait for ever.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(errno.EPERM, "it is a link, which is not followed", str(path)) from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is no plain file of this user", str(path))
    return descriptor


def make_own_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, if it is not there. Raises PermissionError for a link, and for a folder of
    somebody else, who could replace its content."""
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, "it is a link, which is not followed", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if mode & 0o077 == 0 and found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "other users can enter it", str(path))


def instead_of(path: Path) -> str:
    """Return which path is spelt most like one that is not there, or what is where it would begin; empty where nothing
    is, and for a path that is there."""
    if path.exists():
        return ""
    written = path
    while not path.parent.is_dir():
        path = path.parent
    try:
        names = sorted(each.name for each in path.parent.iterdir() if not each.name.startswith("."))
    except OSError:
        return ""
    alike = [name for name in names if Path(name).suffix == path.suffix or Path(name).stem == path.stem]
    held = f"; {path.parent.absolute()} holds {', '.join(names[:5])}{', …' * (len(names) > 5)}"
    close = _closest(path.name, alike if path.suffix else names)
    if close is None:
        return held if names else ""
    meant = path.with_name(close) / written.relative_to(path)
    return f"{MEANT}{meant if meant.exists() else path.with_name(close)}?"


def missing_module(name: str) -> str | None:
    """Return a remedy where there is no such module, in a package or in the working directory; None if it is there."""
    folders, known = [*sys.path, os.getcwd()], ""
    for part in name.split("."):
        spec = PathFinder.find_spec(part, folders) or (importlib.util.find_spec(part) if part and not known else None)
        if spec is None:
            near = (path.stem for folder in (folders if known else folders[-1:]) for path in Path(folder).glob("*"))
            close = _closest(part, near)
            meant = None if close is None else f"{MEANT}{known}{close}?"
            return meant or "; start in the folder that contains it, or install it"
        folders, known = [*(spec.submodule_search_locations or ())], f"{known}{part}."
    return None


def _closest(written: str, names: Iterable[str]) -> str | None:
    """Return the name that is spelt most like what was written, suffixes apart; None where none is alike."""
    by_stem = {Path(name).stem: name for name in names}
    close = closest(Path(written).stem, by_stem)
    return None if close is None else by_stem[close]
