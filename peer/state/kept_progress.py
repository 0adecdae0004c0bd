"""Progress that neighbours have signed, and the era of the own state, in the state folder (`node.progress`).

Kept for the day on which one of them is put back while this peer is stopped. A folder without the file is that of an
earlier release, or of a peer that has met nobody yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peer.state.disk import Disk
from peer.state.kept_file import KeptFile, notes_of_json, notes_to_json


@dataclass(frozen=True, kw_only=True)
class KeptProgress:
    """Content of the file."""

    era: int = 0
    """Times that the state of this peer was put back on purpose."""
    signed: Mapping[int, bytes] = field(default_factory=dict)
    """Number of a neighbour → its newest signed statement."""


KEPT_PROGRESS = KeptFile[KeptProgress](
    "progress.json",
    lambda kept: {"era": kept.era, "signed": notes_to_json(kept.signed)},
    lambda tree: KeptProgress(era=int(tree["era"]), signed=notes_of_json(tree["signed"])),
    "restore it from a copy, or delete it, unless this peer was put back with `sotto admin rollback`",
)


def begin_era(disk: Disk) -> None:
    """Note that this state is about to be put back on purpose: this peer's statements until now are then no sign that
    it has lost anything. Raises StateError."""
    kept = KEPT_PROGRESS.read(disk) or KeptProgress()
    KEPT_PROGRESS.keep(disk, KeptProgress(era=kept.era + 1, signed=kept.signed))
