"""The loop of a peer of a synchronous run: three inputs (a local step done, a message, a timer), one ordered way to
perform outcomes.

Training, compression, decoding and the journal run in one worker thread, syncs of the disk in another. What survives a
crash, and what a neighbour may forget, is the knowledge of `peer.node.durable`: a peer that was killed replays its
journal to where it was, so that nobody can tell.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peer.compress.payload import FloatArray
from peer.config import Config
from peer.daemon.audit_log import AuditLog
from peer.daemon.base import Daemon
from peer.errors import HandshakeRefused, PeerUnreachable, RemoteProtocolError, SottoError, StateError
from peer.gossip.effects import Effects
from peer.gossip.membership import Change, ChangeKind, Newcomer
from peer.net.counters import LinkCounters
from peer.net.handler import MAX_BULLETIN_BYTES
from peer.net.hello import quote
from peer.net.neighbor import Neighbor
from peer.node import membership_codec
from peer.node.durable import DurablePeer
from peer.node.participant import Participant
from peer.round_record import RoundRecord

log = logging.getLogger("sotto")

_REPLICA = "replica"
"""Topic of notes of a round and of the digest of each layer of the sender's replica after it, as u64s."""
_JOIN = "join"
"""Topic of the note with which a peer asks to be let in, and says who it is where not everybody lists it."""
_NO = "no join"
"""Topic of the answer, if that is no: the reason."""
_ASK_AGAIN_S = 5.0
_DECLINED_S = 15.0
"""Give up after being told for this long, by whomever is asked, that this peer cannot join."""
_WORDS = {ChangeKind.JOIN: "joins", ChangeKind.LEAVE: "leaves", ChangeKind.LOST: "is lost and left out"}
_MAX_REASON_BYTES = 500
_BACKLOG_BYTES_MAX = 256 << 20
"""Start no further round while a neighbour has this much unacknowledged from us."""
_NOTABLE_WAIT_S = 0.05
"""A budget makes every peer wait a moment now and then; only what is longer is worth a line in the log."""
_STOP_GRACE_S = 5.0
"""After SIGTERM: how long to wait for the neighbours of the round under way."""


@dataclass(frozen=True)
class _Wish:
    """A change of the members that somebody asks for."""

    kind: ChangeKind
    subject: int
    granted: asyncio.Future[Change] | None
    """For the answer to the operator; None where a peer asks to be let in."""
    newcomer: Newcomer | None = None
    """Who asks, where not everybody lists it."""


class SynchronousDaemon(Daemon):
    """One peer of a run that goes in rounds."""

    participant: Participant

    def __init__(self, config: Config, base: Path, reread: Callable[[], Config] | None = None) -> None:
        """Read data and checkpoint. Raises SottoError."""
        super().__init__(config, base, reread)
        config = self.config
        self.audit_log = AuditLog(self.folder.directory / "ledger") if config.state.ledger else None
        self.participant = self.setup.participant(
            self.me,
            self.trainer,
            self.trainer.layout,
            self.trainer.initial_vector(),
            check_newcomer=self.roster.check,
            observe=None if self.audit_log is None else self.audit_log.observe,
        )
        self.durable = DurablePeer(
            self.participant,
            self.folder.disk,
            neighbors=[peer for peer in range(self.setup.num_peers) if peer != self.me],
            **self._durability(),
        )
        self._pending: deque[tuple[int, int, bytes]] = deque()
        self._wake_at: float | None = None
        """When a late neighbour is no longer waited for."""
        self._said_that_it_slows_down = False
        self._wishes: deque[_Wish] = deque()
        """Changes of the members that the operator or a peer that joins asks for."""
        self._sponsor: int | None = None
        self._asked_at = 0.0
        self._declined: tuple[float, str] | None = None
        """Since when peers say that this one cannot join, and why."""
        self._recover()
        self.roster.introduce(self.participant.membership.newcomers)
        self._know_neighbors()
        # Those whom the file lost while this peer was stopped.
        self._wishes += [_Wish(ChangeKind.LOST, peer, None) for peer in self._still_members(self._taken_out)]

    async def _rounds(self) -> None:
        while self.participant.round < self.config.run.rounds and not self._stop.is_set() and not self._has_left:
            record: RoundRecord | None = None
            if not self.participant.membership.is_member:
                record = await self._wait_to_join()
                if record is None:
                    continue
            elif not self.participant.session.in_round:  # After a crash it may be in the middle of one.
                await self._wait_for_room()
                await self._keep_to_budget()
                if self._stop.is_set():
                    return
                record = self._perform(await self._work(self._step_and_begin))
            while record is None:
                if not self._pending:
                    await self._wait(self._wake_at)
                if self._diverged is not None or self._stopping_in_vain():
                    # The round cannot end: it goes on, from the journal, when this peer is started again.
                    return
                record = await self._take_frames()
            self._to_replay_s += record.train_s + record.gossip_s
            await self._agree(record.round)
            await self._after_round(record)

    def _step_and_begin(self) -> Effects:
        started = time.perf_counter()
        self.durable.step()
        self._pace(started)
        before = self.durable.left_out
        effects = self.durable.begin(self._now())
        for peer in sorted(self.durable.left_out - before):
            log.warning(
                "%s has confirmed nothing for %g s: it gets no weight until it does",
                self.roster.name(peer),
                self.config.rounds.leave_out_after_s,
            )
        for peer in sorted(before - self.durable.left_out):
            log.info("%s confirms again what it gets, and has its weight back", self.roster.name(peer))
        return effects

    async def _agree(self, round_: int) -> None:
        """Tell those who keep copies of this peer what they should be, and ask for what differs in the copies here."""
        agreement = self.participant.agreement
        own = agreement.own_digests()
        if own is not None and own[0] == round_:
            note = np.array([round_, *own[1]], "<u8").tobytes()
            for peer in agreement.keepers() if len(note) <= MAX_BULLETIN_BYTES else ():
                if self.transport.is_up(peer):
                    self.transport.bulletin(peer, _REPLICA, note)
        if agreement.has_heard:
            effects, sentences = await self._work(self.participant.check_replicas)
            for sentence in sentences:
                log.warning("%s", sentence)
            self._perform(effects)

    async def _take_frames(self) -> RoundRecord | None:
        """Give the waiting frames, and the timer if it is due, to the participant; return the record of a round that
        this completed."""
        record = await self._grant_wishes()
        while record is None and self._pending:
            peer, seq, frame = self._pending.popleft()
            self.transport.taken(peer, seq)
            try:
                effects = await self._work(self.durable.receive, peer, seq, frame, self._now())
            except RemoteProtocolError as error:
                log.error("dropped a message: %s", error)
                # What follows it on this link makes no sense without it; the reconnect asks for it again.
                self._pending = deque(item for item in self._pending if item[0] != peer)
                self.transport.reset(peer, str(error))
                continue
            record = self._perform(effects)
        if record is not None:
            return record
        wake_at = self._wake_at
        if wake_at is not None and self._now() >= wake_at:
            return self._perform(await self._work(self.durable.timer, self._now()))
        return None

    def _perform(self, effects: Effects) -> RoundRecord | None:
        """Send and confirm what a call asks for, which is on disk by now; return the record of a round that ended."""
        self._wake_at = effects.wake_at
        for outgoing in effects.frames:
            self._count(outgoing)
        if effects.news:
            self._meet()
        for outgoing in self.durable.publish(effects):
            if self.transport.is_up(outgoing.receiver):
                self.transport.send(outgoing.receiver, outgoing.seq, outgoing.frame)
        self._confirm(effects.receipts)
        return effects.record

    def _confirm(self, receipts: Mapping[int, int]) -> None:
        for peer, upto in receipts.items():
            self.transport.acknowledge(peer, upto)

    async def _close_round(self, record: RoundRecord) -> None:
        if self.audit_log is not None:
            await self._work(self.audit_log.close_round, record.round, self.participant.algorithm)

    async def _save_at_end(self) -> None:
        if self.participant.session.in_round:
            self._confirm(await self._work(self.durable.sync))
        else:
            await self._checkpoint()

    async def _linger(self) -> None:
        deadline = self._now() + self.config.transport.linger_s
        while self._now() < deadline and not self._stop.is_set() and not self._all_settled():
            await self._wait(min(deadline, self._now() + 0.5))
            if self._pending or self._wishes:
                await self._take_frames()
        if self.config.rounds.late == "skip":
            # Messages that came after the last round still carry mass.
            await self._save(anew=True)

    def _all_settled(self) -> bool:
        """Whether every neighbour has all our frames for good and every peer's last evaluation has reached us."""
        if self._has_left:
            return not any(self.durable.links.out[peer].backlog for peer in self._linked() if peer not in self._gone)
        owed = any(self.durable.links.out[peer].backlog_bytes for peer in self.receivers if peer not in self._gone)
        return not owed and self._all_have_finished()

    async def _models(self) -> tuple[FloatArray, FloatArray]:
        return self.participant.model(), self.participant.algorithm.x

    async def _wait_for_room(self) -> None:
        """Hold the next round back while a neighbour has too much unacknowledged, or cannot be heard of at all."""
        while not self._stop.is_set() and any(
            self.durable.links.out[peer].backlog_bytes > _BACKLOG_BYTES_MAX for peer in self.receivers
        ):
            await self._wait(None)

    async def _keep_to_budget(self) -> None:
        """Let the budget choose what the coming round sends, and wait until the links may carry it."""
        budget = self.participant.budget
        if budget is None:
            return
        for peer in self.receivers:
            counters = self.transport.counters(peer)
            budget.measured(peer, counters.packet_bytes_sent or counters.protobuf_bytes_sent)
        now = self._now()
        may_begin_at = self.participant.ready(now)
        if may_begin_at > now + _NOTABLE_WAIT_S and budget.is_least and not self._said_that_it_slows_down:
            self._said_that_it_slows_down = True
            log.warning(
                "even the smallest messages exceed compressor.budget_kbytes_per_s = %g: waiting %.1f s before round %d,"
                " and as long as it takes before others",
                self.config.compressor.budget_kbytes_per_s,
                may_begin_at - now,
                self.participant.round,
            )
        while self._now() < may_begin_at and not self._stop.is_set():
            await self._wait(may_begin_at)
            if self._pending:
                # Whoever asks for a repair of the last round is not kept waiting; rounds do not begin here.
                await self._take_frames()

    def _give_up_on_the_lost(self) -> None:
        if not self.participant.session.in_round:
            return
        waiting = self.participant.session.waiting_for
        self._give_up_if_refused(waiting)
        for peer in waiting:
            if self.transport.is_up(peer):
                self._last_seen[peer] = self._now()
            silent = self._now() - self._last_seen.setdefault(peer, self._previous_time_s)
            if silent > self.config.transport.give_up_after_s:
                reason = self.transport.refusals.get(peer) or self.transport.problems.get(peer)
                name = self.roster.name(peer)
                raise PeerUnreachable(
                    f"{name} has been away for {silent:.0f} s and round {self.participant.round} needs it; "
                    + (reason or "is it running, and is its address right?")
                )

    # -- members that come and go --------------------------------------------------------------------------------------

    @property
    def _has_left(self) -> bool:
        return self.participant.membership.has_left

    def _members_at_end(self) -> Sequence[int]:
        members = self.participant.membership.members
        return range(self.setup.num_peers) if members is None else members

    async def _announce(self, kind: ChangeKind, subject: int) -> dict[str, Any]:
        granted: asyncio.Future[Change] = asyncio.get_running_loop().create_future()
        self._wishes.append(_Wish(kind, subject, granted))
        self._wake.set()
        change = await granted
        return {"name": self.roster.name(subject), "round": self.participant.round, "from": change.effective}

    async def _grant_wishes(self) -> RoundRecord | None:
        """Announce the changes that were asked for, or say why not; return the record of a round that ended because a
        lost peer is waited for no longer."""
        record: RoundRecord | None = None
        while self._wishes and record is None:
            wish = self._wishes.popleft()
            granted = wish.granted
            try:
                if wish.newcomer is not None:
                    self.roster.check(wish.subject, wish.newcomer)
                    self.roster.check_today(wish.newcomer)
                change = self.participant.membership.plan(wish.kind, wish.subject, wish.newcomer)
                record = self._perform(await self._work(self.durable.announce, change, self._now()))
            except SottoError as error:
                if granted is None and wish.kind is ChangeKind.LOST:
                    log.warning("%s is not in the list any more: %s", self.roster.name(wish.subject), error)
                elif granted is None:
                    log.warning("%s cannot join: %s", self.roster.name(wish.subject), error)
                    self.transport.bulletin(wish.subject, _NO, str(error).encode()[:_MAX_REASON_BYTES])
                elif not granted.done():
                    granted.set_exception(SottoError(str(error)))
                if isinstance(error, StateError):
                    raise
            else:
                if granted is not None and not granted.done():
                    granted.set_result(change)
        return record

    async def _wait_to_join(self) -> RoundRecord | None:
        """Ask one of those that this peer is connected to for its sponsorship, and wait for what comes of it."""
        if self._declined is not None and self._now() > self._declined[0] + _DECLINED_S:
            raise HandshakeRefused(f"nobody lets it join: {self._declined[1]}")
        if (there := self._linked()) and all(self._gone.get(peer) == "completed" for peer in there):
            raise PeerUnreachable("the run came to its end before this peer could join it")
        if self._sponsor is None or not self.transport.is_up(self._sponsor):
            self._sponsor = next((peer for peer in self._linked() if self.transport.is_up(peer)), None)
            self._asked_at = -_ASK_AGAIN_S
        if self._sponsor is not None and self._now() > self._asked_at + _ASK_AGAIN_S:
            self._asked_at = self._now()
            log.info("asks %s to let it join", self.roster.name(self._sponsor))
            said = self.roster.introduction()
            self.transport.bulletin(
                self._sponsor, _JOIN, b"" if said is None else membership_codec.encode_newcomer(said)
            )
        self._give_up_if_refused(self._linked())
        if not self._pending:
            await self._wait(None)
        return await self._take_frames()

    def _know_neighbors(self) -> None:
        senders, receivers = self.participant.membership.partners()
        self.senders, self.receivers = tuple(sorted(senders)), tuple(sorted(receivers))
        self.neighbors = tuple(sorted(senders | receivers))

    def _linked(self) -> Sequence[int]:
        """Return the neighbours, those that still need something of this peer, and those that may join through it."""
        members = self.participant.membership.members
        if members is None:
            return self.neighbors
        lost, first = self.participant.session.lost, set(self.setup.first_members)
        owed = {peer for peer, link in list(self.durable.links.out.items()) if link.backlog}
        if self.participant.membership.is_member:
            may_join = {peer for peer in self.roster.expected if self.roster.neighbor(peer).dial}
            may_join |= set(range(self.setup.num_peers)) - first
            may_join -= {each.subject for each in self.participant.membership.changes}
        else:
            # Those who can be dialled; anyone of them will do.
            may_join = first if not self.participant.membership.has_left else set()
        return sorted({*self.neighbors, *owed, *may_join} - {self.me} - lost)

    def _still_members(self, names: Sequence[str]) -> list[int]:
        """Return which of these peers are members, or about to be, and not about to go."""
        members = {*self._members_at_end(), *(each.subject for each in self.participant.membership.coming_changes)}
        going = {each.subject for each in self.participant.membership.changes if each.kind is not ChangeKind.JOIN}
        numbers = (self.roster.index_of(name) for name in names)
        return [peer for peer in numbers if peer is not None and peer in members - going]

    async def _follow_list(self, taken_out: Sequence[str]) -> dict[str, Any]:
        removed: dict[str, int] = {}
        left_to_others: dict[str, str] = {}
        for peer in self._still_members(taken_out):
            name = self.roster.name(peer)
            try:
                removed[name] = (await self._announce(ChangeKind.LOST, peer))["from"]
            except SottoError as error:
                # Only those who hear it can tell where it was lost; the others hear of it from them.
                left_to_others[name] = str(error)
        for name in taken_out:
            self.roster.forget(name)
        for peer in sorted({*self._linked()} - self.transport.neighbors):
            self.transport.add_neighbor(self.roster.neighbor(peer))
        return {"removed": removed, "left_to_others": left_to_others}

    def _meet(self) -> None:
        """Take up the links that a change of the members asks for, and end those to peers that are lost."""
        introduced = self.roster.introduce(self.participant.membership.newcomers)
        for peer in introduced:
            self.transport.know_member(self.roster.name(peer))
        self._know_neighbors()
        for change in self.participant.membership.coming_changes:
            name = self.roster.name(change.subject)
            log.info("%s %s from round %d on", name, _WORDS[change.kind], change.effective)
        linked = self.transport.neighbors
        # Of a newcomer that called on its own nothing was known but the name.
        for peer in sorted({*self._linked()} - (linked - {*introduced})):
            self.transport.add_neighbor(self.roster.neighbor(peer))
        # A link that is only given up as an edge may still have something to carry.
        for peer in sorted(linked & self.participant.session.lost):
            name = self.roster.name(peer)
            self.transport.remove_neighbor(peer, f"{name} was declared lost and is out of the run")

    def goodbye(self, peer: int, reason: str) -> None:
        """A neighbour leaves on purpose: for good, if it is no member any more."""
        super().goodbye(peer, reason)
        if self.participant.membership.is_gone(peer):
            asyncio.get_running_loop().call_soon(self.transport.remove_neighbor, peer, "it left the run")

    def _stopping_in_vain(self) -> bool:
        if not self._stop.is_set():
            return False
        waiting = self.participant.session.waiting_for
        # Of one that was never met nothing can be expected in time either.
        away = all(peer in self._gone or peer not in self._met for peer in waiting)
        return away or self._now() > self._stop_at + _STOP_GRACE_S

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def _checkpoint(self) -> None:
        await self._save(anew=False)

    async def _save(self, *, anew: bool) -> None:
        # The rounds before a checkpoint are never repeated, so that their rows have to be there.
        self.metrics.flush()
        self._confirm(await self._work(lambda: self.durable.save(self._description(), anew=anew)))
        self._to_replay_s, self._snapshot_wanted = 0.0, False

    async def _take_snapshot(self) -> None:
        if self.participant.session.in_round:
            # The next round boundary takes it.
            self._snapshot_wanted = True
        else:
            await self._checkpoint()

    async def _sync(self) -> None:
        self._confirm(await asyncio.get_running_loop().run_in_executor(self._syncer, self.durable.sync))

    def _recover(self) -> None:
        """Go back to where this peer was, and fill in the rows that a crash kept out of the metrics."""
        started = time.perf_counter()
        rounds: set[int] | None = None
        evaluated = {record.round for record in self.metrics.evaluations() if record.peer == self.me}

        def on_round(effects: Effects) -> None:
            nonlocal rounds
            record = effects.record
            assert record is not None
            if rounds is None:
                rounds = {known.round for known in self.metrics.rounds(after=record.round - 1)}
            if record.round not in rounds:
                for outgoing in effects.frames:
                    self._count(outgoing)
                counters = dict.fromkeys(self.neighbors, LinkCounters())
                self.metrics.put(record, *self.traffic.close_round(record.round, counters))
            if self.audit_log is not None:
                self.audit_log.close_round(record.round, self.participant.algorithm)
            done = record.round + 1
            if self._is_evaluated(done) and done not in evaluated:
                self.metrics.put(*self._judge(done, self.participant.model(), self.participant.algorithm.x))

        try:
            recovery = self.durable.open(on_round)
        except StateError as error:
            raise StateError(f"{self.folder.directory}: {error}") from None
        for sentence in recovery.notices:
            log.warning("%s: %s", self.folder.directory, sentence)
        for outgoing in recovery.effects.frames:
            self._count(outgoing)
        self._wake_at = recovery.effects.wake_at
        self._previous_time_s = recovery.now
        self.metrics.drop_after(self.participant.round - 1)
        for evaluation in self.metrics.evaluations():
            # Others may have left by the time that anybody asks.
            if evaluation.peer >= 0 and self._is_shared(evaluation.round):
                self.evaluations[evaluation.peer, evaluation.split] = evaluation
        if self.participant.round or self.participant.session.in_round:
            self._to_replay_s = time.perf_counter() - started
            log.info(
                "%s goes on from round %d: the checkpoint of round %d and %d rounds of its journal, in %.1f s",
                self.name,
                self.participant.round,
                recovery.checkpoint_round,
                recovery.replayed_rounds,
                self._to_replay_s,
            )

    # -- what the transport calls -------------------------------------------------------------------------------------

    def _frames_to_send(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        self.durable.links.meet(peer)
        if peer in self.participant.session.lost:
            raise RemoteProtocolError("was declared lost and is out of the run", peer=peer)
        return self.durable.connected(peer, remote_has)

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """A whole frame came; its credit goes back when it has been looked at."""
        self._last_seen[peer] = self._now()
        self._pending.append((peer, seq, frame))
        self._wake.set()
        return False

    def bulletin_received(self, peer: int, topic: str, data: bytes) -> None:
        """A note: of a neighbour's copy here, or one that is passed on from peer to peer."""
        if topic == _JOIN:
            self._asked_to_sponsor(peer, data)
            return
        if topic == _NO:
            self._told_no(peer, data.decode(errors="replace"))
            return
        if topic != _REPLICA:
            super().bulletin_received(peer, topic, data)
            return
        if len(data) % 8 or len(data) < 16:
            raise RemoteProtocolError("it told digests that are none")
        round_, *digests = np.frombuffer(data, "<u8").tolist()
        self.participant.agreement.hear(peer, round_, tuple(digests))

    def _hear(self, peer: int, name: str) -> Neighbor | None:
        if self.participant.membership.is_gone(peer):
            raise HandshakeRefused(f"{quote(name)} was declared lost or left, and is out of the run")
        return super()._hear(peer, name)

    def _asked_to_sponsor(self, peer: int, note: bytes) -> None:
        newcomer = membership_codec.decode_newcomer(note, sender=peer) if peer >= self.setup.num_peers else None
        if all(each.subject != peer for each in (*self.participant.membership.coming_changes, *self._wishes)):
            self._wishes.append(_Wish(ChangeKind.JOIN, peer, None, newcomer))
            self._wake.set()

    def _told_no(self, peer: int, reason: str) -> None:
        """Hear that a peer does not let this one join; another one is asked in a while."""
        log.warning("%s does not let it join: %s", self.roster.name(peer), quote(reason))
        self._declined = self._declined or (self._now(), quote(reason))
        others = [other for other in self._linked() if self.transport.is_up(other)]
        self._sponsor = next((other for other in others if other > peer), min(others, default=None))

    def receipt(self, peer: int, upto: int) -> None:
        """A neighbour has our frames up to `upto` for good."""
        self.durable.receipt(peer, upto)
        self._wake.set()

    def last_received(self, peer: int) -> int:
        """Return the last frame of a neighbour that need not be sent again."""
        self.durable.links.meet(peer)
        return self.durable.links.durable_from(peer)

    def _figures(self) -> dict[str, Any]:
        compressor = self.participant.algorithm.node.compressor
        return {
            "budget_kbytes_per_s": self.config.compressor.budget_kbytes_per_s,
            "fraction": getattr(compressor, "fraction", None),
            "bits": getattr(compressor, "bits", None),
            "push_weight": self.participant.algorithm.u,
            "durability": self.config.state.durability,
            "checkpoint_round": self.durable.disk_state.base_round,
            "checkpoint_bytes": self.durable.disk_state.checkpoint_bytes,
            "journal_bytes": self.durable.disk_state.journal_bytes,
            "members": [self.roster.name(peer) for peer in self._members_at_end()],
            "coming_changes": [
                {"name": self.roster.name(change.subject), "kind": change.kind.name, "from": change.effective}
                for change in self.participant.membership.coming_changes
            ],
            "waiting_for": [self.roster.name(peer) for peer in self.participant.session.waiting_for],
        }

    def _link_figures(self, peer: int) -> dict[str, Any]:
        deadlines = self.participant.session.late_neighbors.deadlines
        return {
            "unacknowledged_bytes": self.durable.links.out[peer].backlog_bytes,
            "lateness_s": None if deadlines is None else deadlines.lateness_s(peer),
            "late_after_s": None if deadlines is None else deadlines.after_s(peer),
            "left_out": peer in self.durable.left_out,
        }
