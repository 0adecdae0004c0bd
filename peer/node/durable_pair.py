"""A peer of a run without rounds that survives the end of its process: participant, journal and checkpoints.

No clock and no socket: the time is an argument, what is to be sent is returned, and files are behind a `Disk`.

Every call that changes the participant is in the journal, with all that it depended on (a neighbour's frame, the time,
whom it could have asked for an exchange), before anything that came of it leaves: a peer that answers and then forgets
has changed the sum of all models. So after a crash the newest checkpoint and the calls after it lead back to where the
peer was, in the middle of a step or of an exchange too. What is computed again gives the same bits where arithmetic is
repeatable, and is checked by digests; elsewhere it differs by rounding, and Σx with it.

After a power cut the calls since the last sync are lost, of about a second, unless `durability = "power"`: the peer has
forgotten steps and halves of exchanges that its partners remember. Each of these moves Σx by ½ (x̂_other − x̂_own). It
cannot tell a power cut from the end of its process, so that after either it leaves out the numbers of exchanges that it
may have forgotten.

Calls are counted over the whole run. A checkpoint knows how many it holds, and the header of a journal how many there
were before its first: where both are of the same round, what the checkpoint holds already is not called again.

Order of use: `open`; then `read`, `compute` and `step` in turn, the others at any time; `save` between iterations. All
but `compute` and `sync` are for one thread, `compute` may overlap with the others but `step`, `sync` with all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import xxhash

from peer.errors import StateError
from peer.node.pair_participant import PairParticipant, PairTurn
from peer.state.checkpoints import Checkpoint
from peer.state.disk import Disk
from peer.state.journal import Call, Called, Journal
from peer.state.recovery import Recovery, StateFiles, gives_other_bits, journal_name

T = TypeVar("T")

_CHANGES_MODEL = frozenset({Call.STEP, Call.RECEIVE})


class DurablePair:
    """One peer. See the module docstring for the order of calls."""

    def __init__(
        self,
        participant: PairParticipant,
        disk: Disk,
        *,
        identity: Mapping[str, str],
        durability: Literal["process", "power"] = "process",
        keep_checkpoints: int = 2,
        regular: int = 0,
        repeatable: bool = True,
    ) -> None:
        """`identity` and `regular`: see `StateFiles`. `repeatable`: whether a gradient that is computed again has the
        same bits."""
        self.participant = participant
        self.files = StateFiles(disk, identity, keep=keep_checkpoints, regular=regular)
        self.base_round = 0
        """The round of the checkpoint that the journal follows."""
        self._power = durability == "power"
        self._repeatable = repeatable
        self._calls = 0
        """Calls so far, over the whole run."""
        self._journal: Journal

    # -- recovery ------------------------------------------------------------------------------------------------------

    def open(
        self,
        on_load: Callable[[Mapping[str, Any]], None] = lambda state: None,
        on_step: Callable[[PairTurn], None] = lambda turn: None,
    ) -> Recovery:
        """Go back to where this peer was: load the newest whole checkpoint and repeat the calls after it.

        `on_load` is told of the values of the checkpoint (empty without one), then `on_step` of every step that is
        repeated. Raises StateError if the state belongs to another peer or run, is damaged beyond what its copies can
        mend, or gives other bits than before.
        """
        recovery = Recovery()
        checkpoint = self.files.load_newest(recovery.notices)
        if checkpoint is not None:
            self.participant.restore(checkpoint.state, checkpoint.arrays)
            recovery.start_from(checkpoint)
            self.base_round = checkpoint.round
            # The first release counted nothing and kept no journal.
            self._calls = int(checkpoint.state.get("calls", 0))
        on_load(recovery.state)
        is_new = checkpoint is None
        for round_ in self.files.chain(self.base_round, {"calls": self._calls}):
            content = self.files.read_journal(round_, recovery.notices)
            before = int(content.header["calls"])
            if before > self._calls:
                raise StateError(
                    f"{journal_name(round_)}: begins after {before} calls, but what is left before it leads to call "
                    f"{self._calls} only; restore the state folder from a copy, or start the run anew"
                )
            records = content.records[self._calls - before :]
            for record in records:
                self._repeat(journal_name(round_), record, recovery, on_step)
            is_new = is_new and not records
            self.base_round = round_
        self._journal = self.files.go_on(self.base_round, content)
        self.files.prune()
        if not is_new:
            self._called(Call.SKIP, self.participant.skip_exchanges)
        return recovery

    def _repeat(self, name: str, record: object, recovery: Recovery, on_step: Callable[[PairTurn], None]) -> None:
        """Make a call again."""
        if not isinstance(record, Called):
            raise StateError(f"{name}: is the journal of a run with rounds; use another state.directory")
        participant = self.participant
        participant.reachable = frozenset(record.reachable)
        recovery.now = max(recovery.now, record.now)
        match record.call:
            case Call.READ:
                participant.read()
            case Call.STEP:
                participant.compute()
                turn = participant.step(record.now)
                recovery.replayed_rounds += 1
                on_step(turn)
            case Call.RECEIVE:
                participant.receive(record.peer, record.frame, record.now)
            case Call.TIMER:
                participant.timer(record.now)
            case Call.DISCONNECTED:
                participant.disconnected(record.peer)
            case Call.ABANDON:
                participant.abandon(record.peer)
            case Call.SKIP:
                participant.skip_exchanges()
        self._calls += 1
        if self._repeatable and record.digest != self._digest_after(record.call):
            raise gives_other_bits(name, f"another model in step {participant.round}")

    # -- calls ---------------------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Steps taken."""
        return self.participant.round

    @property
    def journal_bytes(self) -> int:
        """Size of the journal since the last checkpoint."""
        return self._journal.size

    def read(self, waited_s: float) -> PairTurn:
        """Begin an iteration. This and the following raise StateError if the disk refuses."""
        return self._called(Call.READ, lambda: self.participant.read(waited_s))

    def compute(self) -> None:
        """Compute the gradient: the expensive part. Nothing of it is journaled, since it can be computed again."""
        self.participant.compute()

    def step(self, now: float) -> PairTurn:
        """Apply the gradient and end the iteration."""
        return self._called(Call.STEP, lambda: self.participant.step(now), now)

    def receive(self, peer: int, frame: bytes, now: float) -> PairTurn:
        """Take a frame of a neighbour. Raises RemoteProtocolError, which names the sender: drop the frame."""
        return self._called(
            Call.RECEIVE, lambda: self.participant.receive(peer, frame, now), now, peer=peer, frame=frame
        )

    def timer(self, now: float) -> PairTurn:
        """Ask again, if `wake_at` has passed."""
        return self._called(Call.TIMER, lambda: self.participant.timer(now), now)

    def disconnected(self, peer: int) -> PairTurn:
        """Take note that the connection to a neighbour broke."""
        return self._called(Call.DISCONNECTED, lambda: self.participant.disconnected(peer), peer=peer)

    def abandon(self, peer: int) -> PairTurn:
        """Give up what is open with a neighbour that stays away."""
        return self._called(Call.ABANDON, lambda: self.participant.abandon(peer), peer=peer)

    def _called(
        self, call: Call, function: Callable[[], T], now: float = 0.0, *, peer: int = 0, frame: bytes = b""
    ) -> T:
        """Make a call and journal it; what it returns may be sent then."""
        result = function()
        self._calls += 1
        reachable = tuple(sorted(self.participant.reachable))
        self._journal.append(Called(call, now, peer, self._digest_after(call), reachable, frame))
        if self._power and isinstance(result, PairTurn) and result.parcels:
            self.sync()
        return result

    def _digest_after(self, call: Call) -> int:
        """Return XXH3-64 of x; 0 after a call that cannot have changed it."""
        if call not in _CHANGES_MODEL:
            return 0
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(self.participant.algorithm.x).view(np.uint8).data)

    # -- durability ----------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make everything journaled so far survive a power cut. Raises StateError."""
        self._journal.sync()

    def save(self, description: Mapping[str, Any]) -> None:
        """Take a checkpoint, between iterations, and begin a new journal. Raises StateError.

        One of the same round as the last is written once more, with what was answered since, and its journal goes on.
        """
        round_ = self.participant.round
        state, arrays = self.participant.state()
        state |= {**description, **self.files.identity, "calls": self._calls}
        # Should the new checkpoint be damaged one day, the one before and this journal lead to the same state.
        self._journal.sync()
        self.files.checkpoints.save(Checkpoint(round_, state, arrays))
        if round_ != self.base_round:
            self._journal.close()
            self._journal = self.files.new_journal(round_, {"calls": self._calls})
            self.base_round = round_
        self.files.prune()

    def go_back(self, round_: int) -> int:
        """Delete what is newer than the last checkpoint at or before `round_`; return its round (0: the start). The
        peer is of no use after that: open another one."""
        self._journal.close()
        return self.files.go_back(round_)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()
