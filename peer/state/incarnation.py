"""The incarnation of its device to which a state folder belongs, and the beginning of a new one.

A device that was declared lost takes part again as another peer (`gossip.incarnations`). The file says so before
anybody hears of the new number. Even if the process ends then, the former incarnation's files are set aside before
anything of the new one is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.state.disk import Disk
from peer.state.kept_file import KeptFile
from peer.state.recovery import StateFiles


@dataclass(frozen=True)
class Incarnation:
    """The file's record of the peer to which a state folder belongs."""

    number: int = 0
    """0 for the first, which has no file."""
    is_begun: bool = True
    """Whether the former incarnation's files were set aside."""


def _of_json(tree: Mapping[str, Any]) -> Incarnation:
    found = Incarnation(int(tree["incarnation"]), bool(tree["begun"]))
    if found.number < 1:
        raise ValueError("the first incarnation has no file")
    return found


_FILE = KeptFile[Incarnation](
    "incarnation.json",
    lambda kept: {"incarnation": kept.number, "begun": kept.is_begun},
    _of_json,
    "restore it from a copy, or rename the state folder: the peer then begins as one whose state is lost",
)


def read(disk: Disk) -> Incarnation:
    """Return the incarnation to which a folder belongs. Raises StateError if its file cannot be read."""
    return _FILE.read(disk) or Incarnation()


def read_folder(directory: Path) -> int:
    """Return the number of the incarnation to which a state folder, which need not exist yet, belongs. Raises
    StateError."""
    return read(Disk(directory)).number


def begin(disk: Disk, number: int) -> None:
    """Let the next incarnation begin: checkpoints and journals of the former one are renamed to set-aside-N-NAME, and
    never read again. A crash in between leaves this to `finish`. Raises StateError."""
    _FILE.keep(disk, Incarnation(number, is_begun=False))
    finish(disk)


def finish(disk: Disk) -> Incarnation:
    """Complete a `begin` that a crash has cut off, if any; return the incarnation to which the folder belongs."""
    found = read(disk)
    if found.is_begun:
        return found
    StateFiles(disk, {}, keep=1, regular=0).go_back(-1)
    found = Incarnation(found.number)
    _FILE.keep(disk, found)
    return found
