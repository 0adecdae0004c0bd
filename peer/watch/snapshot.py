"""A run at one moment, as the page shows it: values only. Texts of others in it are printable, and stay text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.records import ACCURACY, Criterion

DOWN = ("unreachable", "lost", "diverged")
"""States of a peer that somebody should look at."""

OVER = ("finished", "left", "lost", "diverged", "stopped", "not joined")
"""States of a peer that no neighbour waits for."""


@dataclass(frozen=True, kw_only=True)
class PeerView:
    """One peer. Unknown values are None. The page gets the fields in this order."""

    index: int
    name: str
    state: str
    """starting, joining, running, stopping, connected (to its neighbours; it cannot be asked), unreachable, not joined,
    finished, stopped, left, lost, diverged."""
    problem: str | None = None
    """Reason for the state."""
    round: int | None = None
    """Completed rounds."""
    loss: float | None = None
    figure: float | None = None
    """Figure by the criterion of the run, at the last evaluation."""
    payload_bytes: int | None = None
    rate: float | None = None
    """Frame bytes that it sends, per second; of the virtual clock in a simulation."""
    budget: float | None = None
    """Frame bytes per second that its budget allows each link."""
    waits_for: tuple[int, ...] = ()
    """Peers whose messages its round lacks, and lacked at the look before."""
    wait_share: float | None = None
    """Fraction of its last rounds spent waiting, 0 to 1."""
    limits: tuple[str, ...] = ()
    """Limits of its device that hold it back, with end and reason."""
    warnings: tuple[str, ...] = ()
    """Limits of its device that are nearly reached."""


@dataclass(frozen=True, kw_only=True)
class EdgeView:
    """The link between two peers, `a` < `b`. The first value of a pair is for the direction from a to b."""

    a: int
    b: int
    sends: tuple[bool, bool]
    """Whether the graph has each direction."""
    state: str
    """up, down, over (one of them has ended), unknown (nobody can be asked)."""
    problem: str | None = None
    rates: tuple[float | None, float | None] = (None, None)
    """Frame bytes per second."""
    lateness_s: tuple[float | None, float | None] = (None, None)
    """Usual lateness of the messages of each direction, where rounds have deadlines."""
    left_out: tuple[bool, bool] = (False, False)
    """Whether this direction gets no weight, because its receiver confirms nothing."""
    backlog_bytes: tuple[int | None, int | None] = (None, None)
    """Bytes sent and not confirmed."""
    relayed: bool = False


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything at one moment."""

    name: str
    kind: str
    """run, cluster, peer, simulation."""
    at: float
    """Unix seconds."""
    rounds: int | None
    criterion: Criterion = ACCURACY
    peers: Sequence[PeerView] = ()
    edges: Sequence[EdgeView] = ()
    averaged_figure: float | None = None
    consensus_distance: float | None = None
    ended: str | None = None
    """Outcome of the run, once it has ended."""
    note: str | None = None
    """Sentences for all readers of the page, also about figures that cannot be shown."""

    @property
    def members(self) -> list[PeerView]:
        """The peers whose progress is that of the run: those that are not gone, and those that finished."""
        return [peer for peer in self.peers if peer.state not in ("left", "lost", "not joined", "joining")]

    @property
    def round(self) -> int | None:
        """Rounds that all members have completed."""
        return min((peer.round for peer in self.members if peer.round is not None), default=None)

    @property
    def worst(self) -> PeerView | None:
        """The member with the worst figure, once there are two to compare."""
        known = [peer for peer in self.members if peer.figure is not None]
        if len(known) < 2:
            return None
        return min(known, key=lambda peer: self.criterion.rank(peer.figure or 0.0))
