"""The parts of one peer that any way to train needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peer.daemon.checkpoint_cadence import CheckpointCadence
from peer.daemon.device.limits import Limits
from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.admissions import Admissions
from peer.daemon.metrics_writer import MetricsWriter
from peer.daemon.neighbors import Neighbors
from peer.daemon.notes.class_votes import ClassVotes
from peer.daemon.notes.divergence import Divergence
from peer.daemon.notes.evaluations import Evaluations, OwnEvaluation
from peer.daemon.notes.notes import Hearsay
from peer.daemon.notes.releases import Releases
from peer.daemon.runtime import Runtime
from peer.daemon.watcher import Watcher

Judge = Callable[[int, bytes], None]
"""Takes a note: (neighbour, bytes). Raises RemoteProtocolError."""
Greeting = Callable[[int], Iterable[bytes]]
"""Returns the notes that a neighbour should hear that is connected."""


@dataclass(kw_only=True)
class CommonParts:
    """The parts that do not depend on how a peer trains."""

    local: LocalPeer
    runtime: Runtime
    neighbors: Neighbors
    hearsay: Hearsay
    evaluations: Evaluations
    own: OwnEvaluation
    divergence: Divergence
    cadence: CheckpointCadence
    metrics: MetricsWriter
    watcher: Watcher
    admissions: Admissions
    releases: Releases
    class_votes: ClassVotes | None
    """None where the devices do not vote on the shares of the classes."""
    limits: Limits | None
    """None where no limit of this device can be reached."""
