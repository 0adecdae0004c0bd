"""One life of a peer in the simulator: what `peer.daemon.rounds` does with a `DurablePeer`, on a virtual clock.

Nothing of the peer is simulated but its surroundings. An operation of the disk takes virtual time, in which the process
does nothing else; a call into the peer may be the last thing that the process does (`ProcessEnds`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol

from peer.compress.payload import FloatArray
from peer.errors import RemoteProtocolError, StateError
from peer.gossip.effects import Effects
from peer.gossip.membership import ChangeKind
from peer.node.disk_state import DiskState
from peer.node.durable import DurablePeer
from peer.node.membership_planning import plan_change
from peer.node.participant import Participant
from peer.node.statements import Statements
from tests.state.failing_disk import FailingDisk, ProcessEnds
from tests.stress.faults.invariants import Auditor
from tests.stress.faults.plan import Plan
from tests.stress.faults.scenario import Scenario
from tests.stress.faults.streams import Streams

STEP_S = 0.05
"""Virtual seconds of a local step, on a peer that is not slow."""
_SYNC_EVERY_S = 0.4
"""About how often what is journaled is made to survive a power cut, between checkpoints."""
_LONGEST_WAIT_S = 1.0
_CLOCK_TICK_S = 1e-6


class Surroundings(Protocol):
    """What a process finds around itself: the world that it lives in."""

    now: float
    """Virtual seconds since the run began."""
    random: Random
    quiet: bool
    """Whether nothing goes wrong any more."""
    scenario: Scenario
    plan: Plan
    auditor: Auditor
    streams: Streams
    gone: set[int]
    """Peers that do not come back."""

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let something happen at a time."""

    def note(self, event: str) -> None:
        """Keep an event for the trace."""

    def died(self, process: VirtualProcess, how: str) -> None:
        """A process has ended."""

    def refused(self, process: VirtualProcess, peer: int, seq: int, error: RemoteProtocolError) -> None:
        """A process refused a frame of a peer."""

    def is_newcomer(self, peer: int) -> bool:
        """Return whether a peer is about to join, or waits to hear that it is."""

    def found_refused(self, process: VirtualProcess, notice: str) -> None:
        """A process finds in its own files what it refuses."""


class VirtualProcess:
    """A process of peer `me`. Implements `streams.Process`."""

    def __init__(self, world: Surroundings, me: int, disk: FailingDisk) -> None:
        self.me = me
        self.alive = True
        self.slow = 1.0
        self.clock_jumped_s = 0.0
        """How far the clock of this process was put forward (or back)."""
        self.world, self._disk = world, disk
        self.random: Random = world.random
        self._started_at = world.now
        self._time_before = 0.0
        self._pending: deque[tuple[int, int, bytes]] = deque()
        self._busy = True
        """Whether it computes or waits for its disk: then what comes waits."""
        self._work_planned = False
        self._wake_at: float | None = None
        """When the peer wants its timer called."""
        scenario, auditor = world.scenario, world.auditor
        self.participant: Participant = scenario.participant(
            me,
            on_step=lambda *step: auditor.stepped(self.participant, *step),
            observe=lambda *what: auditor.observed(self.participant, *what),
            statements=self.statements(),
        )
        really_shortened = self.participant.algorithm.shortened

        def shortened(t: int, gradient: FloatArray, rate: float) -> FloatArray:
            found = really_shortened(t, gradient, rate)
            auditor.stepped(self.participant, t, self.participant.local_steps.rate(t), found)
            return found

        vars(self.participant.algorithm)["shortened"] = shortened
        self.peer = DurablePeer(
            self.participant,
            DiskState(disk, {"run": f"seed {scenario.seed}", "peer": str(me)}, durability=world.plan.durability),
            neighbors=scenario.neighbors(me),
        )

    def statements(self) -> Statements | None:
        """Return what signs what it says, where members declare losses themselves."""
        return None

    def now(self) -> float:
        """Return this process's clock."""
        return self._time_before + self.world.now - self._started_at + self.clock_jumped_s

    def start(self) -> None:
        """Recover and go to work."""
        world = self.world
        world.auditor.began(self.me)

        def recover() -> Effects:
            recovery = self.peer.open(lambda effects: world.auditor.round_done(self.participant))
            self._time_before = recovery.now
            for notice in recovery.notices:
                world.note(f"{self.me} finds: {notice}")
                if "refused" in notice:
                    world.found_refused(self, notice)
            world.note(
                f"{self.me} starts at round {self.participant.round}: {recovery.checkpoint_round} loaded, "
                f"{recovery.replayed_rounds} replayed"
            )
            # Its frames are on disk and need no sending: a neighbour that connects gets what it lacks.
            return Effects(wake_at=recovery.effects.wake_at)

        self.do(recover, self.connect)

    @property
    def duplicates(self) -> int:
        """Frames that came again to this process."""
        return sum(link.duplicates for link in self.peer.links.incoming.values())

    @property
    def is_settled(self) -> bool:
        """Whether there is no round left to do, and every neighbour has all it needs of this peer for good."""
        participant, gone = self.participant, self.world.gone
        return (
            self.alive
            and not participant.session.in_round
            and (participant.round >= self.world.scenario.rounds or not participant.membership.is_member)
            and not any(link.backlog for peer, link in self.peer.links.out.items() if peer not in gone)
            and not self._pending
            and not self._busy
        )

    @property
    def is_free(self) -> bool:
        """Whether it neither computes nor waits for its disk."""
        return self.alive and not self._busy

    def announce(self, kind: ChangeKind, subject: int) -> None:
        """Announce a change of the members while the process is free. Raises ConfigError where it cannot be."""
        scenario = self.world.scenario
        newcomer = scenario.newcomer(subject) if subject >= scenario.num_peers else None
        change = plan_change(self.participant.membership, kind, subject, newcomer)
        self.world.note(f"{self.me} announces {change}")
        self.do(lambda: self.peer.announce(change, self.now()), self.plan_timer)

    def wind_up(self) -> None:
        """Save what the run leaves, with what came after the last round."""
        self.peer.save(self._description(), anew=True)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open the streams to the neighbours, and begin to work."""
        self.world.streams.begin(self.me, self)
        self._plan_sync()
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next round, or settle down."""
        session = self.participant.session
        if session.in_round:
            # Only after a restart: the journal ends within a round.
            self.plan_timer()
            self._plan_work()
        elif self.participant.round < self.world.scenario.rounds and self.participant.membership.is_member:
            if self.world.scenario.has_budgets:
                self.later(STEP_S * self.random.uniform(0.0, 2.0), self._begin_round)
                self._plan_work()
            else:
                self._begin_round()
        else:
            self.do(lambda: self._confirming(self.peer.save(self._description(), anew=True)), self._plan_work)

    def _begin_round(self) -> None:
        """Begin the next round as soon as nothing else is done."""
        if self._busy and self.world.scenario.has_budgets:
            self.later(STEP_S * 0.1, self._begin_round)
        else:
            self._busy = True
            step_s = STEP_S * self.slow * self.random.uniform(0.8, 1.2)
            self.later(step_s, lambda: self.do(self._step_and_begin, self.plan_timer))

    def _after_round(self) -> None:
        if self.participant.round % self.world.plan.checkpoint_every_rounds:
            self._go_on()
        else:
            self.do(lambda: self._confirming(self.peer.save(self._description())), self._go_on)

    def _step_and_begin(self) -> Effects:
        self.peer.step()
        return self.peer.begin(self.now())

    def _description(self) -> dict[str, object]:
        return {"seconds": self.now()}

    def _confirming(self, receipts: dict[int, int]) -> Effects:
        return Effects(receipts=receipts, wake_at=self._wake_at)

    def do(self, call: Callable[[], Effects], then: Callable[[], None]) -> None:
        """Let the peer do something; what came of it is sent when the disk is done, `then` comes after that."""
        world, disk = self.world, self._disk
        self._busy = True
        disk.spent_s, refused = 0.0, disk.refused
        try:
            effects = call()
        except ProcessEnds:
            world.died(self, "killed while it wrote")
            return
        except StateError as error:
            if disk.refused == refused:
                raise
            # As the daemon does: it ends with the error, and is started again when there is room.
            world.died(self, f"ended: {error}")
            return
        self._wake_at = effects.wake_at
        if effects.finished is not None:
            world.auditor.round_done(self.participant)
            world.note(f"{self.me} has done round {effects.finished}")

        def done() -> None:
            self._busy = False
            self._send(effects)
            if effects.finished is not None:
                self._after_round()
            then()
            self._plan_work()

        if disk.spent_s:
            self.later(disk.spent_s, done)
        else:
            done()

    def _send(self, effects: Effects) -> None:
        for error in effects.refused:
            assert error.peer is not None
            # The first of those that had come too early.
            self._refuse(error.peer, self.peer.links.incoming[error.peer].last_seq + 1, error)
        world = self.world
        for outgoing in self.peer.publish(effects):
            receiver, seq, frame = outgoing.receiver, outgoing.seq, outgoing.frame
            # A link to a lost peer is closed, though the peer may live on.
            if world.streams.is_up(self.me, receiver) and receiver not in self.participant.session.lost:
                if seq:
                    world.auditor.put_on_stream(self.me, receiver, seq, frame)
                self.put(receiver, seq, frame)
        for neighbor, upto in effects.receipts.items():
            world.streams.acknowledge(self.me, neighbor, upto)

    def put(self, receiver: int, seq: int, frame: bytes) -> None:
        """Send a frame; `seq` 0 has no number."""
        self.world.streams.send(self.me, receiver, seq, frame)

    def _plan_work(self) -> None:
        if self._pending and not self._busy and not self._work_planned:
            self._work_planned = True
            self.later(0.0, self._work)

    def _work(self) -> None:
        """Take the next frame that waits."""
        self._work_planned = False
        if self._busy or not self._pending:
            return
        peer, seq, frame = self._pending.popleft()
        if seq:
            self.world.streams.taken(self.me, peer, seq)
        self.do(lambda: self._receive(peer, seq, frame), self.plan_timer)

    def _receive(self, peer: int, seq: int, frame: bytes) -> Effects:
        try:
            return self.peer.receive(peer, seq, frame, self.now())
        except RemoteProtocolError as error:
            self._refuse(peer, seq, error)
            return Effects(wake_at=self._wake_at)

    def _refuse(self, peer: int, seq: int, error: RemoteProtocolError) -> None:
        self.world.refused(self, peer, seq, error)
        # What follows it on this link makes no sense without it; the reconnect asks for it again.
        self._pending = deque(item for item in self._pending if item[0] != peer)
        self.world.streams.reset(self.me, peer)

    def plan_timer(self) -> None:
        wake_at = self._wake_at
        if wake_at is not None:
            self.later(min(_LONGEST_WAIT_S, max(_CLOCK_TICK_S, wake_at - self.now())), self._timer)

    def _timer(self) -> None:
        wake_at = self._wake_at
        if wake_at is None or self._busy:
            return  # What it is busy with plans it anew.
        if self.now() >= wake_at:
            self.do(lambda: self.peer.timer(self.now()), lambda: None)
        else:
            self.plan_timer()

    def _plan_sync(self) -> None:
        self.later(_SYNC_EVERY_S * self.random.uniform(0.5, 1.5), self._sync)

    def _sync(self) -> None:
        if not self._busy:
            self.do(lambda: self._confirming(self.peer.sync()), lambda: None)
        self._plan_sync()

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Do something later, if the process still lives then."""
        self.world.at(self.world.now + after_s, lambda: action() if self.alive else None)

    # -- what the streams call -----------------------------------------------------------------------------------------

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        if peer in self.participant.session.lost:
            raise RemoteProtocolError("was declared lost and is out of the run", peer=peer)
        self.peer.links.meet(peer)
        frames = self.peer.connected(peer, remote_has)
        self.world.note(f"{self.me} meets {peer}, which has {remote_has} for good; sends {len(frames)} again")
        for seq, frame in frames:
            if seq:
                self.world.auditor.put_on_stream(self.me, peer, seq, frame)
        return frames

    def link_down(self, peer: int) -> None:
        self.world.note(f"{self.me} loses {peer}")

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        self._pending.append((peer, seq, frame))
        self._plan_work()
        return False if seq else None

    def receipt(self, peer: int, upto: int) -> None:
        self.peer.links.acknowledge(peer, upto)

    def last_received(self, peer: int) -> int:
        self.peer.links.meet(peer)
        return self.peer.links.durable_from(peer)
