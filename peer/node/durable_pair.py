"""A peer of a run without rounds that survives the end of its process: participant, journal and checkpoints.

No clock and no socket: the time is an argument, outgoing frames are returned, and files are behind a `Disk`.

Every call that changes the participant is in the journal, with all that it depended on (a neighbour's frame, the time,
the neighbours that it could ask for an exchange), before its consequences leave: a peer that answers and then forgets
has changed the sum of all models. After a crash the newest checkpoint and the calls after it thus restore the peer, in
the middle of a step or of an exchange too. Repeated computations give the same bits where arithmetic is repeatable, and
are checked by digests; elsewhere they differ by rounding, and Σx with them.

After a power cut the calls since the last sync are lost, of about a second, unless `durability = "power"`: the peer has
forgotten steps and halves of exchanges that its partners remember. Each of these moves Σx by ½ (x̂_other − x̂_own). It
cannot tell a power cut from the end of its process, so that after either it leaves out the numbers of exchanges that it
may have forgotten.

Calls are counted over the whole run. A checkpoint has the number of calls that it holds, the header of a journal the
number before its first: if both are of the same round, calls that the checkpoint holds are not made again.

Order of use: `open`; then `read`, `compute` and `step` in turn, the others at any time; `save` between iterations. All
but `compute` and `sync` are for one thread, `compute` may overlap with the others but `step`, `sync` with all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from peer.errors import RemoteProtocolError, StateError
from peer.gossip.effects import Effects
from peer.node.disk_state import DiskState, OnRound, PeerRecovery, model_digest
from peer.node.local_steps import RecordedSteps
from peer.node.pair_participant import PairParticipant
from peer.node.replay import recall_step
from peer.protocol import OLDEST
from peer.state.journal import Call, Called, Record, Stepped
from peer.state.recovery import gives_other_bits

REFUSALS_MAX = 3
"""Frames of a partner that are refused before an exchange with it is given up."""

_CHANGES_MODEL = frozenset({Call.STEP, Call.RECEIVE})


class DurablePair:
    """One peer. See the module docstring for the order of calls."""

    def __init__(self, participant: PairParticipant, disk_state: DiskState, *, repeatable: bool = True) -> None:
        """`repeatable`: whether a gradient that is computed again has the same bits."""
        self.participant, self.disk_state = participant, disk_state
        self._repeatable = repeatable
        self._calls = 0
        """Calls so far, over the whole run."""
        self._refused_frames = (-1, 0)
        """(own exchange, frames of its partner that were refused while it was open)."""

    # -- recovery ------------------------------------------------------------------------------------------------------

    def open(
        self,
        on_round: OnRound = lambda effects: None,
        on_load: Callable[[Mapping[str, Any]], None] = lambda state: None,
    ) -> PeerRecovery:
        """Go back to where this peer was: load the newest whole checkpoint and repeat the calls after it.

        `on_load` is called with the values of the checkpoint (empty without one), before any step is repeated. Raises
        StateError if the state belongs to another peer or run, is damaged beyond what its copies can mend, or gives
        other bits than before.
        """
        recovery, self.participant.reaches.is_replaying = PeerRecovery(), True
        checkpoint = self.disk_state.load_newest(recovery)
        if checkpoint is not None:
            self.participant.restore(checkpoint.state, checkpoint.arrays)
            # The first release counted nothing and kept no journal.
            self._calls = int(checkpoint.state.get("calls", 0))
        on_load(recovery.state)
        is_new = checkpoint is None
        for _, name, content in self.disk_state.journals(recovery, {"calls": self._calls}):
            before = int(content.header["calls"])
            if before > self._calls:
                raise StateError(
                    f"{name}: begins after {before} calls, but what is left before it leads to call {self._calls} "
                    "only; restore the state folder from a copy, or start the run anew"
                )
            # A checkpoint that was written once more, of the same round, holds some of these calls.
            calls = list(_calls_of(name, content.records))[self._calls - before :]
            for stepped, call in calls:
                if stepped is not None:
                    recall_step(name, self.participant.local_steps, stepped)
                self._replay(name, call, recovery, on_round)
            is_new = is_new and not calls
        self.disk_state.files.prune()
        self.participant.reaches.is_replaying = False
        if not is_new:
            self._called(Call.SKIP)
        # Neighbours are told of it, so it must not be forgotten: a crash may have left it to the kernel.
        self.disk_state.journaled_round = self.round
        self.sync()
        recovery.effects = self.participant.unchanged()
        return recovery

    def _replay(self, name: str, record: Called, recovery: PeerRecovery, on_round: OnRound) -> None:
        """Make a call again."""
        recovery.now = max(recovery.now, record.now)
        self.participant.reachable = frozenset(record.reachable)
        self._calls += 1
        try:
            if record.call is Call.STEP:
                self.participant.compute()
            effects = self._call(record.call, record.now, record.peer, record.frame)
        except RemoteProtocolError as error:
            # Earlier releases judged less.
            recovery.notices.append(f"{name}: left out a frame that is refused: {error}")
            return
        if effects.finished is not None:
            recovery.replayed_rounds += 1
            on_round(effects)
        if self._repeatable and record.digest != self._digest_after(record.call):
            raise gives_other_bits(name, f"another model in step {self.participant.round}")

    def _call(self, call: Call, now: float, peer: int, frame: bytes, *, waited_s: float = 0.0) -> Effects:
        """Make a call on the participant, now or in a replay."""
        participant = self.participant
        match call:
            case Call.READ:
                return participant.read(waited_s)
            case Call.STEP:
                return participant.step(now)
            case Call.RECEIVE:
                return participant.receive(peer, frame, now)
            case Call.TIMER:
                return participant.timer(now)
            case Call.DISCONNECTED:
                return participant.disconnected(peer)
            case Call.ABANDON:
                return participant.abandon(peer)
            case Call.SKIP:
                return participant.skip_exchanges()

    # -- calls ---------------------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Steps taken."""
        return self.participant.round

    def read(self, waited_s: float) -> Effects:
        """Begin an iteration. This and the following raise StateError if the disk refuses."""
        return self._called(Call.READ, waited_s=waited_s)

    def step(self, now: float) -> Effects:
        """Apply the gradient and end the iteration."""
        steps = self.participant.local_steps
        stepped = (steps.recorded(self.round),) if isinstance(steps, RecordedSteps) else ()
        self.disk_state.pin(max((each.needs for each in stepped), default=OLDEST))
        return self._called(Call.STEP, now, stepped=stepped)

    def receive(self, peer: int, frame: bytes, now: float) -> Effects:
        """Take a frame of a neighbour. Raises RemoteProtocolError, which names the sender: drop the frame."""
        try:
            return self._called(Call.RECEIVE, now, peer=peer, frame=frame)
        except RemoteProtocolError as error:
            return self._refused(peer, error)

    def _refused(self, peer: int, error: RemoteProtocolError) -> Effects:
        """Raise the error, or give up the open exchange with a neighbour that sends nothing else: this peer could have
        no other one for as long as it waits."""
        request = self.participant.algorithm.open_request
        if request is None or request[0] != peer:
            raise error
        exchange = request[1].round
        number = self._refused_frames[1] + 1 if self._refused_frames[0] == exchange else 1
        self._refused_frames = (exchange, number)
        if number < REFUSALS_MAX:
            raise error
        effects = self.abandon(peer)
        effects.refused.append(error)
        return effects

    def timer(self, now: float) -> Effects:
        """Ask again, if the last `wake_at` has passed."""
        return self._called(Call.TIMER, now)

    def disconnected(self, peer: int) -> Effects:
        """Note that the connection to a neighbour broke."""
        return self._called(Call.DISCONNECTED, peer=peer)

    def abandon(self, peer: int) -> Effects:
        """Give up the open exchanges with a neighbour that stays away."""
        return self._called(Call.ABANDON, peer=peer)

    def _called(
        self,
        call: Call,
        now: float = 0.0,
        *,
        peer: int = 0,
        frame: bytes = b"",
        waited_s: float = 0.0,
        stepped: Sequence[Stepped] = (),
    ) -> Effects:
        """Make a call and journal it, after its local step if that cannot be computed again; its frames may be sent
        then. A refused frame is not journaled: unlike in a run with rounds, nobody counts frames."""
        effects = self._call(call, now, peer, frame, waited_s=waited_s)
        self._calls += 1
        reachable = tuple(sorted(self.participant.reachable))
        # In one write: a local step without its call would be done twice.
        self.disk_state.append(*stepped, Called(call, now, peer, self._digest_after(call), reachable, frame))
        self.disk_state.journaled_round = self.round
        if effects.frames and self.disk_state.syncs_before_sending:
            self.sync()
        return effects

    def _digest_after(self, call: Call) -> int:
        """Return a digest of x; 0 after a call that cannot have changed it."""
        return model_digest(self.participant.algorithm.x) if call in _CHANGES_MODEL else 0

    # -- durability ----------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make everything journaled so far survive a power cut. Raises StateError."""
        self.disk_state.sync()

    def save(self, description: Mapping[str, Any]) -> None:
        """Take a checkpoint, between iterations, and begin a new journal. Raises StateError.

        One of the same round as the last is written once more, with the answers since, and its journal goes on.
        """
        values, arrays = self.participant.to_checkpoint()
        calls = {"calls": self._calls}
        self.disk_state.save(
            self.round,
            {**values, **description, **calls},
            arrays,
            journal_goes_on=self.round == self.disk_state.base_round,
            facts=calls,
        )


def _calls_of(name: str, records: Sequence[Record]) -> Iterator[tuple[Stepped | None, Called]]:
    """Yield each call of a journal, with the recorded local step that it applied. Raises StateError."""
    stepped = None
    for record in records:
        if isinstance(record, Stepped):
            stepped = record
        elif isinstance(record, Called):
            # One whose call a crash cut off is done again, and is journaled again.
            yield (stepped if record.call is Call.STEP else None), record
            stepped = None
        else:
            raise StateError(f"{name}: is the journal of a run with rounds; use another state.directory")
