"""The rounds of one peer: matches messages to rounds and decides when a round is complete.

Two rules:

1. Everything that says "this message belongs to that round" lives here; the algorithm sees only complete inboxes.
2. Nothing here knows bytes, sockets, disks or the time: `now` is an argument, in seconds, and whoever drives the
   session sends what an `Outcome` lists.

Order of use for each round: `begin` with the result of the local step, then `receive` for every message that comes
and `timer` whenever `wake_at` has passed, until an outcome says `finished`. Messages may come at any time, also
between rounds and for later rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peer.compress.payload import FloatArray
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.base import Algorithm, Exchange, Memory
from peer.gossip.boundary import COPY_PHASE, READ_PHASE, TRANSFER_PHASE, Boundary, take_back_gifts_
from peer.gossip.deadlines import Deadlines
from peer.gossip.membership import Change, ChangeKind
from peer.gossip.views import ViewSchedule
from peer.wire.message import Message, MessageKind

STARVED_BELOW = 0.9
"""A push-sum peer with less than this part of its usual weight gives none away while neighbours owe it messages.
With half of it the parts of a divided cluster held their ground as well, but weight ran to the ends of each. When it
flowed back, the copies of quant-sgp (top 2 %) could not follow: 71 % in place of 96 % for the worst peer."""
_USUAL_ROUNDS = 64
"""Over so many rounds the usual weight is averaged. It follows what there is: with a limit that stays where it is, a
cluster that lost more than that for good would never mix again."""

_ROUND_KINDS = frozenset({MessageKind.GOSSIP, MessageKind.NOTHING, MessageKind.REPAIR})
_HOLD_PHASE = READ_PHASE - 1
"""At the end of a round: nothing is exchanged, until all have said what they heard of a lost peer."""


@dataclass(frozen=True, kw_only=True)
class LatePolicy:
    """Going on without a late neighbour (`late = "skip"`)."""

    after_s: float
    """How long after the own message a neighbour counts as late; with `adaptive` the most."""
    max_skipped: int
    """How many rounds in a row a neighbour may be missed before it is waited for."""
    adaptive: bool = False
    """Whether each neighbour has a deadline of its own, from how late it was so far (`Deadlines`)."""
    silent_after_s: float = math.inf
    """With push-sum: how long a receiver may confirm nothing before it is left out (`Silence`)."""


@dataclass(kw_only=True)
class Outcome:
    """What the driver has to do, in this order: send, then look at `finished`."""

    sends: list[tuple[int, Message]] = field(default_factory=list)
    """(receiver, message), ascending receivers."""
    finished: int | None = None
    """The round that this completed."""
    skipped: tuple[int, ...] = ()
    """With `finished`: neighbours that the round went on without."""
    duplicates: int = 0
    """Messages that had been taken before, or whose round is over; dropped."""


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
        """`max_lead`: how many rounds an honest in-neighbour can be ahead (the graph's diameter; with skipping, the
        skipped rounds more): bounds what a peer can make us keep. `views`: the algorithm's schedule where members may
        change; everybody is waited for then, until it is lost."""
        if late is not None and not algorithm.spec.tolerates_late:
            raise LocalProtocolError(f"{algorithm.spec.name} cannot go on without a late neighbour")
        self.algorithm = algorithm
        self.round = 0
        """The round under way, or the next one."""
        self.wake_at: float | None = None
        """When `timer` should be called, in the clock of `now`."""
        self._in_neighbors = frozenset(in_neighbors)
        self.max_lead = max_lead
        """How many rounds an in-neighbour can be ahead of a peer that was not set back."""
        self.late = late
        self._views = views
        self._is_joining = False
        """Whether this peer waits for the model of its sponsor."""
        self._boundary: Boundary | None = None
        """While the round under way is in the exchanges before a change of members."""
        self._lost: set[int] = set()
        self._given_up: dict[int, list[Message]] = {}
        """Lost peer → own messages that it never got, until they are accounted for between rounds."""
        self.deadlines = None if late is None else Deadlines(limit_s=late.after_s, adaptive=late.adaptive)
        """How long is waited for whom; None where everybody is waited for."""
        self._began_at: dict[int, float] = {}
        """Round → when our own message of it was ready; of the round under way and those that are still owed."""
        self._opened_at = 0.0
        self._exchange: Exchange | None = None
        self._inbox: dict[tuple[int, int, int], Message] = {}
        """(round, phase, sender) → message of this or a later round."""
        self._missed: set[tuple[int, int]] = set()
        """(round, sender) of messages that a round went on without and that have not come yet."""
        self._late_box: list[Message] = []
        """Late messages that came, to be absorbed between rounds."""
        self._skips_in_a_row: dict[int, int] = {}
        self._usual_weight = 1.0
        """Running mean of the push-sum weight."""
        self._applied: list[tuple[int, int]] = []
        self._givers: list[int] = []
        self._returned: list[tuple[int, Message]] = []
        self._settled_model: FloatArray | None = None

    @property
    def in_round(self) -> bool:
        """Whether a round is under way (between `begin` and its outcome with `finished`)."""
        return self._exchange is not None

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """The peers whose message the round under way still needs, or their word on a lost peer; ascending."""
        exchange = self._exchange
        if exchange is None:
            return ()
        if exchange.phase == _HOLD_PHASE:
            return tuple(sorted(self.unheard_reports))
        return tuple(
            sorted(j for j in exchange.awaits - self._lost if (self.round, exchange.phase, j) not in self._inbox)
        )

    def begin(self, gradient: FloatArray, rate: float, now: float, left_out: frozenset[int] = frozenset()) -> Outcome:
        """Start the round with the local step's result (all zeros and rate 0 where the round has none).

        `left_out`: receivers that cannot be reached, so that what they are given would be gone for as long. Only a
        push-sum peer may leave somebody out.
        """
        if self._exchange is not None:
            raise LocalProtocolError(f"round {self.round} is still under way")
        if left_out and not self.algorithm.spec.push_sum:
            raise LocalProtocolError(f"{self.algorithm.spec.name} cannot leave a receiver out of a round")
        self.absorb_late()
        node = self.algorithm.node
        self.algorithm.left_out = frozenset(node.schedule.all_receivers(node.peer)) if self._is_starved else left_out
        self._usual_weight += (self.algorithm.u - self._usual_weight) / _USUAL_ROUNDS
        outcome = Outcome()
        exchange = self.algorithm.begin(self.round, gradient, rate)
        self._open(exchange, now, outcome)
        self._advance_while_complete(now, outcome)
        return outcome

    @property
    def _is_starved(self) -> bool:
        """Whether this peer has less push-sum weight than usual while neighbours owe it messages. It gives none away
        then, or all of it would go, round by round, to those whom it can reach; what a model is worth that was divided
        by a vanishing weight is its compression error."""
        least = STARVED_BELOW * self._usual_weight
        return bool(self._missed) and self.algorithm.spec.push_sum and self.algorithm.u < least

    def absorb_late(self) -> None:
        """Apply the late messages that have come; `begin` does so too. Changes the model, so that a driver that
        trains between rounds calls it before it reads the model."""
        if self._exchange is not None:
            raise LocalProtocolError("late messages are applied between rounds")
        late = [message for message in self._late_box if message.kind is not MessageKind.NOTHING]
        for message in sorted(late, key=lambda m: (m.round, m.sender)):
            self.algorithm.absorb_late(message)
            self._applied.append((message.round, message.sender))
        self._late_box.clear()
        for peer, unreceived in self._given_up.items():
            # What it was sent before that is in what others have heard of it since.
            heard_round = max(report.heard_round for report in self._reports(peer))
            back = [message for message in unreceived if message.round >= heard_round]
            take_back_gifts_(self.algorithm, [message for message in back if message.phase == TRANSFER_PHASE])
            self.algorithm.without(peer, [message for message in back if message.phase == 0])
            self._returned += [(peer, message) for message in back if message.phase in (0, TRANSFER_PHASE)]
        self._given_up.clear()

    def join(self, t: int, now: float) -> Outcome:
        """Become a member from round t on: wait, in round t − 1, for the model of the sponsor."""
        if self._views is None or (self._exchange is not None and not self._is_joining):
            raise LocalProtocolError(f"a peer cannot join in the midst of round {self.round}")
        # Nothing comes any more of a later sponsor, for which it may be waiting: all go by the earlier one.
        self._exchange, self._is_joining = None, True
        self.round = t - 1
        self._views.enter(t - 1)
        self._boundary = Boundary(self.algorithm, self._views, self.round)
        exchange = self._boundary.begin()
        if exchange is None:
            raise LocalProtocolError(f"nobody sponsors the peer that joins in round {t}")
        outcome = Outcome()
        self._open(exchange, now, outcome)
        self._advance_while_complete(now, outcome)
        return outcome

    def lose(self, peer: int, unreceived: Sequence[Message], now: float) -> Outcome:
        """Wait no longer for a peer that is lost for good, and give it nothing more from the next round on.

        `unreceived`: the own messages of rounds that it has not for good.
        """
        if self._views is None or peer in self._lost:
            raise LocalProtocolError(f"peer {peer} cannot be lost (again)")
        without_it = self.round + self.in_round
        self._lost.add(peer)
        self._views.treat_as_absent(peer, without_it)
        self._given_up[peer] = list(unreceived)
        self._inbox = {key: each for key, each in self._inbox.items() if key[2] != peer or key[0] < without_it}
        outcome = Outcome()
        if self._exchange is not None:
            self._advance_while_complete(now, outcome)
        return outcome

    def go_on(self, now: float) -> Outcome:
        """Go on with the round under way where nothing but the news of what others heard of a lost peer was missing."""
        outcome = Outcome()
        if self._exchange is not None and self._exchange.phase == _HOLD_PHASE:
            self._advance_while_complete(now, outcome)
        return outcome

    @property
    def unheard_reports(self) -> set[int]:
        """Members that have not said yet what they heard of a lost peer that the graph still has. Nobody ends a round
        before: then all know what the lost peer had and from when on it is missing, and of every change that was
        announced before. Afterwards there may be nothing that keeps some from running ahead until the graph is that
        without the lost peer."""
        if self._views is None or not self._lost:
            return set()
        membership = self._views.membership
        members = set(membership.members(self.round))
        leaving = {change.subject for change in membership.changes if change.kind is ChangeKind.LEAVE}
        others = members - self._lost - leaving - {self.algorithm.node.peer}
        return {
            other
            for peer in self._lost & members
            for other in others - {report.issuer for report in self._reports(peer)}
        }

    def _reports(self, peer: int) -> list[Change]:
        assert self._views is not None
        changes = self._views.membership.changes
        return [change for change in changes if change.kind is ChangeKind.LOST and change.subject == peer]

    def last_heard(self, peer: int) -> int | None:
        """Return the last round of which there is a message of `peer`; None if it sends nothing to this peer."""
        if self._views is None:
            return None
        rounds = [round_ for round_, _, sender in self._inbox if sender == peer]
        if rounds:
            return max(rounds)
        me = self.algorithm.node.peer
        if peer not in self._views.senders_from(self.round, me):
            return None
        if self.algorithm.spec.memory is Memory.REPLICAS:
            return max(0, self.round - 1)
        # A graph that changes may not have had it in every round.
        return next((t for t in range(self.round - 1, 0, -1) if peer in self._views.senders(t, me)), 0)

    @property
    def lost(self) -> frozenset[int]:
        """Peers that are lost for good."""
        return frozenset(self._lost)

    def receive(self, message: Message, now: float) -> Outcome:
        """Take one message. Raises RemoteProtocolError if an honest peer would not have sent it."""
        self.check(message)
        outcome = Outcome()
        sender = message.sender
        if message.kind is MessageKind.REPAIR_REQUEST:
            outcome.sends.append((sender, self.algorithm.answer(message)))
            return outcome
        if message.kind is MessageKind.REPAIR and self.algorithm.spec.memory is Memory.REPLICAS:
            # Between the rounds' own messages: it belongs to what the sender's copy is here, whatever round this is.
            self.algorithm.take_replica(message)
            return outcome
        if self.is_early(message.round):
            raise RemoteProtocolError(
                f"is in round {message.round}, more than {self.max_lead} ahead of our {self.round}", peer=sender
            )
        key = (message.round, message.phase, sender)
        if not self._is_known(message, key):
            self._note_lateness(message, now)
        if (message.round, sender) in self._missed:
            self._missed.discard((message.round, sender))
            if message.kind is not MessageKind.NOTHING:
                self._late_box.append(message)
        elif self._is_over(message) or key in self._inbox:
            outcome.duplicates = 1
            return outcome
        else:
            self._inbox[key] = message
        if self._exchange is not None:
            self._advance_while_complete(now, outcome)
        return outcome

    def check(self, message: Message) -> None:
        """Raise RemoteProtocolError if an honest peer would not have sent this message at any time."""
        sender = message.sender
        if message.kind is MessageKind.REPAIR_REQUEST:
            if message.round > self.round or (message.round == self.round and self._exchange is None):
                raise RemoteProtocolError(f"asks to repair round {message.round}, not sent yet", peer=sender)
            return
        if message.kind not in _ROUND_KINDS:
            raise RemoteProtocolError(f"sent {message.kind.name} in a synchronous run", peer=sender)
        spec = self.algorithm.spec
        may_send_nothing = spec.may_send_nothing or (spec.modulo and message.phase == READ_PHASE)
        if message.kind is MessageKind.NOTHING and not may_send_nothing:
            raise RemoteProtocolError(f"left us out of a round, which {self.algorithm.spec.name} forbids", peer=sender)
        if sender in self._lost:
            raise RemoteProtocolError("was declared lost and is out of the run", peer=sender)
        if sender not in self._in_neighbors and not self._is_newcomer(message):
            raise RemoteProtocolError("is no in-neighbour in this graph", peer=sender)

    def is_early(self, round_: int) -> bool:
        """Whether a neighbour can be in a round only if this peer was set back, by a power cut."""
        return round_ > self.round + self.max_lead

    def timer(self, now: float) -> Outcome:
        """Go on without late neighbours if the time has come."""
        outcome = Outcome()
        if self._exchange is not None and self.wake_at is not None and now >= self.wake_at:
            self._advance_while_complete(now, outcome)
        return outcome

    def take_applied(self) -> list[tuple[int, int]]:
        """Return (round, sender) of the messages that the algorithm was given since the last call."""
        taken, self._applied = self._applied, []
        return taken

    def take_givers(self) -> list[int]:
        """Return who handed something over to this peer at the end of the round that is just over."""
        taken, self._givers = self._givers, []
        return taken

    def take_returned(self) -> list[tuple[int, Message]]:
        """Return (lost peer, message) of what has come back since the last call."""
        taken, self._returned = self._returned, []
        return taken

    def take_settled_model(self) -> FloatArray | None:
        """Return z as the algorithm left it in the round that is just over, before members changed; None if they did
        not."""
        taken, self._settled_model = self._settled_model, None
        return taken

    def open_requests(self, receiver: int) -> list[Message]:
        """Return the requests to `receiver` that have no answer yet, to be sent again after a reconnect."""
        exchange = self._exchange
        if exchange is None or receiver not in exchange.sends or receiver not in self.waiting_for:
            return []
        message = exchange.sends[receiver]
        return [message] if message.kind is MessageKind.REPAIR_REQUEST else []

    def unconsumed_counts(self) -> dict[int, int]:
        """Return, for each sender, how many of its round messages wait here for a later round.

        They are its newest ones; a checkpoint between rounds leaves them to the sender to send again.
        """
        counts: dict[int, int] = {}
        for (_, _, sender), message in self._inbox.items():
            if message.kind is not MessageKind.REPAIR:
                counts[sender] = counts.get(sender, 0) + 1
        return counts

    def state(self) -> dict[str, object]:
        """Return what must survive a crash between two rounds beside the algorithm's own state (JSON values)."""
        if self._exchange is not None or self._late_box:
            raise LocalProtocolError("the state of a session is taken between rounds, late messages absorbed")
        return {
            "round": self.round,
            "missed": sorted([round_, sender] for round_, sender in self._missed),
            "skips_in_a_row": {str(sender): count for sender, count in self._skips_in_a_row.items()},
            "usual_weight": self._usual_weight,
            # Late messages that were absorbed just now, to take this state, belong to the coming round's account.
            "applied": [[round_, sender] for round_, sender in self._applied],
            "deadlines": {} if self.deadlines is None else self.deadlines.state(),
            "began_at": {str(round_): began_at for round_, began_at in self._began_at.items()},
            "lost": sorted([peer, since] for peer, since in (self._views.absent if self._views else {}).items()),
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take back what `state` returned. Raises KeyError, TypeError or ValueError if it does not fit."""
        round_, missed, skips = state["round"], state["missed"], state["skips_in_a_row"]
        if not isinstance(round_, int) or not isinstance(missed, list) or not isinstance(skips, dict):
            raise TypeError("the state of the session does not have the types it should")
        self.round = round_
        self._missed = {(int(r), int(sender)) for r, sender in missed}
        self._skips_in_a_row = {int(sender): int(count) for sender, count in skips.items()}
        usual_weight = state.get("usual_weight", 1.0)
        if not isinstance(usual_weight, float):
            raise TypeError("the state of the session does not have the types it should")
        self._usual_weight = usual_weight
        applied = state.get("applied", [])
        if not isinstance(applied, list):
            raise TypeError("the state of the session does not have the types it should")
        self._applied = [(int(r), int(sender)) for r, sender in applied]
        self._inbox.clear()
        lost = state.get("lost", [])
        if not isinstance(lost, list) or (lost and self._views is None):
            raise TypeError("the state of the session does not have the types it should")
        for peer, since in lost:
            assert self._views is not None
            self._lost.add(int(peer))
            self._views.treat_as_absent(int(peer), int(since))
        self.restore_deadlines(state)

    def restore_deadlines(self, state: Mapping[str, object]) -> None:
        """Take back what `state` returned of the deadlines alone: once more after messages that had been waiting when
        it was taken were received again, which says nothing of how late they were."""
        deadlines, began_at = state.get("deadlines", {}), state.get("began_at", {})
        if not isinstance(deadlines, dict) or not isinstance(began_at, dict):
            raise TypeError("the state of the session does not have the types it should")
        if self.deadlines is not None:
            self.deadlines.restore(deadlines)
        self._began_at = {int(round_): float(at) for round_, at in began_at.items()}

    def _is_newcomer(self, message: Message) -> bool:
        """Whether the sender has a say in the round of its message because the members changed, or are about to."""
        if self._views is None:
            return False
        t, me, membership = message.round, self.algorithm.node.peer, self._views.membership
        if message.phase in (TRANSFER_PHASE, COPY_PHASE):
            return bool(membership.changes_at(t + 1)) and message.sender in {
                *membership.members(t),
                *membership.members(t + 1),
            }
        return message.sender in self._views.senders_from(t, me)

    def _is_known(self, message: Message, key: tuple[int, int, int]) -> bool:
        if (message.round, message.sender) in self._missed:
            return False
        return self._is_over(message) or key in self._inbox

    def _note_lateness(self, message: Message, now: float) -> None:
        if self.deadlines is None or message.phase or message.kind is MessageKind.REPAIR:
            return
        self.deadlines.heard(message.sender, now - self._began_at.get(message.round, now))
        if message.round < self.round and all(round_ != message.round for round_, _ in self._missed):
            self._began_at.pop(message.round, None)

    def _is_over(self, message: Message) -> bool:
        if message.round != self.round or self._exchange is None:
            return message.round < self.round
        return message.phase < self._exchange.phase

    def _open(self, exchange: Exchange, now: float, outcome: Outcome) -> None:
        self._exchange = exchange
        outcome.sends.extend(sorted(exchange.sends.items()))
        self._opened_at = now
        self.wake_at = None
        if self.deadlines is None:
            return
        if exchange.phase == 0:
            self._began_at[self.round] = now
        if exchange.awaits:
            self.wake_at = max(self._deadline(j) for j in exchange.awaits)

    def _deadline(self, neighbor: int) -> float:
        assert self.deadlines is not None
        return self._opened_at + self.deadlines.after_s(neighbor)

    def _advance_while_complete(self, now: float, outcome: Outcome) -> None:
        skipped: list[int] = []
        while self._exchange is not None:
            exchange = self._exchange
            if exchange.phase == _HOLD_PHASE and self.unheard_reports:
                return
            absent = self._absent(exchange)
            if absent and not self._may_go_on_without(absent, now):
                return
            inbox: dict[int, Message] = {}
            for j in sorted(exchange.awaits):
                message = self._inbox.pop((self.round, exchange.phase, j), None)
                if message is None and j in self._lost:
                    continue
                if message is None:
                    if (self.round, j) in absent:
                        self._missed.add((self.round, j))
                    self._skips_in_a_row[j] = self._skips_in_a_row.get(j, 0) + 1
                    skipped.append(j)
                    continue
                self._skips_in_a_row.pop(j, None)
                if message.kind is not MessageKind.NOTHING:
                    inbox[j] = message
            if self._boundary is None:
                self._applied += [(self.round, sender) for sender in inbox]
            following = self._following(inbox)
            if following is not None:
                self._open(following, now, outcome)
                continue
            self._exchange, self.wake_at, self._is_joining = None, None, False
            if all(round_ != self.round for round_, _ in self._missed):
                self._began_at.pop(self.round, None)
            outcome.finished, outcome.skipped = self.round, tuple(skipped)
            self.round += 1

    def _following(self, inbox: Mapping[int, Message]) -> Exchange | None:
        """Return the next exchange of the round: the algorithm's own ones come first."""
        if self._boundary is None:
            assert self._exchange is not None
            if self._exchange.phase != _HOLD_PHASE:
                following = self.algorithm.advance(inbox)
                if following is not None or self._views is None:
                    return following
            assert self._views is not None
            if self.unheard_reports:
                return Exchange({}, frozenset(), _HOLD_PHASE)
            if not self._views.membership.changes_at(self.round + 1):
                return None
            self._settled_model = self.algorithm.model().copy()
            self._boundary = Boundary(self.algorithm, self._views, self.round)
            following = self._boundary.begin()
        else:
            assert self._exchange is not None
            if self._exchange.phase == TRANSFER_PHASE:
                self._givers += inbox
            following = self._boundary.advance(inbox)
        if following is None:
            self._boundary = None
        return following

    def _absent(self, exchange: Exchange) -> set[tuple[int, int]]:
        """Return (round, sender) of awaited messages that have not come at all.

        The message of a sender that still owes an earlier round, or whose late message waits to be absorbed, is moved
        to the late box: a replica takes its differences in order, and late ones are applied between rounds.
        """
        absent = set()
        behind = {sender for _, sender in self._missed} | {message.sender for message in self._late_box}
        for j in exchange.awaits - self._lost:
            key = (self.round, exchange.phase, j)
            if j in behind and key in self._inbox:
                self._late_box.append(self._inbox.pop(key))
            elif key not in self._inbox and not self._in_late_box(j):
                absent.add((self.round, j))
        return absent

    def _in_late_box(self, sender: int) -> bool:
        return any(message.sender == sender and message.round == self.round for message in self._late_box)

    def _may_go_on_without(self, absent: set[tuple[int, int]], now: float) -> bool:
        if self.late is None:
            return False
        if any(self._skips_in_a_row.get(j, 0) >= self.late.max_skipped for _, j in absent):
            return False
        # Who owes an earlier round will not make it in time for this one: waiting would only slow everybody.
        behind = {sender for _, sender in self._missed}
        self.wake_at = max((self._deadline(j) for _, j in absent if j not in behind), default=now)
        return now >= self.wake_at
