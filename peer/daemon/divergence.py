"""When training makes no sense any more: one peer finds out, all neighbours hear why, and everybody stops."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

from peer.errors import RemoteProtocolError
from peer.foreign_text import quote

log = logging.getLogger("sotto")

TOPIC = "diverged"
"""Of the notes that carry a round and a reason."""

_MAX_REASON = 500


@dataclass(frozen=True)
class Finding:
    """What one peer found."""

    round: int
    """The last round up to then of which every peer has a checkpoint."""
    reason: str
    """A sentence."""


class Divergence:
    """What this peer knows of a divergence of the run."""

    def __init__(
        self,
        rounds: int,
        *,
        broadcast: Callable[[str, bytes, int | None], None],
        stop: Callable[[str], None],
    ) -> None:
        """`rounds`: how many the run has. `broadcast(topic, note, besides)` tells the neighbours; `stop` ends this peer
        for a reason."""
        self.finding: Finding | None = None
        """The first that this peer found or heard of; None while all is well."""
        self._rounds, self._broadcast, self._stop = rounds, broadcast, stop

    def declare(self, finding: Finding) -> None:
        """Tell everybody what this peer found, and stop."""
        if self.finding is None:
            log.error("%s", finding.reason)
            self._pass_on(finding, None)

    def heard(self, source: int, note: bytes) -> None:
        """Judge the note of a neighbour that stops, pass it on, and stop too. Raises RemoteProtocolError for what is
        none."""
        finding = parse_divergence(note, self._rounds)
        if self.finding is None:
            log.error("peer %d stops: %s", source, quote(finding.reason))
            self._pass_on(finding, source)

    def _pass_on(self, finding: Finding, source: int | None) -> None:
        self.finding = finding
        self._broadcast(TOPIC, divergence_note(finding), source)
        self._stop(finding.reason)


def divergence_note(finding: Finding) -> bytes:
    """Return a finding as peers tell it to each other."""
    return json.dumps([finding.round, finding.reason[:_MAX_REASON]]).encode()


def parse_divergence(note: bytes, rounds: int) -> Finding:
    """Return what `divergence_note` made, in a run of so many rounds. Raises RemoteProtocolError for anything else."""
    try:
        round_, reason = json.loads(note)
    except (ValueError, TypeError, RecursionError):
        raise RemoteProtocolError("told of a divergence in another form") from None
    if not (isinstance(round_, int) and 0 <= round_ <= rounds and isinstance(reason, str)):
        raise RemoteProtocolError("told of a divergence in no round of this run, or without a reason")
    printable = "".join(c if c.isprintable() else " " for c in reason[:_MAX_REASON])
    return Finding(int(round_), printable)
