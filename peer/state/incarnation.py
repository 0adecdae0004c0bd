"""Which incarnation of its device a state folder belongs to, and how a new one begins.

A device that was declared lost takes part again as another peer (`gossip.incarnations`). The file says so before
anybody hears of the new number. Whatever ends the process then: what the former one left is set aside before anything
of the new one is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from peer.errors import StateError
from peer.foreign_values import parse_json
from peer.state.disk import Disk, RealDisk, cannot_be_written, replace
from peer.state.recovery import StateFiles

FILE = "incarnation.json"


@dataclass(frozen=True)
class Incarnation:
    """What a state folder says of the peer that it belongs to."""

    number: int = 0
    """0 for the first, which has no file."""
    is_begun: bool = True
    """Whether what the former incarnation left was set aside."""


def read(disk: Disk) -> Incarnation:
    """Return which incarnation a folder belongs to. Raises StateError if its file cannot be read."""
    if FILE not in disk.names():
        return Incarnation()
    try:
        tree = parse_json(disk.read(FILE))
        found = Incarnation(int(tree["incarnation"]), bool(tree["begun"]))
        if found.number < 1:
            raise ValueError
    except OSError as error:
        raise StateError(f"{FILE}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise StateError(
            f"{FILE}: is damaged; restore it from a copy, or rename the state folder: the peer then begins as one whose"
            " state is lost"
        ) from None
    return found


def read_folder(directory: Path) -> int:
    """Return which incarnation a state folder belongs to, which may not be there yet. Raises StateError."""
    return read(RealDisk(directory)).number if directory.is_dir() else 0


def begin(disk: Disk, number: int) -> None:
    """Let the next incarnation begin: checkpoints and journals of the former one are renamed to set-aside-N-NAME, and
    never read again. A crash in between leaves this to `finish`. Raises StateError."""
    _write(disk, Incarnation(number, is_begun=False))
    finish(disk)


def finish(disk: Disk) -> Incarnation:
    """Do what a crash has kept `begin` from doing, if anything; return which incarnation the folder belongs to."""
    found = read(disk)
    if found.is_begun:
        return found
    StateFiles(disk, {}, keep=1, regular=0).go_back(-1)
    found = Incarnation(found.number)
    _write(disk, found)
    return found


def _write(disk: Disk, incarnation: Incarnation) -> None:
    text = json.dumps({"incarnation": incarnation.number, "begun": incarnation.is_begun})
    try:
        replace(disk, FILE, [text.encode()])
    except OSError as error:
        raise cannot_be_written(FILE, error) from None
