"""What neighbours have signed of how far they are, and how often the own state was put back on purpose, in the state
folder (`node.progress`).

Kept for the day on which one of them is put back while this peer is stopped. A folder without the file is that of an
earlier release, or of a peer that has met nobody yet.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from peer.errors import StateError
from peer.foreign_values import parse_json
from peer.state.disk import Disk, cannot_be_written, replace

FILE = "progress.json"


@dataclass(frozen=True, kw_only=True)
class KeptProgress:
    """What the file holds."""

    era: int = 0
    """How often the state of this peer was put back on purpose."""
    signed: Mapping[int, bytes] = field(default_factory=dict)
    """Number of a neighbour → the newest that it has signed."""


def read(disk: Disk) -> KeptProgress:
    """Return what a state folder holds. Raises StateError for a file that cannot be read."""
    if FILE not in disk.names():
        return KeptProgress()
    try:
        document = parse_json(disk.read(FILE))
        signed = {int(peer): base64.b64decode(said, validate=True) for peer, said in document["signed"].items()}
        return KeptProgress(era=int(document["era"]), signed=signed)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise StateError(
            f"{FILE} cannot be read or is damaged; restore it from a copy, or delete it, unless this peer was put back"
            " with `sotto rollback`"
        ) from None


def keep(disk: Disk, kept: KeptProgress) -> None:
    """Write the file. Raises StateError."""
    signed = {str(peer): base64.b64encode(said).decode() for peer, said in sorted(kept.signed.items())}
    try:
        replace(disk, FILE, [json.dumps({"era": kept.era, "signed": signed}).encode()])
    except OSError as error:
        raise cannot_be_written(FILE, error) from None


def begin_era(disk: Disk) -> None:
    """Take note that this state is put back on purpose, before that is done: what this peer signed until now is no
    sign that it has lost anything. Raises StateError."""
    kept = read(disk)
    keep(disk, KeptProgress(era=kept.era + 1, signed=kept.signed))
