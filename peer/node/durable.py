"""A peer of a synchronous run that survives the end of its process: participant, links, journal and checkpoints.

No clock and no socket: the time is an argument, outgoing frames are returned, and files are behind a `Disk`. The daemon
drives it over gRPC; the fault simulator drives the same object over a network and a disk that fail on purpose.

Every change of the participant is in the journal before its consequences leave: the frame of a neighbour before it is
applied, checksums of the own frames with a digest of the state before they are sent. After a crash the newest
checkpoint and the journal after it thus restore the peer, with the decisions that it took by the clock (late
neighbours, receivers left out, the choices of a bandwidth budget), and frames sent again have the same bytes. Where
arithmetic is not repeatable, the journal holds the own frames instead of their checksums.

A neighbour may forget a frame once it would survive a power cut here. `sync` makes that so and returns the receipts;
with `durability = "power"` every round does so before it sends. Otherwise the driver calls it now and then, and the
neighbour keeps the frame until then: after a power cut the rounds since are repeated, to the same bits unless they
depended on the clock.

Order of use: `open`; then for each round `step`, `begin`, and `receive` or `timer` until effects carry the record of a
finished round; `save` between rounds. These calls are for one thread. `publish` goes with the thread of `connected` and
`receipt`: it hands over the frames of the last call, and has to come before the next one. `sync` may run in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from peer.errors import RemoteProtocolError
from peer.gossip.effects import Effects, OutgoingFrame
from peer.gossip.membership import Change
from peer.gossip.session_state import SessionState
from peer.node import membership_codec
from peer.node.blame import blaming
from peer.node.checkpoint_arrays import refusing_what_does_not_fit
from peer.node.disk_state import DiskState, OnRound, PeerRecovery
from peer.node.frame_account import NUMBERED_KINDS
from peer.node.held_frames import inbox_from_checkpoint, inbox_to_checkpoint
from peer.node.local_steps import RecordedSteps
from peer.node.participant import Participant
from peer.node.recorded_peer import RecordedPeer
from peer.node.repair_budget import RepairBudget
from peer.node.replay import Replay
from peer.node.told import ToldParts
from peer.protocol import EQUALITY, FULL_WIDTH, OLDEST
from peer.rate_limits import Allowances
from peer.state import journal
from peer.state.checkpoints import Checkpoint
from peer.state.journal import Announced, Begun, Checked, Lost, Receipt, Received, Record, Sent, Signed, TimedOut
from peer.wire.message import Message, MessageKind

NOTICES_AT_ONCE = 256
NOTICES_PER_S = 8.0
"""Membership notices that a neighbour may tell. Each can cost a sync of the disk, and one more message to each
neighbour. Honest ones come in bursts when many peers join or leave at once."""

_SET_BACK_ROUNDS_MAX = 4096
"""More rounds than a power cut can undo: those since the last sync, of about a second."""


class DurablePeer:
    """One peer. See the module docstring for the order of calls."""

    def __init__(
        self,
        participant: Participant,
        disk_state: DiskState,
        *,
        neighbors: Collection[int],
        repeatable: bool = True,
        protocol_of: Callable[[Change], int] = lambda change: OLDEST,
    ) -> None:
        """`repeatable`: whether a local step that is computed again gives the same bits. `protocol_of(change)`: the
        version of the protocol that peers need to understand a change of the members."""
        self.participant, self.disk_state = participant, disk_state
        self._peer = RecordedPeer(participant, neighbors)
        self.links = self._peer.links
        self.left_out: frozenset[int] = frozenset()
        """Receivers that got no weight in the last round, because they had not confirmed anything for long."""
        self.in_full_width = False
        """Whether the coming rounds are written without entropy coding, whatever the configuration says. Only without a
        budget, and once all members speak `FULL_WIDTH`."""
        self._repeatable, self._protocol_of = repeatable, protocol_of
        self._has_script_steps = False
        """Whether the journal since the checkpoint leaves steps out that a training script is to repeat."""
        self._repairs, self._notices = RepairBudget(), Allowances(rate=NOTICES_PER_S, burst=NOTICES_AT_ONCE)
        self._forgotten: dict[int, bytes] = {}
        """Neighbour → its newest request to repair a round that a power cut has undone here, until it begins again."""
        self._told: set[tuple[int, Change]] = set()
        """(neighbour, change of members that it announced or passed on), since this process began."""
        self._furthest_round = 0
        """No honest neighbour was ahead of this round before this process began, nor needs to be held back after it."""

    # -- recovery ------------------------------------------------------------------------------------------------------

    def open(self, on_round: OnRound = lambda effects: None) -> PeerRecovery:
        """Go back to where this peer was: load the newest whole checkpoint and replay the journal after it.

        Raises StateError if the state belongs to another peer or run, is damaged beyond what its copies can mend, or
        gives other bits than before.
        """
        recovery, self.participant.reaches.is_replaying = PeerRecovery(), True
        checkpoint = self.disk_state.load_newest(recovery)
        if checkpoint is not None:
            self._restore(checkpoint, recovery)
        # More than one journal only where a newer checkpoint was damaged: each leads to the next one's beginning.
        replay = Replay(self._peer, recovery, on_round, repeatable=self._repeatable)
        for round_, name, content in self.disk_state.journals(recovery):
            replay.run(name, round_, content.records)
        self.participant.reaches.is_replaying, self._has_script_steps = False, replay.has_script_steps
        said = self.participant.membership.own_words.take_new()
        if replay.unsent is not None or said:
            self._append(*map(Signed, said))
            # The own frames that the crash kept from the journal count as made.
            unsent = replay.unsent or ()
            self._append(self._sent(unsent))
            for outgoing in unsent:
                self.links.push(outgoing.receiver, outgoing.frame)
        # A crash can come between the news of a loss and its consequences.
        missing = self._with_losses(self.participant.unchanged(), recovery.now)
        for outgoing in missing.frames:
            if outgoing.seq:
                self.links.push(outgoing.receiver, outgoing.frame)
        recovery.effects.extend(missing)
        if missing.finished is not None:
            recovery.replayed_rounds += 1
            on_round(recovery.effects)
            recovery.effects = self.participant.unchanged()
        # Frames confirmed before the crash are confirmed again, from disk.
        self.disk_state.journaled_round = self.participant.round
        self.sync()
        self.disk_state.files.prune()
        self._furthest_round = self.participant.round + self.participant.session.max_lead + _SET_BACK_ROUNDS_MAX
        return recovery

    def _restore(self, checkpoint: Checkpoint, recovery: PeerRecovery) -> None:
        values, arrays = checkpoint.state, checkpoint.arrays
        self.participant.restore(values, arrays)
        with refusing_what_does_not_fit():
            self._peer.told.restore(values.get("told"), self.participant.round)
        for peer in self.participant.membership.newcomers:
            self.links.meet(peer)
        with refusing_what_does_not_fit():
            self.links.restore(values, arrays)
            waiting = inbox_from_checkpoint(values, arrays)
        # Before members could change, frames that wait in the inbox were left out of the count.
        is_counted = "received" in values
        known = self.participant.reaches.state()  # With what these reach.
        # They are no part of the session's state: taken again, they are decoded against the restored reference codes.
        for each in waiting:
            if is_counted and each.seq > self.links.incoming[each.peer].last_seq:
                continue  # It follows one that was left out.
            try:
                self._peer.take(Received(0.0, each.peer, each.seq, each.frame), is_counted=is_counted)
            except RemoteProtocolError as error:
                recovery.notices.append(f"the checkpoint holds a frame that is refused; it is left out: {error}")
                self.links.ask_again(each.peer, each.seq)
        self.participant.reaches.restore(known, lambda: 0.0)
        late = SessionState.from_json(values["session"]).late
        self.participant.session.late_neighbors.restore_lateness(late)

    # -- rounds --------------------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds completed."""
        return self.participant.round

    def step(self) -> None:
        """Do the local step of the coming round: the expensive part."""
        self.participant.step()

    def begin(self, now: float) -> Effects:
        """Start the exchange of the round with the result of `step`. Raises StateError if the disk refuses."""
        budget = self.participant.budget
        variant = budget.variant if budget is not None else journal.FULL_WIDTH if self.in_full_width else None
        self.left_out = self.participant.session.silent_receivers(self.links.receipts_of, now)
        record = Begun(now, self.participant.round, variant, tuple(sorted(self.left_out)))
        # Journaled after it is done, in one write with the frames: nothing that depends on it has left by then, and a
        # crash in between only means that the local step is done again.
        stepped = self.participant.recorded_step()
        needs = [each.needs for each in stepped]
        self.disk_state.pin(max([FULL_WIDTH if variant == journal.FULL_WIDTH else OLDEST, *needs]))
        self._has_script_steps |= any(each.is_repeated for each in stepped)
        effects = self._journaled(self._peer.begin(record), *stepped, record, always=True)
        return self._with_repairs(effects, now) if self._forgotten else effects

    def receive(self, peer: int, seq: int, frame: bytes, now: float) -> Effects:
        """Take a frame of a neighbour; one that was taken before is dropped.

        Raises RemoteProtocolError, which names the sender, if an honest peer would not have sent it (drop it and all
        that follow it on that link), and StateError if the disk refuses.
        """
        link, early = self.links.incoming[peer], self._peer.early
        following = link.last_seq + early.count(peer) + 1
        if seq and seq < following:
            # A neighbour repeats frames without a receipt after every reconnection.
            link.duplicates += 1
            return self.participant.unchanged()
        if seq > following:
            raise RemoteProtocolError(f"sent frame {seq} where {following} is next", peer=peer)
        record = Received(now, peer, seq, frame)
        if membership_codec.is_notice(frame):
            return self._receive_notice(record)
        message = self.participant.decode(peer, frame, before=early.newest(peer))
        judge = partial(self.participant.judge, message)
        lacks_news = self.participant.session.is_joining and self._lacks_news(peer, judge)
        if seq and (lacks_news or self._is_early(message.round)) and message.round <= self._furthest_round:
            # A message that no honest peer sends in any round is refused now, while its connection is there to be
            # blamed. The rest is judged when its time comes: an outsider does not know its neighbours yet, and the
            # frames kept may hold a change of members.
            self.participant.check_form(message)
            if early.add(peer, seq, frame, message):
                return self.participant.unchanged()
        can_be_undone = not self.disk_state.syncs_before_sending and message.round <= self._furthest_round
        if not seq and can_be_undone and self.participant.session.is_unsent(message):
            self.participant.check_form(message)
            self._forgotten[peer] = frame
            return self.participant.unchanged()
        self.participant.judge(message)
        if seq and early.count(peer):
            # A stream has its rounds in order: frames after one that waits cannot be due before it.
            raise RemoteProtocolError(f"sent a message of round {message.round} after later ones", peer=peer)
        return self._receive_message(message, record)

    def _receive_message(self, message: Message, record: Received) -> Effects:
        if (record.seq > 0) != (message.kind in NUMBERED_KINDS):
            number = "with" if record.seq else "without"
            raise RemoteProtocolError(f"sent {message.kind.name} {number} a number", peer=record.peer)
        if message.kind is MessageKind.REPAIR_REQUEST:
            # Changes nothing here, and is repeated by peers that need it.
            if not self._repairs.allows(message, self.round, record.now):
                return self.participant.unchanged()
            with blaming(record.peer):
                effects = self.participant.take(message, record.now)
            self._repairs.answered(message, self.round)
            return self._journaled(effects)
        if message.kind is MessageKind.REPAIR and not self.participant.expects(message):
            return self.participant.unchanged()
        self.participant.weigh(message)
        # Journal first: a frame that a peer applies and then forgets is lost for everybody. Nobody can ask for a repair
        # again once the sender, by the next message from here, knows that it is not needed any more.
        (self._append_for_good if message.kind is MessageKind.REPAIR else self._append)(record)
        return self._journaled(self._peer.take(record, message))

    def _with_repairs(self, effects: Effects, now: float) -> Effects:
        """Answer the requests that waited for the round that has begun; return the effects of both."""
        requests, self._forgotten = self._forgotten, {}
        for peer, frame in requests.items():
            try:
                effects.extend(self.receive(peer, 0, frame, now))
            except RemoteProtocolError as error:
                effects.refused.append(error)
        return effects

    def _receive_notice(self, record: Received) -> Effects:
        peer, early = record.peer, self._peer.early
        if not record.seq:
            raise RemoteProtocolError("told of a change of members without a number", peer=peer)
        judge = partial(self.participant.proven, peer, record.frame)
        if early.count(peer) or (self.participant.session.is_joining and self._lacks_news(peer, judge)):
            # It follows frames that are kept, or is the first of them.
            if not early.add_notice(peer, record.seq, record.frame):
                raise RemoteProtocolError("sends more ahead of time than can be kept", peer=peer)
            return self.participant.unchanged()
        change = self.participant.proven(peer, record.frame)
        assert isinstance(change, Change)
        was_outsider = self.participant.membership.is_outsider
        if not was_outsider and not self._notices.spend(peer, record.now):
            raise RemoteProtocolError(f"tells of more than {NOTICES_AT_ONCE} changes of members at once", peer=peer)
        self.disk_state.pin(self._protocol_of(change))
        # No honest neighbour says it twice: that is worth no sync of the disk.
        (self._append if (peer, change) in self._told else self._append_for_good)(record)
        self._told.add((peer, change))
        return self._with_early(self._journaled(self._peer.take(record, change)), record.now)

    def timer(self, now: float) -> Effects:
        """Go on without late neighbours if the last `wake_at` has passed."""
        record = TimedOut(now)
        effects = self._peer.time_out(record)
        # A timer without effect need not be repeated.
        return self._journaled(effects, record) if effects.frames or effects.finished is not None else effects

    def announce(self, change: Change, now: float) -> Effects:
        """Announce a change of the members that `plan_change` returned. Raises StateError if the disk
        refuses."""
        membership = self.participant.membership
        record = Announced(now, membership_codec.encode(membership.signed(change)))
        membership.own_words.take_new()  # The record holds it.
        self.disk_state.pin(self._protocol_of(change))
        self._append_for_good(record)
        return self._with_losses(self._journaled(self._peer.announce(record)), now)

    def publish(self, effects: Effects) -> list[OutgoingFrame]:
        """Hand the numbered frames to the links; return the frames to send to connected neighbours. For the others,
        `connected` will return them."""
        return self.links.publish(effects.frames)

    @property
    def told(self) -> ToldParts:
        """Digests of what this peer told all others alike, and was told by each of them."""
        return self._peer.told

    # -- journal before effects ----------------------------------------------------------------------------------------

    def _journaled(self, effects: Effects, *records: Record, always: bool = False) -> Effects:
        """Number and journal the effects of a call, after the records that it depended on; return them. `always`:
        journal a digest even if no frames were made."""
        effects.frames = self.links.numbered(effects.frames)
        made = [outgoing for outgoing in effects.frames if outgoing.seq]
        said = self.participant.membership.own_words.take_new()
        records = (*records, *map(Signed, said))
        if made or always:
            # One write with the records: a crash in between would leave a call without its effects.
            records = (*records, self._sent(made))
        if records:
            self._append(*records)
        # The records on which the call depended are in the journal by now, whoever wrote them.
        self.disk_state.journaled_round = self.participant.round
        if said:
            # Nobody is to hear two versions of it.
            self.disk_state.sync()
        if made and self.disk_state.syncs_before_sending:
            # Only where frames leave: effects that nobody has seen may be forgotten and repeated.
            effects.receipts = self.sync()
        if effects.finished is not None:
            self._peer.forget_used()
            assert effects.record is not None
            return self._with_early(effects, effects.record.time_s)
        return effects

    def _with_losses(self, effects: Effects, now: float) -> Effects:
        """Go on without the peers that a call declared lost; return the effects of both."""
        for peer in self.participant.membership.to_lose:
            # Its receipts decide which mass comes back. One that is on its way comes too late, here as in a replay.
            upto, unreceived = self.links.give_up(peer)
            self._forgotten.pop(peer, None)
            record = Lost(now, peer, upto)
            self._append_for_good(record)
            effects.extend(self._journaled(self._peer.lose(record, unreceived)))
        return effects

    def _with_early(self, effects: Effects, now: float) -> Effects:
        """Take early frames whose round has come; return the effects of both."""
        early = self._peer.early
        for peer in early.peers():
            while (first := early.first(peer)) is not None and not self._is_early(first.round):
                record = Received(now, peer, first.seq, first.frame)
                try:
                    content = self.participant.proven(peer, first.frame)
                except RemoteProtocolError as error:
                    if self.participant.session.is_joining:
                        break  # As `_lacks_news` has it.
                    # Frames that follow it are not taken either: none is confirmed, and all come again.
                    early.forget(peer)
                    effects.refused.append(error)
                    break
                early.take(peer)
                if isinstance(content, Message):
                    self._append(record)
                else:
                    self.disk_state.pin(self._protocol_of(content))
                    self._append_for_good(record)
                effects.extend(self._journaled(self._peer.take(record, content)))
        return self._with_losses(effects, now)

    def _is_early(self, round_: int) -> bool:
        """Whether a frame has to wait: this peer was set back, or has not yet heard that it joins, though others
        have."""
        return self.participant.membership.is_outsider or self.participant.session.is_early(round_)

    def _lacks_news(self, peer: int, judge: Callable[[], object]) -> bool:
        """Whether a frame has to wait because this peer joins. One neighbour may send it what follows from a change of
        members before another one tells it of that change. What it cannot accept as a member either, it refuses."""
        try:
            judge()
        except RemoteProtocolError:
            return True
        return self._peer.early.count(peer) > 0

    def _sent(self, made: Collection[OutgoingFrame]) -> Sent | Checked:
        frames = tuple((outgoing.receiver, outgoing.seq, outgoing.frame) for outgoing in made)
        sent = Sent(self.participant.round, self._peer.digest(), frames)
        return Checked.of(sent) if self._repeatable and not self._has_script_steps else sent

    def _append(self, *records: Record) -> None:
        receipts = self.links.take_new_receipts()
        self.disk_state.append(*(Receipt(peer, upto) for peer, upto in receipts.items()), *records)

    def _append_for_good(self, record: Record) -> None:
        """Journal a record whose effect depends on its time, and make it survive a power cut first. The position of a
        change of members in the own stream, and the frames that a lost peer had, must not change once others have seen
        them."""
        self._append(record)
        self.disk_state.sync()

    # -- neighbours ----------------------------------------------------------------------------------------------------

    def connected(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """Return (number, frame) of the frames that a connected neighbour needs; it has those up to `remote_has` for
        good. Raises RemoteProtocolError if it has lost frames that it had."""
        frames = self.links.connected(peer, remote_has)
        self._repairs.connected(peer)
        return frames + [(0, outgoing.frame) for outgoing in self.participant.requests_to(peer)]

    # -- durability ----------------------------------------------------------------------------------------------------

    def sync(self) -> dict[int, int]:
        """Make everything journaled so far survive a power cut; return the new receipts (neighbour → number). Raises
        StateError."""
        # Read before the sync: it does not cover frames taken meanwhile.
        received = self.links.received()
        self.disk_state.sync()
        return self.links.mark_durable(received)

    def save(self, description: Mapping[str, Any], *, anew: bool = False) -> dict[int, int]:
        """Take a checkpoint, between rounds, and begin a new journal; return the new receipts. Raises StateError.

        If there is a checkpoint of this round already, its journal is enough, and is synced; `anew` writes it once
        more, with late messages since. Nor is there a new one while mass may still come back from a lost peer.
        """
        round_ = self.participant.round
        steps = self.participant.local_steps
        if self.participant.session.is_unsettled or (isinstance(steps, RecordedSteps) and not steps.can_be_saved):
            return self.sync()
        if round_ == self.disk_state.base_round and self.disk_state.checkpoint_bytes and not anew:
            return self.sync()
        values, arrays = self.participant.to_checkpoint()
        if self.participant.algorithm.spec.tells_all is not None and self.disk_state.protocol >= EQUALITY:
            values["told"] = self._peer.told.state()
        self._peer.forget_used()
        received, (link_values, link_arrays) = self.links.received(), self.links.to_checkpoint()
        inbox_values, inbox_arrays = inbox_to_checkpoint(self._peer.waiting.all())
        self.disk_state.save(
            round_,
            {**values, **description, **link_values, **inbox_values},
            {**arrays, **link_arrays, **inbox_arrays},
        )
        self._has_script_steps = False
        return self.links.mark_durable(received)
