"""Messages of a training peer to the script that started it and runs its loop."""

from __future__ import annotations

from collections.abc import Sequence

from peer.gossip.membership import Change
from peer.records import RoundRecord
from peer.state.metrics import EvaluationRecord


class Watcher:
    """Is told of events, and does nothing about them; a subclass may. Its methods are called on the event loop; they
    return at once and raise nothing."""

    def round_done(self, record: RoundRecord) -> None:
        """A round of this peer is complete."""

    def late(self, round_: int, names: Sequence[str]) -> None:
        """A round waits for these peers, or goes on without them."""

    def members_change(self, change: Change, name: str) -> None:
        """A peer, `name`, joins, leaves or is lost."""

    def evaluated(self, record: EvaluationRecord, name: str) -> None:
        """A model was measured: this peer's, or that of another peer, `name`, which says so."""
