"""The daemon's interface to the two training loops: in rounds (`peer.daemon.rounds`), and in pairs
(`peer.daemon.pairs`).

The daemon decides when to evaluate, to save and to end; a loop knows the steps of its kind of algorithm and the meaning
of its frames.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Protocol

from peer.compress.payload import FloatArray
from peer.daemon.notes.evaluations import Models
from peer.gossip.membership import ChangeKind
from peer.node.pair_participant import PairParticipant
from peer.node.participant import Participant
from peer.records import RoundRecord


class Loop(Protocol):
    """Takes one peer from round to round. A round of a peer in pairs is one gradient step."""

    def helpers(self) -> Sequence[Coroutine[None, None, None]]:
        """Return the coroutines to run beside `next_round`, until the end."""
        ...

    async def next_round(self) -> RoundRecord | None:
        """Return the record of the next round when it is complete; None if there is none, since this was the last, or
        this peer stops. Raises DivergenceError where going on makes no sense, and other errors as they come."""
        ...

    async def save_at_end(self) -> None:
        """Save the state after a stop or the last round, if it can be saved yet."""
        ...

    async def linger(self) -> None:
        """Stay, after the last round, until the others have all they need of this peer; leave a checkpoint."""
        ...

    async def answer(self) -> None:
        """Take what has come from neighbours after that, and may still be waited for there."""
        ...

    def close(self) -> None:
        """End the threads of this loop."""
        ...

    # -- the state -----------------------------------------------------------------------------------------------------

    @property
    def participant(self) -> Participant | PairParticipant:
        """The peer, without clock, socket and disk."""
        ...

    @property
    def round(self) -> int:
        """Rounds completed."""
        ...

    @property
    def has_left(self) -> bool:
        """Whether this peer is done before the run is, because it left the run."""
        ...

    @property
    def members(self) -> Collection[int]:
        """Peers whose evaluation of the last round is waited for."""
        ...

    def model(self) -> FloatArray:
        """Return z, for a look at it in the worker thread, between rounds."""
        ...

    async def models(self) -> Models:
        """Return the models to evaluate and save, valid until the next round."""
        ...

    def figures(self) -> Mapping[str, object]:
        """Return the fields of `sotto status` for this kind of loop alone, as JSON values."""
        ...

    def link_figures(self, peer: int) -> Mapping[str, object]:
        """Return the same for the link to one neighbour."""
        ...


class Saver(Protocol):
    """The daemon's interface to both savers. Every method raises StateError if the disk refuses."""

    async def checkpoint(self) -> None:
        """Save the state, between rounds."""
        ...

    async def take_snapshot(self) -> None:
        """Save the state for the operator, now or as soon as it can be saved."""
        ...

    async def sync(self) -> None:
        """Make what was journaled survive a power cut, and tell the neighbours what they may forget."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class Frames(Protocol):
    """Entry of neighbours' frames into a loop, and the needs of a neighbour that is back. On the event loop.

    Misconduct of a neighbour raises RemoteProtocolError: its link is closed with that sentence.
    """

    def frames_for(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """Return (number, frame), in order, of the frames for a connected neighbour that durably has ours up to
        `remote_has`."""
        ...

    def disconnected(self, peer: int) -> None:
        """Take note that the link to a neighbour ended."""
        ...

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """Take a whole frame; False keeps its credit back until it was looked at."""
        ...

    def receipt(self, peer: int, upto: int) -> None:
        """Take note that a neighbour has our frames up to `upto` for good."""
        ...

    def last_received(self, peer: int) -> int:
        """Return the number of the last frame of a neighbour that need not be sent again."""
        ...


class Members(Protocol):
    """Changes of a run's members at an operator's request. Refusals raise SottoError with the reason."""

    async def announce(self, kind: ChangeKind, subject: int, *, ordered: bytes = b"") -> dict[str, object]:
        """Announce a change of the members; return from which round on it counts, as JSON values. `ordered`: an
        operator's signed order, for a loss."""
        ...

    async def follow_list(self, taken_out: Sequence[str]) -> dict[str, object]:
        """Link to the peers in the present list, and go on without those that were taken out; return the result as JSON
        values."""
        ...

    def is_gone(self, peer: int) -> bool:
        """Return whether a peer was a member and is none any more."""
        ...

    def losses(self) -> dict[int, bytes]:
        """Return number of a lost peer → the frame that proves to it that it is."""
        ...

    def standing(self, peer: int) -> str:
        """Return a peer's standing in this run: "member", "left", "lost", "joining" or "not joined"."""
        ...
