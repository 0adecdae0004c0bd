"""The parts of one peer that are others in rounds than in pairs.

The daemon decides when to evaluate, to save and to end; a loop knows the steps of its kind of algorithm and the meaning
of its frames. A round of a peer in pairs is one gradient step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peer.daemon.members.change_requests import Members
from peer.daemon.pair_exchanges import PairExchanges
from peer.daemon.pairs import PairLoop
from peer.daemon.parts import Greeting, Judge
from peer.daemon.progress import SignedProgress
from peer.daemon.round_frames import RoundFrames
from peer.daemon.rounds import RoundLoop
from peer.daemon.saving import PairSaver, RoundSaver
from peer.node.disk_state import DiskState


@dataclass(kw_only=True)
class TrainingParts:
    """The parts that depend on how a peer trains: in rounds, or in pairs."""

    loop: RoundLoop | PairLoop
    saver: RoundSaver | PairSaver
    frames: RoundFrames | PairExchanges
    members: Members
    disk_state: DiskState
    linked: Callable[[], Sequence[int]]
    """Returns the peers to be linked to."""
    notes: dict[str, Judge]
    """Topic → who judges notes about it, of those that only this way to train has."""
    progress: SignedProgress | None
    """None where nothing is signed."""
    link_down: Callable[[], None]
    """Called when a link ended."""
    greetings: dict[str, Greeting]
    """Topic → source of the notes for a neighbour that is connected."""
