"""One peer of a run, without clock, socket or disk: local step, algorithm, session and wire put together.

The daemon drives it over gRPC and a state folder, the simulator on a virtual clock; because both drive this same
object, their trajectories are equal bit for bit. The order of calls for a round is `ready` (and to wait for as long as
it says), `step`, `begin`, then `receive` for every frame and `timer` when `wake_at` has passed, until a turn carries a
`finished` round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from peer import wire
from peer.compress import Compressor
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.errors import ConfigError, RemoteProtocolError, SecurityError, StateError
from peer.gossip.base import Algorithm, Digests, Metrics
from peer.gossip.boundary import TRANSFER_PHASE, partners
from peer.gossip.budget import BandwidthBudget
from peer.gossip.membership import Change, ChangeKind, Newcomer, members_after
from peer.gossip.replicas import ReplicaAlgorithm
from peer.gossip.session import LatePolicy, Outcome, Session
from peer.gossip.views import ViewSchedule
from peer.node import membership_codec
from peer.round_record import RoundRecord
from peer.wire.last_codes import LastCodes
from peer.wire.message import Message, MessageKind, RepairWish

ENTROPY_EVERY = 50
"""The entropy bound is taken of every so many rounds: it costs more than the encoding."""


class StepResult(Protocol):
    """What the local step of one round returns."""

    @property
    def gradient(self) -> FloatArray: ...
    @property
    def loss(self) -> float: ...
    @property
    def samples(self) -> int: ...


class LocalSteps(Protocol):
    """The training side of a peer (`train.local_step.Trainer`, or rows of a stacked one)."""

    def rate(self, t: int) -> float: ...
    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> StepResult: ...
    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None: ...
    @property
    def needs_displacement(self) -> bool: ...
    def state(self) -> Mapping[str, npt.NDArray[Any]]: ...
    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None: ...


@dataclass(frozen=True)
class Parcel:
    """A frame on its way to one neighbour."""

    receiver: int
    frame: bytes
    payload_bytes: int
    sequenced: bool
    """Round messages are numbered and kept until acknowledged; requests and repairs are asked for again instead."""
    values: int = 0
    """Parameters that the message describes."""
    entropy_bits: float = 0.0
    """Lower bound of the payload, in the rounds in which it is taken."""


@dataclass(kw_only=True)
class Turn:
    """What one call asks the driver to do: send the parcels, then take note of a finished round."""

    parcels: list[Parcel] = field(default_factory=list)
    finished: RoundRecord | None = None
    news: Change | None = None
    """A change of members that was not known before: there may be other neighbours now, and for one that is lost
    `Participant.lose` has to be called."""


class Participant:
    """One peer. All methods are synchronous and must be called from one thread at a time."""

    def __init__(
        self,
        *,
        peer: int,
        algorithm: Algorithm,
        local_steps: LocalSteps,
        layout: Layout,
        max_lead: int,
        late: LatePolicy | None = None,
        budget: BandwidthBudget | None = None,
        variants: Sequence[Compressor] = (),
        why_no_changes: str | None = None,
        check_members: Callable[[tuple[int, ...]], None] = lambda members: None,
        num_listed: int | None = None,
        check_newcomer: Callable[[int, Newcomer], None] = lambda peer, newcomer: None,
        last_codes: LastCodes | None = None,
        observe: Callable[[str, int, int, bytes], None] | None = None,
        cpu_clock: Callable[[], float] = time.process_time,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`why_no_changes`: a sentence where members cannot change in this run; otherwise the schedule of the algorithm
        is a `ViewSchedule`. `check_members` raises ConfigError for members between whom the run cannot go on.
        `num_listed`: how many peers everybody lists; by default all that the schedule knows. Any other is a newcomer,
        of whom `check_newcomer(peer, newcomer)` raises ConfigError or SecurityError unless it is that peer. It must say
        the same whenever it is asked: a replay asks again.
        `observe(what, round, other, frame)` is told of every frame "sent" and "applied"; where members change, also of
        what one "gave" and "took", and of what "returned" from a lost peer, which is applied before the next round
        begins (for tests of mass).
        `budget` chooses among `variants`, the compressor and what it can be turned down to. `last_codes`: what modulo
        codes are told against, if they may be.
        The two clocks only fill the record of times; nothing that is computed depends on them."""
        self.peer = peer
        self.algorithm = algorithm
        self.local_steps = local_steps
        self.layout = layout
        node = algorithm.node
        self._views = node.schedule if isinstance(node.schedule, ViewSchedule) and why_no_changes is None else None
        self._why_no_changes, self._check_members = why_no_changes, check_members
        self._num_listed = node.schedule.num_peers if num_listed is None else num_listed
        self._check_newcomer = check_newcomer
        self._lead = max_lead
        self.session = Session(
            algorithm,
            in_neighbors=node.schedule.all_senders(peer),
            max_lead=max_lead,
            late=late,
            views=self._views,
        )
        self.budget, self._variants = budget, tuple(variants)
        self._last_codes = last_codes
        self._observe = observe
        self._cpu_clock, self._stopwatch = cpu_clock, stopwatch
        self._health_every = 1 if layout.size <= 100_000 else 10
        self._rate = 0.0
        self._step: StepResult | None = None
        self._z_before: FloatArray | None = None
        self._account = _Account()
        self._cpu_mark = cpu_clock()
        self._sent_at: float | None = None
        self._frames: dict[tuple[object, ...], tuple[bytes, int, float]] = {}
        self._claims: dict[int, tuple[int, Digests]] = {}
        """Neighbour → (round, digests) of what it says that the copy of it here should be."""
        self._asked_whole: set[int] = set()
        self._replica_repairs = 0

    @property
    def last_codes_bytes(self) -> int:
        """Memory for what codes are told against, own and heard."""
        return 0 if self._last_codes is None else self._last_codes.nbytes

    @property
    def round(self) -> int:
        """The round under way, or the next one: rounds completed."""
        return self.session.round

    def model(self) -> FloatArray:
        """Return z: float32[n]. Not to be written to, and valid until the next call that changes the model."""
        return self.algorithm.model()

    def ready(self, now: float) -> float:
        """Choose how much the coming round sends and return the earliest time at which it may start.

        Without a budget that is now, and there is no need to call this. Where the round may have to be repeated, the
        variant that was chosen has to be on disk before anything is sent, for `use_variant`.
        """
        if self.budget is None:
            return now
        begin_at = self.budget.ready(self.session.round, now)
        if self.algorithm.node.compressor is not (chosen := self._variants[self.budget.variant]):
            self.algorithm.use_compressor(chosen)
        return begin_at

    def use_variant(self, variant: int) -> None:
        """Let the coming round use a variant of the compressor that it used before: it is repeated after a crash.
        Raises StateError if there is none of that number."""
        if self.budget is None or not 0 <= variant < len(self._variants):
            raise StateError(f"the journal names variant {variant} of the compressor, which there is not")
        self.budget.variant = variant
        if self.algorithm.node.compressor is not (chosen := self._variants[variant]):
            self.algorithm.use_compressor(chosen)

    def impose(self, frame: bytes) -> None:
        """Let the coming round send what it sent before a crash, of which `frame` is one: for a device whose arithmetic
        is not repeatable. What is kept of the message then is what the others received."""
        before = None if self._last_codes is None else self._last_codes.own
        message = wire.decode(frame, self.layout, dtype=self.algorithm.x.dtype, previous=before)
        if message.kind is MessageKind.GOSSIP:
            self.algorithm.node.imposed[message.round] = message.layers

    def step(self) -> None:
        """Do the local step of the coming round (the expensive part: call it off the event loop)."""
        started = self._stopwatch()
        self._absorb()
        t, node = self.session.round, self.algorithm.node
        z = self.algorithm.model()
        if self.local_steps.needs_displacement:
            self._z_before = z.copy() if z is self.algorithm.x else z
        if self.algorithm.wants_gradient(t):
            self._rate = self.local_steps.rate(t)
            u, guard = self.algorithm.u, node.push_weight_guard
            scale = min(1.0, u / guard) if guard else 1.0
            self._step = self.local_steps.gradient(z, t, self._rate, self._rate * scale / u)
        else:
            self._rate, self._step = 0.0, None
        self._account.train_s += self._stopwatch() - started

    def begin(self, now: float, left_out: frozenset[int] = frozenset()) -> Turn:
        """Start the exchange of the round with the result of `step`. `left_out`: receivers that get no weight."""
        started = self._stopwatch()
        gradient = np.zeros_like(self.algorithm.x) if self._step is None else self._step.gradient
        outcome = self.session.begin(gradient, self._rate, now, left_out)
        turn = self._perform(outcome, now)
        self._account.gossip_s += self._stopwatch() - started
        self._sent_at = now
        return turn

    def receive(self, sender: int, frame: bytes, now: float) -> Turn:
        """Take a frame from a neighbour. Raises RemoteProtocolError, which names the sender: drop the frame."""
        if membership_codec.is_notice(frame):
            change = membership_codec.decode(frame, self.algorithm.node.schedule.num_peers, sender=sender)
            self._check_notice(change, sender)
            return self.learn(change, now, source=sender)
        return self.take(self.decode(sender, frame), now)

    def decode(self, sender: int, frame: bytes, *, before: Message | None = None) -> Message:
        """Return the message in a frame from a neighbour, the next of its stream; nothing changes. `before`: the last
        one, where that was not taken yet. Raises RemoteProtocolError, which names the sender."""
        started = self._stopwatch()
        if before is None and self._last_codes is not None:
            before = self._last_codes.of(sender)
        try:
            message = wire.decode(frame, self.layout, dtype=self.algorithm.x.dtype, previous=before)
        except RemoteProtocolError as error:
            raise type(error)(error.problem, peer=sender) from None
        if message.sender != sender:
            raise RemoteProtocolError(f"sent a frame in the name of peer {message.sender}", peer=sender)
        self._account.gossip_s += self._stopwatch() - started
        return message

    def take(self, message: Message, now: float) -> Turn:
        """Take a message that `decode` returned. Raises RemoteProtocolError, which names the sender."""
        started = self._stopwatch()
        outcome = self.session.receive(message, now)
        if self._last_codes is not None and not outcome.duplicates:
            self._last_codes.hear(message)
        if message.kind is MessageKind.REPAIR:
            self._asked_whole.discard(message.sender)
        turn = self._perform(outcome, now)
        self._account.gossip_s += self._stopwatch() - started
        return turn

    def timer(self, now: float) -> Turn:
        """Go on without late neighbours if `wake_at` has passed."""
        return self._perform(self.session.timer(now), now)

    @property
    def wake_at(self) -> float | None:
        """When `timer` should be called."""
        return self.session.wake_at

    def requests_to(self, receiver: int) -> list[Parcel]:
        """Return open requests to a neighbour that has come back, to be sent again."""
        return [self._parcel(receiver, message) for message in self.session.open_requests(receiver)]

    def own_digests(self) -> tuple[int, Digests] | None:
        """Return (round, digest of each layer) of the last check of what the others keep of this peer: to be told to
        them after the round, for `heard_digests`. None where nobody keeps anything."""
        return self.algorithm.own_digests()

    def keepers(self) -> tuple[int, ...]:
        """Return who keeps a copy of this peer now, ascending."""
        return self.algorithm.replicas.receivers if isinstance(self.algorithm, ReplicaAlgorithm) else ()

    def _copied(self) -> tuple[int, ...]:
        return self.algorithm.replicas.senders if isinstance(self.algorithm, ReplicaAlgorithm) else ()

    def heard_digests(self, sender: int, round_: int, digests: Digests) -> None:
        """Take note of what a neighbour's copy should be after its message of a round."""
        self._claims[sender] = (round_, digests)

    @property
    def has_heard_digests(self) -> bool:
        """Whether `disagreements` has anything to compare."""
        return bool(self._claims)

    def disagreements(self) -> tuple[list[Parcel], list[str]]:
        """Compare the copies with what was heard of them; return requests for the layers that differ, and a sentence
        on each neighbour concerned. A request that is lost is made again after the next check."""
        parcels, sentences = [], []
        for sender, (round_, digests) in list(self._claims.items()):
            if self._views is not None and sender not in self._copied():
                del self._claims[sender]  # The edge between us is gone, or not there yet.
                continue
            try:
                layers = self.algorithm.compare_replica(sender, round_, digests)
            except RemoteProtocolError as error:
                del self._claims[sender]
                sentences.append(str(error))
                continue
            if layers is None:
                continue
            del self._claims[sender]
            if not layers:
                continue
            self._replica_repairs += len(layers)
            self._asked_whole.add(sender)
            wishes = tuple(RepairWish(layer, 0, 0) for layer in layers)
            request = Message(MessageKind.REPAIR_REQUEST, self.peer, round_, wanted=wishes)
            parcels.append(self._parcel(sender, request))
            names = ", ".join(self.layout.names[layer] for layer in layers[:3]) + (", …" if len(layers) > 3 else "")
            sentences.append(
                f"the copy of peer {sender} differed from its own after round {round_} in {len(layers)} of "
                f"{self.layout.num_layers} layers ({names}); they are asked for"
            )
        self._frames.clear()
        return parcels, sentences

    def expects(self, repair: Message) -> bool:
        """Whether a repair is one that was asked for."""
        return repair.sender in self.session.waiting_for or repair.sender in self._asked_whole

    # Members that come and go.

    @property
    def is_member(self) -> bool:
        """Whether this peer takes part in the coming round, or the one under way."""
        if self._views is None or self.session.in_round:
            return True
        return self.peer in self._views.membership.members(self.round)

    @property
    def is_outsider(self) -> bool:
        """Whether it never was a member, and has not heard yet that it becomes one."""
        return self._views is not None and not self._views.membership.was_ever(self.peer)

    @property
    def has_left(self) -> bool:
        """Whether this peer was a member and has handed over what it had."""
        return not self.is_member and self.round > 0

    def is_gone(self, peer: int) -> bool:
        """Whether another peer was a member and left, or is lost."""
        if self._views is None or peer in self._views.membership.members(self.round):
            return False
        ended = (change for change in self.changes if change.kind is not ChangeKind.JOIN)
        return any(change.subject == peer and change.effective <= self.round for change in ended)

    @property
    def members(self) -> tuple[int, ...] | None:
        """Who takes part in the coming round, or the one under way; None where members cannot change."""
        return None if self._views is None else self._views.membership.members(self.round)

    @property
    def changes(self) -> tuple[Change, ...]:
        """All changes of the members that are known, past ones too."""
        return () if self._views is None else self._views.membership.changes

    @property
    def newcomers(self) -> Mapping[int, Newcomer]:
        """Who joined, or is about to, without being in everybody's list."""
        return {} if self._views is None else self._views.membership.newcomers

    @property
    def coming_changes(self) -> tuple[Change, ...]:
        """What is known to change after the coming round, or the one under way."""
        return () if self._views is None else self._views.membership.applied_after(self.round)

    def partners(self) -> tuple[set[int], set[int]]:
        """Return (whom this peer hears, who hears it), now and with the members to come as far as they are known."""
        schedule, me = self.algorithm.node.schedule, self.peer
        if self._views is None:
            return set(schedule.all_senders(me)), set(schedule.all_receivers(me))
        views, senders, receivers = self._views, set[int](), set[int]()
        for t in (self.round, *(change.effective for change in self.coming_changes)):
            senders |= set(views.senders_from(t, me))
            receivers |= set(views.receivers_from(t, me))
            others = partners(views, t - 1, me, self.algorithm.spec) if t > self.round else set()
            senders, receivers = senders | others, receivers | others
        return senders - self.session.lost, receivers - self.session.lost

    def _check_notice(self, change: Change, sender: int) -> None:
        """Raise RemoteProtocolError unless `sender` may tell of a change, and the newcomer in it is who it is said to
        be."""
        if self._views is None:
            return
        membership, is_join = self._views.membership, change.kind is ChangeKind.JOIN
        # Whoever joins hears of its sponsor's own joining among the rest.
        takes_part = membership.was_ever(self.peer)
        if takes_part and not membership.was_ever(sender) and not (is_join and change.subject == sender):
            raise RemoteProtocolError("is no member yet and told of a change of others", peer=sender)
        if is_join and (change.newcomer is None) != (change.subject < self._num_listed):
            who = "nobody knows" if change.newcomer is None else "everybody lists"
            raise RemoteProtocolError(f"told that peer {change.subject} joins, whom {who}", peer=sender)
        if change.newcomer is not None:
            try:
                self._check_newcomer(change.subject, change.newcomer)
            except (ConfigError, SecurityError) as error:
                raise RemoteProtocolError(f"told that peer {change.subject} joins: {error}", peer=sender) from None

    def plan(self, kind: ChangeKind, subject: int, newcomer: Newcomer | None = None) -> Change:
        """Return a change that this peer can announce (`learn`): it counts from a round before which every member will
        have heard of it. Raises ConfigError, with the reason, if the members cannot change like that. `newcomer` tells
        who joins, where not everybody lists it.

        Whoever is at distance d of this peer can complete its round r + d only with a message that follows the
        announcement, since frames come in order; and nobody is further ahead or behind than `max_lead` rounds. Three
        times that leaves room for the graph with a lost peer missing, and for neighbours that are new to each other;
        with a change under way, `max_lead` is that of the sparser graph.
        """
        key = "algorithm.name" if self._why_no_changes else None
        if self._views is None:
            raise ConfigError(self._why_no_changes or "the members of this run cannot change", key=key)
        membership = self._views.membership
        # Without a lost peer nothing may hold the others together until the graph without it counts.
        until = max((each.effective for each in self.coming_changes if each.kind is ChangeKind.LOST), default=0)
        effective = max(self.round, until) + 3 * self._longest_lead() + 3
        rounds = self.algorithm.node.rounds
        if effective >= rounds:
            raise ConfigError(
                f"the run ends after round {rounds - 1}, before everybody could know (round {effective}); "
                "let it end, or stop this peer"
            )
        now, later = membership.members(self.round), membership.coming(self.round)[-1]
        planned = members_after(later, kind, subject)
        if kind is ChangeKind.LOST and subject in now and subject not in later:
            planned = later  # It was about to leave.
        if planned is None or any(change.subject == subject for change in self.coming_changes if planned != later):
            state = "about to change already" if subject in {*now, *later} else "no member"
            raise ConfigError(f"peer {subject} is {'a member' if kind is ChangeKind.JOIN else state}")
        if kind is ChangeKind.JOIN and any(change.subject == subject for change in self.changes):
            raise ConfigError(f"peer {subject} was a member before; whoever left or was lost cannot come back")
        if kind is ChangeKind.LEAVE and any(
            change.kind is ChangeKind.JOIN and change.issuer == subject for change in self.coming_changes
        ):
            raise ConfigError(f"peer {subject} sponsors a peer that joins; let it leave after that")
        if kind is ChangeKind.JOIN and self.peer not in later:
            raise ConfigError("this peer is about to leave and sponsors nobody; ask another one")
        self._check_members(planned)
        heard = self.session.last_heard(subject) if kind is ChangeKind.LOST else 0
        if heard is None:
            raise ConfigError(
                f"this peer hears nothing of peer {subject} and cannot tell where it was lost; ask one of those that do"
            )
        return Change(kind, subject, self.peer, effective, heard, newcomer)

    def _longest_lead(self) -> int:
        """Return how many rounds a peer can be ahead of another, with the members of now and of later."""
        assert self._views is not None
        coming = self._views.membership.coming(self.round)
        return max(self._lead, *(self._views.lead(members) for members in coming))

    def _allow_for_changes(self) -> None:
        """Hear neighbours as far ahead as they can be while members change: notices travel with the frames."""
        self.session.max_lead = 4 * self._longest_lead() + 4

    def learn(self, change: Change, now: float, source: int | None = None) -> Turn:
        """Take note of a change of the members and pass it on; `source` told it, None stands for this peer's own.

        Raises RemoteProtocolError if it cannot be, and StateError if it comes too late to be heeded.
        """
        if self._views is None:
            raise RemoteProtocolError(f"announced a change of members: {self._why_no_changes}", peer=source)
        membership, t = self._views.membership, self.round
        if change in membership.changes:
            return Turn()
        if change.kind is ChangeKind.LOST and change.subject == self.peer:
            raise StateError(
                f"peer {change.issuer} declared this peer lost: what it has is no part of the run any more; delete its "
                "state folder"
            )
        takes_part = self.peer in membership.members(t)
        joins = change.kind is ChangeKind.JOIN and change.subject == self.peer and not takes_part
        members, (senders, receivers) = membership.members(t + 1), self.partners()
        told_before = senders | receivers
        membership.add(change)
        if takes_part and membership.members(t + 1) != members and change.effective <= t + 1:
            raise StateError(
                f"heard in round {t} of a change of members that counts from round {change.effective}: the others do "
                "not count on what it did since; delete its state folder"
            )
        # A second sponsor that knew nothing of the first counts only where it is earlier.
        joins = joins and change in membership.changes_at(change.effective)
        self._allow_for_changes()
        # What others say of a loss that is known changes no links.
        turn = Turn(news=None if change.subject in self.session.lost else change)
        senders, receivers = self.partners()
        hears_it = (senders | receivers) - {change.subject}
        turn.parcels = [self._notice(other, change) for other in sorted(hears_it - {source})]
        # Who has only now become a neighbour to be was told nothing so far.
        for other in sorted(hears_it - told_before - {source}):
            earlier = [each for each in membership.changes if each.effective > t and each != change]
            turn.parcels += [self._notice(other, each) for each in earlier if each.subject != other]
        for own in self._reports(change.effective if joins else t) if membership.was_ever(self.peer) else ():
            membership.add(own)
            turn.parcels += [self._notice(other, own) for other in sorted(hears_it - {own.subject})]
        if change.kind is ChangeKind.JOIN and change.issuer == self.peer:
            turn.parcels += self._introduction(change)
        if change.kind is ChangeKind.LOST and takes_part:
            # Its sponsor may be lost before the new peer has heard a word of it.
            for join in membership.applied_after(t):
                if join.kind is ChangeKind.JOIN and join.issuer == change.subject and join.subject != self.peer:
                    turn.parcels += self._introduction(join)
        if joins:
            outcome = self.session.join(change.effective, now)
            following = self._perform(outcome, now)
            turn.parcels += following.parcels
            turn.finished = following.finished
        elif self.session.in_round:
            following = self._perform(self.session.go_on(now), now)
            turn.parcels += following.parcels
            turn.finished = following.finished
        return turn

    def _introduction(self, join: Change) -> list[Parcel]:
        """Return what a peer that joins is told, which knows of nothing: of itself last, since with that it begins."""
        history = [each for each in self.changes if each != join]
        return [self._notice(join.subject, each) for each in (*history, join)]

    def _reports(self, t: int) -> list[Change]:
        """Return what this peer has to say itself of peers that are lost, and in the graph of round t still, for all to
        know what those had: nothing where it has said so."""
        assert self._views is not None
        members = self._views.membership.members(t)
        losses = {change.subject: change for change in reversed(self.changes) if change.kind is ChangeKind.LOST}
        said = {
            change.subject for change in self.changes if (change.kind, change.issuer) == (ChangeKind.LOST, self.peer)
        }
        return [
            replace(loss, issuer=self.peer, heard_round=self.session.last_heard(subject) or 0)
            for subject, loss in sorted(losses.items())
            if subject in members and subject not in said
        ]

    def lose(self, peer: int, unreceived: Sequence[bytes], now: float) -> Turn:
        """Go on without a peer of whose loss `learn` took note; `unreceived` are the own frames that it has not for
        good. Of those, what it has used in a round that others have heard of is gone all the same."""
        frames = [frame for frame in unreceived if not membership_codec.is_notice(frame)]
        if not self.algorithm.spec.push_sum:
            frames = []  # Nothing is given, and nothing comes back.
        messages = [wire.decode(frame, self.layout, dtype=self.algorithm.x.dtype) for frame in frames]
        return self._perform(self.session.lose(peer, messages, now), now)

    def _absorb(self) -> None:
        """Apply what had come late, and what comes back from a lost peer."""
        self.session.absorb_late()
        for peer, message in self.session.take_returned():
            if self._observe is not None:
                self._tell("returned", message.round, peer, wire.encode(message, self.layout))

    @property
    def to_lose(self) -> tuple[int, ...]:
        """Lost peers for which `lose` was not called yet, ascending."""
        if self._views is None:
            return ()
        lost = {change.subject for change in self.changes if change.kind is ChangeKind.LOST}
        return tuple(sorted(lost - self.session.lost))

    def _notice(self, receiver: int, change: Change) -> Parcel:
        frame = membership_codec.encode(change)
        self._account.messages += 1
        self._account.frame_bytes += len(frame)
        return Parcel(receiver, frame, 0, sequenced=True)

    def state(self) -> tuple[dict[str, object], dict[str, npt.NDArray[Any]]]:
        """Return (JSON values, arrays): everything the next rounds depend on. Between rounds only."""
        self._absorb()
        arrays = {f"algorithm/{name}": value for name, value in self.algorithm.state().items()}
        arrays |= {f"buffer/{name}": value for name, value in self.algorithm.transport_state().items()}
        arrays |= {f"training/{name}": value for name, value in self.local_steps.state().items()}
        if self.budget is not None:
            arrays |= {f"budget/{name}": value for name, value in self.budget.state().items()}
        if self._last_codes is not None:
            arrays |= {f"codes/{name}": value for name, value in self._last_codes.state(self.round).items()}
        state = {"session": self.session.state(), "layout": self.layout.digest, "repairs": self._replica_repairs}
        if self._views is not None and not self._views.membership.is_settled:
            state["members"] = self._views.membership.state()
        return state, arrays

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take back what `state` returned. Raises StateError if it belongs to another model or algorithm."""
        if state.get("layout") != self.layout.digest:
            raise StateError("the checkpoint holds a model of another shape; use a new state folder")
        try:
            if self.budget is not None:
                self.budget.restore(_part(arrays, "budget/"))
                self.algorithm.use_compressor(self._variants[self.budget.variant])
            self._restore_members(state)
            self.algorithm.restore(_part(arrays, "algorithm/"))
            self.algorithm.restore_transport(_part(arrays, "buffer/"))
            self.local_steps.restore(_part(arrays, "training/"))
            self._replica_repairs = int(state.get("repairs", 0))
            if self._last_codes is not None:
                self._last_codes.restore(_part(arrays, "codes/"))
        except (KeyError, TypeError, ValueError, RemoteProtocolError) as error:
            raise StateError(f"the checkpoint does not fit this configuration: {error}") from None

    def _restore_members(self, state: Mapping[str, Any]) -> None:
        """Go back to the round of a state, with its members and the edges between them."""
        changes = state.get("members", [])
        if changes and self._views is None:
            raise StateError(f"the members changed in the run of this checkpoint: {self._why_no_changes}")
        if self._views is not None:
            self._views.membership.restore(changes)
        self.session.restore(state["session"])
        if self._views is not None and changes:
            self._allow_for_changes()
            self._views.enter(self.round)
            if isinstance(self.algorithm, ReplicaAlgorithm):
                senders, receivers = self._views.all_senders(self.peer), self._views.all_receivers(self.peer)
                self.algorithm.replicas.change_edges(senders, receivers, self.round)

    def _perform(self, outcome: Outcome, now: float) -> Turn:
        turn = Turn(parcels=[self._parcel(receiver, message) for receiver, message in outcome.sends])
        self._frames.clear()
        if self._last_codes is not None:
            told = {receiver: message for receiver, message in outcome.sends if message.kind is MessageKind.GOSSIP}
            if told:
                self._last_codes.tell(next(iter(told.values())), told)
        if outcome.finished is not None:
            turn.finished = self._finish(outcome, now)
        return turn

    def _parcel(self, receiver: int, message: Message) -> Parcel:
        before = None if self._last_codes is None else self._last_codes.told(message, receiver)
        # Receivers that get the same payload with the same weight get the same bytes: encoded once.
        key = (id(message.layers), message.kind, message.round, message.phase, message.mixing_weight, before is None)
        encoded = self._frames.get(key) if message.layers else None
        if encoded is None:
            frame = wire.encode(message, self.layout, previous=before)
            bound = 0.0
            if message.round % ENTROPY_EVERY == 0:
                bound = wire.entropy_bound_bits(message, previous=before)
            encoded = frame, wire.payload_bytes(frame, self.layout), bound
            if message.layers:
                self._frames[key] = encoded
        frame, payload_bytes, entropy_bits = encoded
        if self.budget is not None:
            self.budget.sent(receiver, len(frame))
        self._account.messages += 1
        self._account.payload_bytes += payload_bytes
        self._account.frame_bytes += len(frame)
        values = _num_values(message, self.layout)
        self._account.values += values
        if message.kind is MessageKind.GOSSIP and message.phase <= TRANSFER_PHASE:
            self._tell("gave" if message.phase == TRANSFER_PHASE else "sent", message.round, receiver, frame)
        self._account.entropy_bits += entropy_bits
        sequenced = message.kind in (MessageKind.GOSSIP, MessageKind.NOTHING)
        return Parcel(receiver, frame, payload_bytes, sequenced, values, entropy_bits)

    def _tell(self, what: str, round_: int, other: int, frame: bytes = b"") -> None:
        if self._observe is not None:
            self._observe(what, round_, other, frame)

    def _finish(self, outcome: Outcome, now: float) -> RoundRecord:
        assert outcome.finished is not None
        # What others hand over at the end of the round is no displacement of this peer's.
        settled = self.session.take_settled_model()
        if self._z_before is not None:
            z = self.algorithm.model() if settled is None else settled
            self.local_steps.after_round(self._z_before, z, self._rate)
            self._z_before = None
        for round_, sender in self.session.take_applied():
            self._tell("applied", round_, sender)
        for giver in self.session.take_givers():
            self._tell("took", outcome.finished, giver)
        if self._last_codes is not None:
            self._last_codes.forget_before(self.round)
            if self._views is not None and self._views.membership.changes_at(self.round):
                self._last_codes.keep_only(self._views.all_senders(self.peer), self.round)
        account, cpu = self._account, self._cpu_clock()
        # The norms cost a pass over the model each: with a large one they are taken now and then.
        health = self.algorithm.metrics() if outcome.finished % self._health_every == 0 else Metrics(self.algorithm.u)
        used = self.algorithm.node.compressor
        record = RoundRecord(
            peer=self.peer,
            round=outcome.finished,
            time_s=now,
            loss=None if self._step is None else self._step.loss,
            rate=self._rate,
            messages=account.messages,
            values=account.values,
            payload_bytes=account.payload_bytes,
            frame_bytes=account.frame_bytes,
            entropy_bits=account.entropy_bits,
            train_s=account.train_s,
            gossip_s=account.gossip_s,
            wait_s=now - self._sent_at if self._sent_at is not None else 0.0,
            cpu_s=cpu - self._cpu_mark,
            late=len(outcome.skipped),
            push_weight=health.push_weight,
            error_norm=health.error_norm,
            replica_error=health.replica_error,
            neighbor_distance=health.neighbor_distance,
            repairs=health.repairs + self._replica_repairs,
            theta=health.theta,
            fraction=getattr(used, "fraction", None),
            bits=getattr(used, "bits", None),
        )
        self._step, self._account, self._cpu_mark = None, _Account(), cpu
        return record


@dataclass
class _Account:
    """Running figures of the round under way."""

    messages: int = 0
    values: int = 0
    payload_bytes: int = 0
    frame_bytes: int = 0
    entropy_bits: float = 0.0
    train_s: float = 0.0
    gossip_s: float = 0.0


def _num_values(message: Message, layout: Layout) -> int:
    if message.layer_ids is None:
        return layout.size if message.layers else 0
    return sum(layout.sizes[layer] for layer in message.layer_ids)


def _part(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
