"""The data sets that `sotto data fetch` knows: the places of their files, and checksums to verify them.

Checksums are those of the published files. Where nobody publishes one, the first fetch records it in SHA256SUMS beside
the files, and later fetches are checked against it.
"""

from __future__ import annotations

import shutil
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from peer.errors import ConfigError, DataError
from peer.files import write_whole
from peer.foreign_values import parse_toml
from peer.train.datasets.download import Downloaded, download

RECORD = "SHA256SUMS"


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set."""

    name: str
    url: str
    """URL of the folder."""
    sha256: str | None = None
    size: int | None = None
    there: str = ""
    """Its name in that folder, where that is another."""


@dataclass(frozen=True)
class DataSet:
    """A data set as the lists show it."""

    summary: str
    task: str
    """The task that reads it."""
    files: tuple[RemoteFile, ...]
    unpacks: bool = False
    """Whether the task reads the contents of the archive from a folder."""
    option: str = ""
    """The option of that task that names the file, where it is no set of samples."""


def _read_catalogue() -> Mapping[str, DataSet]:
    entries = parse_toml(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return {
        name: DataSet(**{**entry, "files": tuple(RemoteFile(**file) for file in entry["files"])})
        for name, entry in entries.items()
    }


DATA_SETS = _read_catalogue()


@dataclass(frozen=True)
class Fetched:
    """The files that `fetch` left on disk."""

    directory: Path
    files: tuple[Downloaded, ...]
    recorded: tuple[str, ...]
    """Names of files that nobody publishes a checksum of, recorded by this fetch."""


def fetch(
    name: str,
    directory: Path,
    *,
    mirror: str | None = None,
    on_progress: Callable[[str, int, int | None], None] = lambda file, done, total: None,
    pause: Callable[[float], None] = time.sleep,
) -> Fetched:
    """Fetch the files of a data set into a folder, those that are not there yet, and unpack them where need be.

    `mirror` is the address of another folder that holds files of the same names. `on_progress` gets name, bytes so far
    and bytes in all where known. Raises ConfigError for an unknown name, DataError for errors of `download`.
    """
    if name not in DATA_SETS:
        raise ConfigError("unknown data set", key="NAME", value=name, valid=", ".join(DATA_SETS))
    data_set, record = DATA_SETS[name], read_record(directory)
    files, recorded = [], []
    for file in data_set.files:
        known = file.sha256 or record.get(file.name)
        done = download(
            f"{(mirror or file.url).rstrip('/')}/{file.there or file.name}",
            directory / file.name,
            sha256=known,
            size=file.size,
            on_progress=partial(on_progress, file.name),
            pause=pause,
        )
        if known is None:
            write_record(directory, {**record, file.name: done.sha256})
            record = read_record(directory)
            recorded.append(file.name)
        files.append(done)
        if data_set.unpacks:
            unpack(done.path)
    return Fetched(directory, tuple(files), tuple(recorded))


def unpack(archive: Path) -> Path:
    """Unpack a tar archive beside itself, into the folder that it holds, unless that is there; return the folder.

    Only plain files below one folder come out. Raises DataError for a damaged archive or a full disk.
    """
    aside = archive.with_name(f"{archive.name}.unpacking")
    try:
        with tarfile.open(archive, "r:*") as members:
            first = members.next()
            if first is None:
                raise DataError(f"{archive} is empty")
            folder = archive.parent / first.name.strip("/").partition("/")[0]
            if folder.exists():
                return folder
            shutil.rmtree(aside, ignore_errors=True)
            members.extractall(aside, filter="data")
        unpacked = list(aside.iterdir())
        if len(unpacked) != 1 or not unpacked[0].is_dir():
            raise DataError(f"{archive} does not contain exactly one folder")
        (aside / folder.name).replace(folder)
    except (tarfile.TarError, EOFError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{archive} cannot be unpacked: {reason}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def read_record(directory: Path) -> dict[str, str]:
    """Return file → SHA-256 as the folder's SHA256SUMS says; none where there is no such file."""
    path = directory / RECORD
    if not path.exists():
        return {}
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return {fields[1].lstrip("*"): fields[0].lower() for fields in lines if len(fields) == 2}


def write_record(directory: Path, record: Mapping[str, str]) -> None:
    """Write a SHA256SUMS that `sha256sum -c` reads."""
    write_whole(directory / RECORD, "".join(f"{digest}  {name}\n" for name, digest in record.items()))
