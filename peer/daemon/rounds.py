"""The loop of a peer of a synchronous run: local step, exchange, mixing; one round after the other.

Three inputs drive it: a local step is done, a message came, a timer is due. Training, compression, decoding and the
journal run in one worker thread, syncs of the disk in another. `peer.node.durable` decides what survives a crash, and
what a neighbour may forget: a peer that was killed replays its journal to the same point, and sends the same bytes
again, so that its neighbours see no more than a pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from peer.daemon.members.change_requests import ChangeRequests
from peer.daemon.members.equality import Equality
from peer.daemon.members.joining import Joining
from peer.daemon.members.loss_watch import LossWatch
from peer.daemon.members.member_links import MemberLinks
from peer.daemon.members.own_loss import OwnLoss
from peer.daemon.notes.evaluations import Models
from peer.daemon.notes.replica_check import ModelCheck, ReplicaCheck
from peer.daemon.operator.audit_log import AuditLog
from peer.daemon.parts import CommonParts
from peer.daemon.progress import SignedProgress
from peer.daemon.round_frames import RoundFrames
from peer.daemon.runtime import pace
from peer.daemon.saving import RoundSaver
from peer.errors import PeerUnreachable
from peer.gossip.effects import Effects
from peer.gossip.membership import ChangeKind
from peer.node.durable import DurablePeer
from peer.node.local_steps import RecordedSteps, StepAbandoned
from peer.protocol import FULL_WIDTH
from peer.records import RoundRecord

log = logging.getLogger("sotto")

_LARGE_MODEL = 1 << 20
"""Numbers of a model from which on the time of its coding counts."""
_FASTER_THAN_CODER = 100_000_000
"""Bytes a second. To code and decode a float32 model takes 3 ns a byte on a processor with AVX-512, and saves 17 % of
the bytes, which a link of 56 MB/s carries in that time. About twice that, since bytes may have a price."""
_MAX_BACKLOG_BYTES = 256 << 20
"""No further round begins while a neighbour has this much unacknowledged from this peer."""
_NOTABLE_WAIT_S = 0.05
"""A bandwidth budget makes every peer wait a moment now and then; only longer waits are worth a line in the log."""
_SAY_AGAIN_S = 600.0
"""Interval between repeated log lines about obstacles that only a person can remove."""
_STOP_GRACE_S = 5.0
"""Longest wait, after a request to stop, for the neighbours of the round under way."""
SAY_AWAY_S = 30.0
"""Absence of a peer after which the log advises the operator."""


@dataclass
class RoundLoop:
    """Takes one peer from round to round."""

    common: CommonParts
    _: KW_ONLY
    durable: DurablePeer
    frames: RoundFrames
    member_links: MemberLinks
    requests: ChangeRequests
    joining: Joining
    replica_check: ReplicaCheck | ModelCheck
    equality: Equality | None
    saver: RoundSaver
    audit_log: AuditLog | None
    loss_watch: LossWatch | None
    own_loss: OwnLoss | None
    progress: SignedProgress | None

    def __post_init__(self) -> None:
        """Take the parts out of `common`."""
        self.participant = self.durable.participant
        self._local, self._runtime, self._neighbors = self.common.local, self.common.runtime, self.common.neighbors
        self._config, self._roster = self._local.config, self._local.roster
        self._said_that_it_slows_down = False
        self._asks_to_leave_at = float("-inf")
        """When it asks next, where a limit of the device wants it to leave."""
        self._said_that_it_is_behind_at = float("-inf")
        self._began_at = self._runtime.now()
        """When the exchange of the round under way began in this process."""
        self._late_round = -1
        """The last round of which it was told who is late."""
        self._said_away: set[int] = set()

    # -- training ------------------------------------------------------------------------------------------------------

    def helpers(self) -> Sequence[Coroutine[None, None, None]]:
        """Return the coroutines that ask members whether they are there; a round does all its other work in turn."""
        asks_suspects = () if self.loss_watch is None else (self.loss_watch.ask_suspects(),)
        asks_about_itself = () if self.own_loss is None else (self.own_loss.watch(),)
        return *asks_suspects, *asks_about_itself

    async def next_round(self) -> RoundRecord | None:
        """Return the record of the next round when it is complete; None if there is none."""
        try:
            return await self._next_round()
        except StepAbandoned:
            # Of a step by a mean gradient, the journal has all that it takes to do it again.
            return None

    async def _next_round(self) -> RoundRecord | None:
        record: RoundRecord | None = None
        while record is None:
            # After a crash it may be in the middle of a round.
            self.saver.is_at_rest = not self.participant.session.in_round
            if self.round >= self._config.run.rounds or self._stops or self.has_left:
                return None
            if self._is_set_back:
                # Anything it did now would be done for the second time.
                await self._wait(None)
                continue
            if not self.participant.membership.is_member:
                record = await self._try_to_join()
                continue
            if self.saver.is_at_rest:
                await self._wait_for_room()
                await self._keep_to_budget()
                await self._keep_to_limits()
                await self._keep_to_equality()
                self._choose_coding()
                if self._stops:
                    return None
                self.saver.is_at_rest = False
                effects = await self._runtime.work(self._step_and_begin)
                self._began_at = self._runtime.now()
                record = self.frames.perform(effects)
            while record is None:
                if not self.frames:
                    await self._wait(self.frames.wake_at)
                if self._runtime.stops_at_once or self._stops_in_vain():
                    # The round cannot end now: it goes on, from the journal, when this peer is started again.
                    return None
                record = await self._take_frames()
        self.saver.is_at_rest = False
        # Steps in the journal need not be trained again.
        steps = self.participant.local_steps
        is_recorded = isinstance(steps, RecordedSteps) and steps.records_all
        self.common.cadence.add_round(record.gossip_s + (0.0 if is_recorded else record.train_s))
        if self.audit_log is not None:
            await self._runtime.work(self.audit_log.close_round, record.round, self.participant.algorithm)
        await self.replica_check.after_round(record.round)
        if self.equality is not None:
            await self.equality.after_round()
        return record

    @property
    def _stops(self) -> bool:
        """Whether this peer stops, and goes no further for a state that can be saved."""
        steps, runtime = self.participant.local_steps, self._runtime
        if not isinstance(steps, RecordedSteps) or steps.can_be_saved or runtime.stops_at_once or self._is_set_back:
            return runtime.stops
        # A script that waits for the next round has that state once it has come to its beginning.
        steps.is_stopping = runtime.stops and not self.participant.session.in_round
        return runtime.stops and not steps.is_stopping

    def _step_and_begin(self) -> Effects:
        started = time.perf_counter()
        self.durable.step()
        pace(self._config.peer, started, self._config.limits.processor_share)
        before = self.durable.left_out
        effects = self.durable.begin(self._runtime.now())
        for peer in sorted(self.durable.left_out - before):
            log.warning(
                "%s has confirmed nothing for %g s: it gets no weight until it does",
                self._roster.name(peer),
                self._config.rounds.leave_out_after_s,
            )
        for peer in sorted(before - self.durable.left_out):
            log.info("%s confirms again what it gets, and has its weight back", self._roster.name(peer))
        return effects

    async def _try_to_join(self) -> RoundRecord | None:
        self.joining.ask()
        self._tell_that_it_is_behind(self.member_links.linked(), self._runtime.now())
        if not self.frames:
            await self._wait(None)
        return await self._take_frames()

    async def _take_frames(self) -> RoundRecord | None:
        """Announce the requested changes of members, and take the waiting frames; return the record of a round that
        this completed."""
        return await self.requests.grant() or await self.frames.take()

    async def _wait_for_room(self) -> None:
        """Hold the next round back while a neighbour has too much unacknowledged: it may be out of reach for long."""
        while not self._runtime.stops and any(
            self.frames.backlog_bytes(peer) > _MAX_BACKLOG_BYTES for peer in self._neighbors.receivers
        ):
            await self._wait(None)

    def _choose_coding(self) -> None:
        """Have the coming round written in full width if every link takes that sooner than the coder, and may."""
        options, transport = self._config.compressor, self._neighbors.transport
        self.durable.in_full_width = (
            options.coding == "auto"
            and options.budget_kbytes_per_s is None
            and self.participant.algorithm.node.compressor.kind == "none"
            and self.participant.layout.size >= _LARGE_MODEL
            and self.common.releases.all_speak(FULL_WIDTH)
            and all(
                link is not None and link.delivered_bytes_per_s > _FASTER_THAN_CODER
                for link in map(transport.connection, self._neighbors.receivers)
            )
        )

    async def _keep_to_budget(self) -> None:
        """Let the bandwidth budget choose the messages of the coming round, and wait until the links may carry it."""
        budget = self.participant.budget
        if budget is None:
            return
        for peer in self._neighbors.receivers:
            counters = self._neighbors.transport.counters(peer)
            budget.measured(peer, counters.packet_bytes_sent or counters.protobuf_bytes_sent)
        now = self._runtime.now()
        may_begin_at = self.participant.ready(now)
        if may_begin_at > now + _NOTABLE_WAIT_S and budget.is_least and not self._said_that_it_slows_down:
            self._said_that_it_slows_down = True
            log.warning(
                "even the smallest messages exceed compressor.budget_kbytes_per_s = %g: waiting %.1f s before round %d,"
                " and as long as it takes before others",
                self._config.compressor.budget_kbytes_per_s,
                may_begin_at - now,
                self.round,
            )
        while self._runtime.now() < may_begin_at and not self._runtime.stops:
            await self._wait(may_begin_at)
            if self.frames:
                # A peer that asks for a repair of the last round is not kept waiting; no round can begin or end here.
                await self._take_frames()

    async def _keep_to_limits(self) -> None:
        """Wait as long as the limits of this device ask for, or announce that it leaves."""
        limits = self.common.limits
        if limits is None:
            return
        while not self._runtime.stops:
            is_leaving, now = self._is_leaving, self._runtime.now()
            may_begin = await limits.may_begin(now, is_leaving=is_leaving)
            if limits.asks_to_leave and not is_leaving and now >= self._asks_to_leave_at:
                # A refused request may be granted later: a newcomer that this peer sponsors is a member then.
                self._asks_to_leave_at = now + self._config.limits.slow_step_s
                self.requests.leave()
            if may_begin:
                return
            await self._wait(None)
            # As while it keeps to the budget: repairs are answered, and no round begins or ends.
            await self.answer()

    async def _keep_to_equality(self) -> None:
        """Wait while members may have been told different things."""
        while self.equality is not None and not self.equality.keep_to() and not self._runtime.stops:
            await self._wait(None)
            # A loss frees the run.
            await self.answer()

    @property
    def _is_leaving(self) -> bool:
        """Whether this peer has announced that it leaves."""
        membership, me = self.participant.membership, self.participant.peer
        return any(change.kind is ChangeKind.LEAVE and change.subject == me for change in membership.coming_changes)

    async def _wait(self, until: float | None) -> None:
        """Wait until something happens or `until`. Raises PeerUnreachable or HandshakeRefused once that is in vain."""
        # A peer that was set back has no links, and no say in who is lost.
        if not self._is_set_back:
            self._give_up_on_the_lost()
            self._tell_who_is_late()
            if self.loss_watch is not None:
                self.loss_watch.look()
            if self.equality is not None:
                self.equality.say()
        await self._runtime.wait(until)

    @property
    def _is_set_back(self) -> bool:
        return self.progress is not None and self.progress.is_set_back

    def _tell_who_is_late(self) -> None:
        session = self.participant.session
        waited_s = self._runtime.now() - self._began_at
        if session.in_round and self._late_round < self.round and waited_s > self._config.rounds.late_after_s:
            self._late_round = self.round
            self.common.watcher.late(self.round, [self._roster.name(peer) for peer in session.waiting_for])

    def _give_up_on_the_lost(self) -> None:
        if not self.participant.session.in_round:
            return
        waiting, now = self.participant.session.waiting_for, self._runtime.now()
        # A member that is no neighbour may refuse this peer until it has heard of the loss that it is to report of.
        self._neighbors.give_up_if_refused(waiting if {*waiting} <= {*self._neighbors.all} else (), now)
        self._tell_that_it_is_behind(waiting, now)
        silences = self._neighbors.silences(waiting, now, self._runtime.began_at)
        self._name_the_command(silences)
        for peer, silent in silences.items():
            if silent > self._config.transport.give_up_after_s:
                raise PeerUnreachable(
                    f"{self._roster.name(peer)} has been away for {silent:.0f} s and round {self.round} needs it; "
                    + (self._neighbors.problem(peer) or "is it running, and is its address right?")
                )

    def _name_the_command(self, silences: Mapping[int, float]) -> None:
        """Name the command once for each peer that is waited for. Where members vote, members that reach too few others
        for a majority do not."""
        away = {peer for peer, silent in silences.items() if silent > SAY_AWAY_S}
        for peer in sorted(away - self._said_away) if self.own_loss is not None else ():
            name = self._roster.name(peer)
            if self.round == 0 and peer not in self._neighbors.met:
                log.warning(
                    "%s has not come yet, and round 0 needs it: this peer waits. Start it on its device, or invite one"
                    " to a free seat (`sotto invite`); if it runs, `sotto doctor` tells what stands in the way",
                    name,
                )
                continue
            log.warning(
                "%s has been away for %.0f s, and round %d needs it: this peer waits. If it is lost for good, an"
                " operator can let the others go on: `sotto remove %s`",
                name,
                silences[peer],
                self.round,
                name,
            )
        self._said_away = away

    def _tell_that_it_is_behind(self, waiting: Collection[int], now: float) -> None:
        """Say what helps where a neighbour that this peer waits for has messages which this peer has not made yet, and
        ends each connection: its state may be older than what the neighbour knows, and it may have signed nothing by
        which it could tell. Nothing more follows from it: that is the neighbour's word."""
        holders = [peer for peer in self.durable.links.ahead() if peer in waiting]
        behind = [peer for peer in holders if self._neighbors.is_dismissed_by(peer, now)]
        if not behind or now < self._said_that_it_is_behind_at + _SAY_AGAIN_S:
            return
        self._said_that_it_is_behind_at = now
        log.warning(
            "%s ends each connection, and says that it has messages which this peer sent before: the state of this"
            " peer may be lost, or an old copy, or in another folder. This peer waits: put the newest copy of its state"
            " folder back, or let the others continue without it: `sotto remove %s` on another device%s",
            self._roster.name(behind[0]),
            self._local.name,
            self._how_to_come_back,
        )

    @property
    def _how_to_come_back(self) -> str:
        """The step needed beside removing this peer."""
        if not self._local.rejoins:
            return ", and add this one again under another name"
        return " (it takes part again then)" if self.progress is not None else ", and `sotto admin rejoin` on this one"

    def _stops_in_vain(self) -> bool:
        """Whether this peer stops, and the round under way will not end soon."""
        if not self._runtime.stops:
            return False
        waiting = self.participant.session.waiting_for
        # Nothing can be expected in time of one that was never met either.
        away = all(peer in self._neighbors.left or peer not in self._neighbors.met for peer in waiting)
        return away or self._runtime.stopping_for_s > _STOP_GRACE_S

    # -- the end -------------------------------------------------------------------------------------------------------

    async def save_at_end(self) -> None:
        """Take a checkpoint; in the midst of a round the journal has to do."""
        if self.participant.session.in_round:
            await self.saver.sync()
        else:
            await self.saver.checkpoint()

    async def linger(self) -> None:
        """Stay until every neighbour has all frames of this peer for good, and everybody's last evaluation has come."""
        deadline = self._runtime.now() + self._config.transport.linger_s
        while self._runtime.now() < deadline and not self._runtime.stops and not self._is_settled():
            await self._wait(min(deadline, self._runtime.now() + 0.5))
            await self.answer()
        if self._config.rounds.late == "skip":
            # Messages that came after the last round still carry mass.
            await self.saver.checkpoint(anew=True)

    async def answer(self) -> None:
        """Take the waiting frames, and announce what was requested."""
        if self.frames or self.requests:
            await self._take_frames()

    def _is_settled(self) -> bool:
        if self.has_left:
            return not any(map(self.frames.owes, self.member_links.linked()))
        if any(map(self.frames.owes, self._neighbors.receivers)):
            return False
        if self.equality is not None and self.equality.awaits_the_last_words:
            return False
        return self.common.evaluations.finished() >= set(self.members) or self._neighbors.all_have_left

    # -- the state -----------------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds completed."""
        return self.participant.round

    @property
    def has_left(self) -> bool:
        """Whether this peer was a member and has handed over its share."""
        return self.participant.membership.has_left

    @property
    def members(self) -> Collection[int]:
        """Participants of the coming round, or of the one under way."""
        return self.member_links.members

    def linked(self) -> Sequence[int]:
        """Return the peers to be linked to."""
        return self.member_links.linked()

    async def models(self) -> Models:
        """Return the models to evaluate and save, valid until the next round."""
        algorithm = self.participant.algorithm
        return Models(await self._runtime.work(self.participant.model), algorithm.x, algorithm.u)

    def figures(self) -> Mapping[str, object]:
        """Return the fields of `sotto status` for rounds alone."""
        compressor = self.participant.algorithm.node.compressor
        return {
            "budget_kbytes_per_s": self._config.compressor.budget_kbytes_per_s,
            "fraction": getattr(compressor, "fraction", None),
            "bits": getattr(compressor, "bits", None),
            "push_weight": self.participant.algorithm.u,
            "durability": self._config.state.durability,
            "checkpoint_round": self.durable.disk_state.base_round,
            "checkpoint_bytes": self.durable.disk_state.checkpoint_bytes,
            "journal_bytes": self.durable.disk_state.journal_bytes,
            "members": [self._roster.name(peer) for peer in self.members],
            "coming_changes": [
                {"name": self._roster.name(change.subject), "kind": change.kind.name, "from": change.effective}
                for change in self.participant.membership.coming_changes
            ],
            **self._rejoined(),
            "suspects": [] if self.loss_watch is None else self.loss_watch.figures(),
            "waiting_for": [self._roster.name(peer) for peer in self.participant.session.waiting_for],
            **({} if self.equality is None else self.equality.figures()),
        }

    def _rejoined(self) -> Mapping[str, object]:
        """Return since when this peer takes part again, after it was declared lost; nothing where it was not."""
        joins = (each for each in self.participant.membership.changes if each.kind is ChangeKind.JOIN)
        since = next((each.effective for each in joins if each.subject == self._local.number), None)
        return {"rejoined_from": since} if self._local.incarnation else {}

    def link_figures(self, peer: int) -> Mapping[str, object]:
        """Return the same for the link to one neighbour."""
        deadlines = self.participant.session.late_neighbors.deadlines
        return {
            "unacknowledged_bytes": self.frames.backlog_bytes(peer),
            "lateness_s": None if deadlines is None else deadlines.lateness_s(peer),
            "late_after_s": None if deadlines is None else deadlines.after_s(peer),
            "left_out": peer in self.durable.left_out,
        }
