"""What a run tells its spectators while it goes on: values only, so that any driver can fill them in."""

from __future__ import annotations

from dataclasses import dataclass

from peer.criterion import ACCURACY, Criterion


@dataclass(frozen=True, kw_only=True)
class PeerProgress:
    """One peer as it was last heard of. Bytes are what it has sent since the run began."""

    name: str
    round: int = 0
    """Completed rounds."""
    loss: float | None = None
    """Training loss of the last round."""
    figure: float | None = None
    """Of its own model on the common test set, by the criterion of the run; as of the last evaluation."""
    payload_bytes: int = 0
    frame_bytes: int = 0
    socket_bytes: int | None = None
    """None where the kernel's counters are not at hand (a simulation)."""
    values: int = 0
    """Parameters described by its messages so far: times 4 bytes, what full precision would have cost."""
    neighbors_up: int = 0
    """Neighbours with a living connection."""
    neighbors: int = 0
    """Neighbours of the whole schedule, in either direction."""
    heard: int = 0
    """In-neighbours heard in the round that is going on."""
    awaited: int = 0
    """In-neighbours of the round that is going on."""
    state: str = "starting"
    """starting, connecting, training, waiting, finished, stopped, diverged, lost."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The whole run at one moment."""

    phase: str
    """What is going on, in two or three words: "preparing", "starting peers", "training", "one process on all data"."""
    rounds: int
    """Rounds of the whole run."""
    elapsed_s: float
    """Real seconds since the run began, or was resumed."""
    begun_at_round: int = 0
    """Rounds that had been completed then."""
    peers: tuple[PeerProgress, ...] = ()
    ready: int | None = None
    """How many peers can begin; None where none is awaited any more."""
    criterion: Criterion = ACCURACY
    """What models are compared by."""
    averaged_figure: float | None = None
    consensus_distance: float | None = None
    virtual_s: float | None = None
    """Seconds on the virtual clock of a simulation."""

    @property
    def activity(self) -> str:
        """The phase, and of how many peers it is known that they can begin."""
        return self.phase if self.ready is None else f"{self.phase} {self.ready}/{len(self.peers)}"

    @property
    def round(self) -> int:
        """Rounds that every peer has completed."""
        return min((peer.round for peer in self.peers), default=0)

    @property
    def payload_bytes(self) -> int:
        return sum(peer.payload_bytes for peer in self.peers)

    @property
    def reduction(self) -> float | None:
        """Full-precision bytes of the same messages over payload bytes; None before the first message."""
        payload = self.payload_bytes
        return 4 * sum(peer.values for peer in self.peers) / payload if payload else None

    @property
    def worst_figure(self) -> float | None:
        """Of the worst peer, once all have been evaluated."""
        known = [peer.figure for peer in self.peers if peer.figure is not None]
        return self.criterion.worst(known) if known and len(known) == len(self.peers) else None
