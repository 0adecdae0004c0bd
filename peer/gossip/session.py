"""The rounds of one peer: matches messages to rounds and decides when a round is complete.

Two rules:

1. Everything that says "this message belongs to that round" lives here; the algorithm sees only complete inboxes.
2. Nothing here knows bytes, sockets, disks or the time: `now` is an argument, in seconds, and the driver performs the
   `Effects` that each call returns.

Order of use for each round: `begin` with the result of the local step, then `receive` for every message that comes
and `timer` when the last `wake_at` has passed, until effects say `finished`. Messages may come at any time, also
between rounds and for later rounds.

A round is a sequence of exchanges: those of the algorithm; then, while a peer is lost, a wait until all members have
said what they heard of it; then those of a `Boundary`, if the next round has other members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from peer.compress.payload import FloatArray
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.base import Algorithm, Exchange, Memory
from peer.gossip.boundary import COPY_PHASE, READ_PHASE, TRANSFER_PHASE, Boundary
from peer.gossip.effects import Effects, Send
from peer.gossip.inbox import Inbox
from peer.gossip.late_neighbors import LateNeighbors, LatePolicy
from peer.gossip.lost_peers import LostPeers
from peer.gossip.replicas import replicas_of
from peer.gossip.session_state import SessionState
from peer.gossip.silence import Silence
from peer.gossip.starvation import UsualWeight
from peer.gossip.views import ViewSchedule
from peer.wire.message import Message, MessageKind

_ROUND_KINDS = frozenset({MessageKind.GOSSIP, MessageKind.PART, MessageKind.NOTHING, MessageKind.REPAIR})
_HOLD_PHASE = READ_PHASE - 1
"""Phase of the wait at the end of a round until all members have reported what they heard of a lost peer. Nothing is
sent or awaited in it: reports are membership notices. It lies between the algorithm's phases and those of a
boundary."""
_LAST_HOLD_PHASE = COPY_PHASE + 1
"""Phase of the same wait after a boundary, for a loss that this peer hears of during it."""
_HOLDS = frozenset({_HOLD_PHASE, _LAST_HOLD_PHASE})


class Session:
    """One peer's place in the sequence of rounds."""

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        in_neighbors: Iterable[int],
        max_lead: int,
        late: LatePolicy | None = None,
        views: ViewSchedule | None = None,
    ) -> None:
        """`max_lead`: rounds that an honest in-neighbour can be ahead (the graph's diameter, plus skipped rounds); it
        bounds the messages that a peer can make us keep. `views`: the algorithm's schedule where members may change;
        every peer is waited for then, until it is lost."""
        if late is not None and not algorithm.spec.tolerates_late:
            raise LocalProtocolError(f"{algorithm.spec.name} cannot go on without a late neighbour")
        self.algorithm = algorithm
        self.round = 0
        """The round under way, or the next one."""
        self.max_lead = max_lead
        """Rounds that an in-neighbour can be ahead of a peer that was not set back."""
        self.late_neighbors = LateNeighbors(late)
        self.lost_peers = LostPeers(algorithm, views)
        self.in_neighbors = frozenset(in_neighbors)
        """Peers that may send messages."""
        self._views = views
        self._silence = None
        if late is not None and algorithm.spec.push_sum:
            self._silence = Silence(late.silent_after_s)
        self._usual_weight = UsualWeight()
        self._exchange: Exchange | None = None
        self._missing: list[int] = []
        """Awaited senders whose message was missing at the last look; see `_absent`."""
        self.is_joining = False
        """Whether this peer waits for the model of its sponsor."""
        self._boundary: Boundary | None = None
        """Set while the round under way is in the exchanges before a change of members."""
        self._settled_model: FloatArray | None = None
        self._wake_at: float | None = None
        self.inbox = Inbox()
        self._applied: list[tuple[int, int]] = []
        """(round, sender) of messages that the algorithm was given since the last round ended."""
        self._givers: list[int] = []

    @property
    def in_round(self) -> bool:
        """Whether a round is under way (between `begin` and effects with `finished`)."""
        return self._exchange is not None

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Peers whose message, or report on a lost peer, the round under way still needs; ascending."""
        exchange = self._exchange
        if exchange is None:
            return ()
        if exchange.phase in _HOLDS:
            return tuple(sorted(self.lost_peers.unheard_reports(self.round)))
        return tuple(
            sorted(
                j for j in exchange.awaits - self.lost_peers.peers if not self.inbox.has(self.round, exchange.phase, j)
            )
        )

    @property
    def lost(self) -> frozenset[int]:
        """Peers that are lost for good."""
        return frozenset(self.lost_peers.peers)

    @property
    def is_unsettled(self) -> bool:
        """Whether mass may still come back from a lost peer once others have reported of it. `state` between rounds
        would not hold that."""
        return self.lost_peers.is_unsettled(self.round)

    def unchanged(self) -> Effects:
        """Return the effects of a call that changes nothing: the timer stays where it is."""
        return Effects(wake_at=self._wake_at)

    # Rounds.

    def silent_receivers(self, receipts: Callable[[int], tuple[int, int]], now: float) -> frozenset[int]:
        """Return the receivers to leave out of the coming round because they have confirmed nothing for too long.

        `receipts(receiver)` is (number of our frames that it has confirmed, number of frames for it). The decision
        depends on the clock, so that a repetition of the round after a crash has to know it.
        """
        if self._silence is None:
            return frozenset()
        receivers = self.algorithm.node.schedule.all_receivers(self.algorithm.node.peer)
        return self._silence.silent({receiver: receipts(receiver) for receiver in receivers}, now)

    def begin(self, gradient: FloatArray, rate: float, now: float, left_out: frozenset[int] = frozenset()) -> Effects:
        """Start the round with the local step's result (all zeros and rate 0 if the round has none).

        `left_out`: receivers that cannot be reached; mass given to them would be missing until they can. Only a
        push-sum peer may leave somebody out.
        """
        if self._exchange is not None:
            raise LocalProtocolError(f"round {self.round} is still under way")
        if left_out and not self.algorithm.spec.push_sum:
            raise LocalProtocolError(f"{self.algorithm.spec.name} cannot leave a receiver out of a round")
        effects = self.absorb_late()
        self.lost_peers.forget_old_copies(self.round)
        node = self.algorithm.node
        # Only while neighbours owe it something: a peer that hears everybody has the weight that the graph gives it,
        # however small, and gets no more by keeping it.
        starves = self.algorithm.spec.push_sum and self.late_neighbors.is_owed
        if starves and self._usual_weight.is_starved(self.algorithm.u):
            left_out = frozenset(node.schedule.all_receivers(node.peer))
        self.algorithm.left_out = left_out
        # After the decision: a weight that has just collapsed is not to be compared with itself.
        self._usual_weight.note(self.algorithm.u)
        self._open(self.algorithm.begin(self.round, gradient, rate), now, effects)
        return self._advance(now, effects)

    def absorb_late(self) -> Effects:
        """Apply late messages that have come, and take back mass that lost peers never had; `begin` does so too.

        This changes the model, so that a driver that trains between rounds calls it before it reads the model. It is
        never done within a round: the algorithm has made its messages of the model that it had as the round began.
        """
        if self._exchange is not None:
            raise LocalProtocolError("late messages are applied between rounds")
        for message in self.late_neighbors.take_arrived():
            self.algorithm.absorb_late(message)
            self._applied.append((message.round, message.sender))
        effects = self.unchanged()
        effects.returned = self.lost_peers.settle_(self.round)
        return effects

    def receive(self, message: Message, now: float) -> Effects:
        """Take one message. Raises RemoteProtocolError if an honest peer would not have sent it."""
        self.check(message)
        effects, sender, late = self.unchanged(), message.sender, self.late_neighbors
        if message.kind is MessageKind.REPAIR_REQUEST:
            # Answered at any time, and without going on: a request changes nothing here, so that it is not journaled,
            # and a round that ended because of it could not be repeated.
            effects.sends.append(Send(sender, self.algorithm.answer(message)))
            return effects
        if message.kind is MessageKind.REPAIR and (replicas := replicas_of(self.algorithm)) is not None:
            # Between the rounds' own messages: it belongs to the present copy of the sender here, in any round.
            replicas.take(message)
            return effects
        if message.kind is MessageKind.REPAIR and not self.awaits_repair(message):
            effects.duplicates = 1  # It comes outside of the numbered stream, and may be answered twice.
            return effects
        if self.is_early(message.round):
            # The bound keeps a neighbour from filling this peer's memory with rounds to come.
            raise RemoteProtocolError(
                f"is in round {message.round}, more than {self.max_lead} ahead of our {self.round}", peer=sender
            )
        if late.owes(message.round, sender):
            late.note_lateness(message, now)
            late.settle(message)
        elif not self._is_over(message) and self.inbox.put(message):
            late.note_lateness(message, now)
        else:
            effects.duplicates = 1
            return effects
        return self._advance(now, effects)

    def timer(self, now: float) -> Effects:
        """Go on without late neighbours if the time has come."""
        effects = self.unchanged()
        # A timer may come too early: the driver set it by an older `wake_at`, or its clock is coarse.
        if self._wake_at is not None and now >= self._wake_at:
            return self._advance(now, effects)
        return effects

    # Members that come and go.

    def join(self, t: int, now: float) -> Effects:
        """Become a member from round t on: wait, in round t − 1, for the model of the sponsor."""
        if self._views is None or (self._exchange is not None and not self.is_joining):
            raise LocalProtocolError(f"a peer cannot join in the midst of round {self.round}")
        # A later sponsor, for which it may be waiting, sends nothing any more: all use the earlier one.
        self._exchange, self.is_joining = None, True
        # The sponsor hands over at the end of the round before the first of the new member.
        self.round = t - 1
        self._views.enter(t - 1)
        self._boundary = Boundary(self.algorithm, self._views, self.round)
        exchange = self._boundary.begin()
        if exchange is None:
            raise LocalProtocolError(f"nobody sponsors the peer that joins in round {t}")
        effects = self.unchanged()
        self._open(exchange, now, effects)
        return self._advance(now, effects)

    def lose(self, peer: int, unreceived: Sequence[Message], now: float) -> Effects:
        """Wait no longer for a peer that is lost for good, and give it nothing more from the next round on.

        `unreceived`: own messages of rounds that it does not have for good.
        """
        if self._views is None or peer in self.lost_peers.peers:
            raise LocalProtocolError(f"peer {peer} cannot be lost (again)")
        # The round under way is still one of the graph with the lost peer: its other neighbours may have heard it.
        without_it = self.round + self.in_round
        self.lost_peers.add(peer, unreceived, without_it)
        self.inbox.drop(peer, without_it)
        if self.is_joining and self._exchange is not None and self._exchange.phase == TRANSFER_PHASE:
            # Its model may come from another member now (`boundary.transfers`). Once it has a model, it has also sent
            # its replicas, and no neighbour takes those twice.
            return self.join(self.round + 1, now)
        return self._advance(now, self.unchanged())

    def go_on(self, now: float) -> Effects:
        """Go on with the round under way if only reports on a lost peer were missing."""
        effects = self.unchanged()
        if self._exchange is not None and self._exchange.phase in _HOLDS:
            return self._advance(now, effects)
        return effects

    def last_heard(self, peer: int) -> int | None:
        """Return the last round of which there is a message of `peer`; 0 if it is about to join, None if it sends
        nothing to this peer."""
        # A replica is advanced in every round, so that each edge carries a message in each.
        ordered = self.algorithm.spec.memory is Memory.REPLICAS
        has_share = peer in self._givers or self.inbox.has(self.round, TRANSFER_PHASE, peer)
        waiting = self.inbox.rounds_of(peer)
        return self.lost_peers.last_heard(peer, self.round, waiting, ordered=ordered, has_share=has_share)

    # Questions of the driver.

    def check(self, message: Message) -> None:
        """Raise RemoteProtocolError if an honest peer would not have sent this message at any time."""
        sender = message.sender
        if sender in self.lost_peers.peers:
            raise RemoteProtocolError("was declared lost and is out of the run", peer=sender)
        if message.kind is MessageKind.REPAIR_REQUEST:
            if self.is_unsent(message):
                raise RemoteProtocolError(f"asks to repair round {message.round}, not sent yet", peer=sender)
            return
        if message.kind not in _ROUND_KINDS:
            raise RemoteProtocolError(f"sent {message.kind.name} in a synchronous run", peer=sender)
        spec = self.algorithm.spec
        # An algorithm with replicas would lose its place in the sequence of differences by a round without a message.
        may_send_nothing = spec.may_send_nothing or (spec.modulo and message.phase == READ_PHASE)
        if message.kind is MessageKind.NOTHING and not may_send_nothing:
            raise RemoteProtocolError(f"left us out of a round, which {self.algorithm.spec.name} forbids", peer=sender)
        me = self.algorithm.node.peer
        if sender not in self.in_neighbors and not _is_newcomer(self._views, me, message):
            raise RemoteProtocolError("is no in-neighbour in this graph", peer=sender)

    def is_next(self, message: Message) -> bool:
        """Return whether the algorithm's message of a round is the one that is due: each comes once, in the order of
        its sender's rounds."""
        sender, phase = message.sender, message.phase
        due = self.late_neighbors.first_owed(sender)
        if due is None:
            due = self.round + (self._exchange is not None and phase < self._exchange.phase)
            while due < message.round and (self.is_here(due, phase, sender) or not self.algorithm.hears(due, sender)):
                due += 1
        return message.round == due and not self.is_here(due, phase, sender)

    def is_here(self, round_: int, phase: int, sender: int) -> bool:
        """Return whether a message has come and waits."""
        return self.inbox.has(round_, phase, sender) or self.late_neighbors.has_postponed(round_, sender)

    def is_open(self, message: Message) -> bool:
        """Return whether a message has not come yet and can still be used in its exchange."""
        return not self._is_over(message) and not self.inbox.has(message.round, message.phase, message.sender)

    def awaits_repair(self, repair: Message) -> bool:
        """Return whether the exchange under way waits for this repair."""
        exchange, sender = self._exchange, repair.sender
        if exchange is None or (repair.round, repair.phase) != (self.round, exchange.phase):
            return False
        asked = exchange.sends.get(sender)
        is_asked = asked is not None and asked.kind is MessageKind.REPAIR_REQUEST
        return is_asked and sender in exchange.awaits and self.is_open(repair)

    def is_early(self, round_: int) -> bool:
        """Whether a neighbour can be in a round only if this peer was set back, by a power cut."""
        return round_ > self.round + self.max_lead

    def is_unsent(self, request: Message) -> bool:
        """Whether a message asks to repair a round that this peer has yet to begin, as far as it knows."""
        is_request = request.kind is MessageKind.REPAIR_REQUEST
        return is_request and request.round >= self.round + (self._exchange is not None)

    def open_requests(self, receiver: int) -> list[Message]:
        """Return the requests to `receiver` that have no answer yet, to be sent again after a reconnect."""
        exchange = self._exchange
        if exchange is None or receiver not in exchange.sends or receiver not in self.waiting_for:
            return []
        message = exchange.sends[receiver]
        return [message] if message.kind is MessageKind.REPAIR_REQUEST else []

    # State.

    def state(self) -> SessionState:
        """Return the state that must survive a crash between two rounds besides the algorithm's own state."""
        if self._exchange is not None:
            raise LocalProtocolError("the state of a session is taken between rounds")
        return SessionState(
            round=self.round,
            late=self.late_neighbors.state(),
            usual_weight=self._usual_weight.value,
            applied=tuple(self._applied),
            lost={} if self._views is None else self._views.absent,
        )

    def restore(self, state: SessionState) -> None:
        """Restore a result of `state`. Raises ValueError if it does not fit."""
        self.round = state.round
        self.late_neighbors.restore(state.late)
        self._usual_weight.value = state.usual_weight
        self._applied = list(state.applied)
        self.inbox.clear()
        self.lost_peers.restore(state.lost.items())

    # Inside.

    def _is_over(self, message: Message) -> bool:
        if message.round != self.round or self._exchange is None:
            return message.round < self.round
        return message.phase < self._exchange.phase

    def _open(self, exchange: Exchange, now: float, effects: Effects) -> None:
        """Begin an exchange: let its messages be sent, and wait for those that it awaits."""
        self._exchange, self._missing = exchange, list(exchange.awaits)
        effects.sends += [Send(receiver, message) for receiver, message in sorted(exchange.sends.items())]
        self._wake_at = self.late_neighbors.open(self.round, exchange.phase, exchange.awaits, now)

    def _advance(self, now: float, effects: Effects) -> Effects:
        """Go through the exchanges of the round under way for as long as one is complete; return the effects."""
        skipped: list[int] = []
        while self._exchange is not None:
            # Several may be complete at once: messages of later phases, and of later rounds, come early.
            exchange = self._exchange
            if exchange.phase in _HOLDS and self.lost_peers.unheard_reports(self.round):
                break
            absent = self._absent(exchange)
            if absent:
                self._wake_at = self.late_neighbors.go_on_at(absent, now)
                if self._wake_at is None or now < self._wake_at:
                    break
            inbox = self._take_inbox(exchange, skipped)
            if self._boundary is None:
                # A boundary's handover is no message of the algorithm; `given` lists it.
                self._applied += [(self.round, sender) for sender in inbox]
            following = self._following(exchange, inbox)
            if following is not None:
                self._open(following, now, effects)
            else:
                self._end_round(effects, skipped)
        effects.wake_at = self._wake_at
        return effects

    def _take_inbox(self, exchange: Exchange, skipped: list[int]) -> dict[int, Message]:
        """Return the messages of an exchange that is complete, or as complete as it will be, by ascending sender;
        append the missing senders to `skipped`."""
        inbox: dict[int, Message] = {}
        for sender in sorted(exchange.awaits):
            message = self.inbox.take(self.round, exchange.phase, sender)
            if message is not None:
                self.late_neighbors.heard(sender)
                if message.kind is not MessageKind.NOTHING:
                    inbox[sender] = message
            elif sender not in self.lost_peers.peers:
                self.late_neighbors.skip(self.round, sender)
                skipped.append(sender)
        return inbox

    def _following(self, exchange: Exchange, inbox: Mapping[int, Message]) -> Exchange | None:
        """Return the next exchange of the round; None if this was the last one."""
        if exchange.phase == _LAST_HOLD_PHASE:
            return None
        if self._boundary is not None:
            if exchange.phase == TRANSFER_PHASE:
                self._givers += inbox
            following = self._boundary.advance(inbox)
        else:
            if exchange.phase != _HOLD_PHASE:
                following = self.algorithm.advance(inbox)
                if following is not None or self._views is None:
                    return following
            assert self._views is not None
            # Before the boundary: mass that comes back of a lost peer, and the next members, depend on all reports.
            if self.lost_peers.unheard_reports(self.round):
                return Exchange({}, frozenset(), _HOLD_PHASE)
            if not self._views.membership.changes_at(self.round + 1):
                return None
            # The displacement of the round, for momentum, is the algorithm's alone: handing mass over is no step.
            self._settled_model = self.algorithm.model().copy()
            self._boundary = Boundary(self.algorithm, self._views, self.round)
            following = self._boundary.begin()
        if following is None:
            self._boundary = None
            # Mass that comes back of a lost peer is taken back before the next round, and depends on all reports here
            # too.
            if self.lost_peers.unheard_reports(self.round):
                return Exchange({}, frozenset(), _LAST_HOLD_PHASE)
        return following

    def _end_round(self, effects: Effects, skipped: Sequence[int]) -> None:
        """Say that the round is over, with all that belongs to it."""
        effects.finished, effects.skipped = self.round, tuple(skipped)
        effects.applied, self._applied = tuple(self._applied), []
        effects.given, self._givers = tuple(self._givers), []
        effects.settled_model, self._settled_model = self._settled_model, None
        self._exchange, self._wake_at, self.is_joining = None, None, False
        self.late_neighbors.close(self.round)
        self.round += 1

    def _absent(self, exchange: Exchange) -> list[int]:
        """Return the awaited senders whose message has not come at all; where everybody is waited for, at most one.

        The message of a sender that still owes an earlier round, or whose late message waits to be applied, is
        postponed until after that one: a replica takes its differences in order, and late ones are applied between
        rounds.
        """
        absent, late, lost = [], self.late_neighbors, self.lost_peers.peers
        if late.waits_for_all:
            # Messages stay until the exchange is complete: each sender is looked at once, not with every message.
            missing = self._missing
            while missing and (missing[-1] in lost or self.inbox.has(self.round, exchange.phase, missing[-1])):
                missing.pop()
            return missing[-1:]
        awaited = exchange.awaits - lost
        if not late.has_any:
            return [sender for sender in awaited if not self.inbox.has(self.round, exchange.phase, sender)]
        for sender in awaited:
            if late.is_behind(sender) and (message := self.inbox.take(self.round, exchange.phase, sender)) is not None:
                late.postpone(message)
            elif not (self.inbox.has(self.round, exchange.phase, sender) or late.has_postponed(self.round, sender)):
                absent.append(sender)
        return absent


def _is_newcomer(views: ViewSchedule | None, peer: int, message: Message) -> bool:
    """Return whether the sender of a message to `peer` has a say in its round because the members changed, or are about
    to."""
    if views is None:
        return False
    t, membership = message.round, views.membership
    if message.phase in (TRANSFER_PHASE, COPY_PHASE):
        # Between two rounds, members of either may give and get.
        concerned = {*membership.members(t), *membership.members(t + 1)}
        return bool(membership.changes_at(t + 1)) and message.sender in concerned
    return message.sender in views.senders_from(t, peer)
