"""The disk state of a durable peer: its newest checkpoint, and the journal since.

Runs with and without rounds share this file. They alone know the meaning of journal records and the content of
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from peer.compress.payload import FloatArray
from peer.gossip.effects import Effects
from peer.state.checkpoints import Checkpoint
from peer.state.disk import Disk
from peer.state.journal import Journal, JournalContent, Record
from peer.state.recovery import StateFiles, journal_name

Durability: TypeAlias = Literal["process", "power"]
"""Event that a peer's frames must be able to survive before they leave: the end of its process, or a power cut."""

OnRound: TypeAlias = Callable[[Effects], None]
"""Called right after the end of each replayed round, with its record and the frames made in it."""


@dataclass(kw_only=True)
class PeerRecovery:
    """Result of `open`."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """The values of the checkpoint, those that `save` was given included; empty without one."""
    checkpoint_round: int = 0
    """Rounds, or steps, that were loaded rather than replayed."""
    replayed_rounds: int = 0
    now: float = 0.0
    """The latest time in the journal."""
    notices: list[str] = field(default_factory=list)
    """Sentences for the log about damage and its remedy."""
    effects: Effects = field(default_factory=Effects)
    """Present state of the peer: when to wake up, its open request, and the frames of the round under way. These are in
    the journal and need not be sent: `connected` returns the frames that a neighbour needs."""


class DiskState:
    """The state folder of one peer that runs. Its methods raise StateError if the disk refuses."""

    def __init__(
        self,
        disk: Disk,
        identity: Mapping[str, str],
        *,
        durability: Durability = "process",
        keep_checkpoints: int = 2,
        regular: int = 0,
    ) -> None:
        """`identity`: values that a state must have to belong to this peer (run, name, model, …). `regular`: see
        `Checkpoints`."""
        self._disk = disk
        self.files = StateFiles(disk, identity, keep=keep_checkpoints, regular=regular)
        self.syncs_before_sending = durability == "power"
        self.base_round = 0
        """The round of the checkpoint that the journal follows."""
        self.checkpoint_bytes = 0
        """Size of that checkpoint; 0 if there is none yet."""
        self.journaled_round = 0
        """Rounds, or steps, completed that are wholly in the journal."""
        self.durable_round = 0
        """Those that would survive a power cut."""
        self._journal: Journal

    @property
    def journal_bytes(self) -> int:
        """Size of the journal since the last checkpoint."""
        return self._journal.size

    @property
    def protocol(self) -> int:
        """The lowest version of the protocol that serves the run, by what this state holds."""
        return self.files.protocol

    def pin(self, protocol: int) -> None:
        """Make releases that do not speak a version of the protocol refuse this state from now on, also after a power
        cut. To be called before anything is written that they would misunderstand."""
        if protocol > self.files.protocol:
            self.files.protocol = protocol
            self._journal.change_header(self._disk, self.files.identity)

    # Going back to where the peer was.

    def load_newest(self, recovery: PeerRecovery) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; None to begin at the start."""
        checkpoint = self.files.load_newest(recovery.notices)
        if checkpoint is not None:
            recovery.state, recovery.checkpoint_round = checkpoint.state, checkpoint.round
            recovery.now = float(checkpoint.state.get("seconds", 0.0))
            self.base_round = checkpoint.round
        return checkpoint

    def journals(
        self, recovery: PeerRecovery, facts: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[int, str, JournalContent]]:
        """Yield (round, file name, content) of each journal since the checkpoint, to be repeated one after the other.
        There is more than one where a newer checkpoint was damaged. The last one is then gone on with; `facts` are for
        its header if it is new."""
        for round_ in self.files.chain(self.base_round, facts):
            content = self.files.read_journal(round_, recovery.notices)
            yield round_, journal_name(round_), content
            self.base_round = round_
        self._journal = Journal.go_on(self._disk, journal_name(self.base_round), content)
        self.checkpoint_bytes = self.files.checkpoint_bytes(self.base_round)

    def go_back(self, round_: int) -> int:
        """Set aside everything newer than the last checkpoint at or before `round_`; return its round (0: the start).
        The peer is of no use after that: open another one."""
        self._journal.close()
        return self.files.go_back(round_)

    # Going on.

    def append(self, *records: Record) -> None:
        """Write records to the journal: they survive the end of the process."""
        self._journal.append(*records)

    def sync(self) -> None:
        """Make everything journaled so far survive a power cut. May be called from any thread."""
        round_ = self.journaled_round
        self._journal.sync()
        self.durable_round = max(self.durable_round, round_)

    def save(
        self,
        round_: int,
        values: Mapping[str, Any],
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        journal_goes_on: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint and begin the journal that follows it, with `facts` in its header. `journal_goes_on`: keep
        the one that there is."""
        # Should the new checkpoint be damaged one day, the one before and this journal lead to the same state.
        self._journal.sync()
        # Identity last: it decides whose state this is, whatever the caller's description says.
        self.files.checkpoints.save(Checkpoint(round_, {**values, **self.files.identity}, dict(arrays)))
        self.checkpoint_bytes = self.files.checkpoint_bytes(round_)
        if not journal_goes_on:
            # Only now, with the checkpoint whole on disk: a crash before this leaves the old journal in use.
            self._journal.close()
            self._journal = self.files.new_journal(round_, facts)
            self.base_round = round_
        self.durable_round = round_
        self.files.prune()

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def model_digest(x: FloatArray, *scalars: float) -> int:
    """Return XXH3-64 of a model and of float64 numbers that belong to it, as replays are checked by."""
    digest = xxhash.xxh3_64(np.ascontiguousarray(x).view(np.uint8).data)
    for scalar in scalars:
        digest.update(np.float64(scalar).tobytes())
    return digest.intdigest()
