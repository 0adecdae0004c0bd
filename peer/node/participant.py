"""One peer of a run, without clock, socket or disk: local step, algorithm, session and wire put together.

The daemon drives it over gRPC and a state folder, the simulator on a virtual clock; because both drive this same
object, their trajectories are equal bit for bit. The order of calls for a round is `ready` (and to wait for as long as
it says), `step`, `begin`, then `receive` for every frame and `timer` when the last `wake_at` has passed, until effects
carry the `record` of a finished round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from peer import wire
from peer.compress.base import Compressor
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.errors import StateError
from peer.gossip.base import Algorithm, Metrics
from peer.gossip.boundary import TRANSFER_PHASE, levels
from peer.gossip.budget import BandwidthBudget
from peer.gossip.effects import Effects, OutgoingFrame, Send
from peer.gossip.judge import Judge
from peer.gossip.late_neighbors import LatePolicy
from peer.gossip.membership import Change
from peer.gossip.mixing import debiased_step_rate
from peer.gossip.session import Session
from peer.gossip.session_state import SessionState
from peer.gossip.value_bounds import excess
from peer.node import membership_codec
from peer.node.blame import blaming
from peer.node.checkpoint_arrays import Arrays, Group, group, grouped, refusing_what_does_not_fit
from peer.node.divergence_guard import require_finite_loss, require_finite_model, require_sendable
from peer.node.frame_account import Decode, FrameAccount, decode_from
from peer.node.local_steps import LocalSteps, RecordedSteps, StepResult
from peer.node.membership import MembershipRules, PeerMembership, changing_views
from peer.node.membership_checks import check_notice, check_proof
from peer.node.membership_news import MembershipNews
from peer.node.replica_agreement import ReplicaAgreement
from peer.records import RoundRecord
from peer.state.journal import Stepped
from peer.wire.last_codes import LastCodes
from peer.wire.message import Message, MessageKind


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
        membership_rules: MembershipRules | None = None,
        late: LatePolicy | None = None,
        budget: BandwidthBudget | None = None,
        variants: Sequence[Compressor] = (),
        last_codes: LastCodes | None = None,
        observe: Callable[[str, int, int, bytes], None] | None = None,
        decode: Decode = decode_from,
        cpu_clock: Callable[[], float] = time.process_time,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`membership_rules`: rules of changes of the members; by default, any of those that the schedule knows may
        come and go. `observe(what, round, other, frame)` is called for every frame "sent" and "applied"; where members
        change, also for mass that one "gave" and "took", and that "returned" from a lost peer, which is applied before
        the next round begins (for tests of mass). `budget` chooses among `variants`, the compressor and its smaller
        variants. `last_codes`: the reference codes, where modulo codes may be coded against those of the round before.
        `decode` reads a frame of a neighbour. The two clocks only fill the record of times; no result depends on
        them."""
        self.peer = peer
        self.algorithm = algorithm
        self.local_steps = local_steps
        self.layout = layout
        rules = MembershipRules() if membership_rules is None else membership_rules
        views = changing_views(algorithm.node.schedule, rules.why_no_changes)
        self.session = Session(
            algorithm,
            in_neighbors=algorithm.node.schedule.all_senders(peer),
            max_lead=max_lead,
            late=late,
            views=views,
        )
        self.membership = PeerMembership(self.session, rules, max_lead=max_lead)
        self.membership_news = MembershipNews(self.membership)
        self.agreement = ReplicaAgreement(algorithm, members_change=views is not None)
        self.budget, self._variants = budget, tuple(variants)
        self.last_codes = last_codes
        self._judge = Judge(self.session, views, self._variants, 0 if late is None else late.max_skipped)
        self.reaches = self._judge.reaches
        self._views = views
        self._observe, self._decode = observe, decode
        self._account = FrameAccount(layout, packed=algorithm.node.packed, cpu_clock=cpu_clock, stopwatch=stopwatch)
        self._health_every = 1 if layout.size <= 100_000 else 10
        self._rate = 0.0
        self._step: StepResult | None = None
        self._loss: float | None = None
        self._z_before: FloatArray | None = None
        self._sent_at: float | None = None

    @property
    def round(self) -> int:
        """The round under way, or the next one: rounds completed."""
        return self.session.round

    def model(self) -> FloatArray:
        """Return z: float32[n]. Not to be written to, and valid until the next call that changes the model."""
        return self.algorithm.model()

    def unchanged(self) -> Effects:
        """Return the effects of a call that changes nothing: the timer stays where it is."""
        return self.session.unchanged()

    # Before a round.

    def ready(self, now: float) -> float:
        """Choose the size of the coming round's messages and return the earliest time at which it may start.

        Without a budget that is now, and there is no need to call this. If the round may have to be repeated, the
        chosen variant has to be on disk before anything is sent, for `use_variant`.
        """
        if self.budget is None:
            return now
        begin_at = self.budget.ready(self.session.round, now)
        self.use_variant(self.budget.variant)
        return begin_at

    def use_variant(self, variant: int) -> None:
        """Make the coming round, which is repeated after a crash, use its former variant of the compressor. Raises
        StateError if there is none of that number."""
        if self.budget is None or not 0 <= variant < len(self._variants):
            raise StateError(f"the journal names variant {variant} of the compressor, which there is not")
        self.budget.variant = variant
        if self.algorithm.node.compressor is not self._variants[variant]:
            self.algorithm.use_compressor(self._variants[variant])

    def impose(self, receiver: int, frame: bytes) -> None:
        """Make the coming round send its frames from before a crash, of which `frame` is one: for a device whose
        arithmetic is not repeatable. The message kept here is then the one that the others received."""
        # The frame may have been coded against the message of the round before.
        before = None if self.last_codes is None else self.last_codes.own
        message = wire.decode(frame, self.layout, dtype=self.algorithm.x.dtype, previous=before)
        if message.kind is MessageKind.GOSSIP:
            self.algorithm.node.imposed[message.round] = message.layers
        elif message.kind is MessageKind.PART:
            self.algorithm.node.imposed_parts[message.round, message.phase, receiver] = message.layers

    # A round.

    def step(self) -> None:
        """Do the local step of the coming round (the expensive part: call it off the event loop)."""
        with self._account.training():
            # First: the gradient is to be that of the model with which the round begins.
            self.absorb_late()
            t, algorithm = self.session.round, self.algorithm
            z = algorithm.model()
            if self.local_steps.needs_displacement:
                # x itself is changed in place by the round; a z = x / u is a new array.
                self._z_before = z.copy() if z is algorithm.x else z
            if algorithm.wants_gradient(t):
                self._rate = self.local_steps.rate(t)
                z_step = debiased_step_rate(self._rate, algorithm.u, algorithm.node.push_weight_guard)
                self._step = self.local_steps.gradient(z, t, self._rate, z_step)
            else:
                self._rate, self._step = 0.0, None

    def recorded_step(self) -> tuple[Stepped, ...]:
        """Return the record of the local step that `step` did, if it is one that cannot be computed again."""
        if self._step is None or not isinstance(self.local_steps, RecordedSteps):
            return ()
        return (self.local_steps.recorded(self.session.round),)

    def begin(self, now: float, left_out: frozenset[int] = frozenset(), *, in_full_width: bool = False) -> Effects:
        """Start the exchange of the round with the result of `step`. `left_out`: receivers that get no weight.
        `in_full_width`: write its messages without entropy coding."""
        with self._account.gossiping():
            self._account.packed = in_full_width or self.algorithm.node.packed
            gradient = np.zeros_like(self.algorithm.x) if self._step is None else self._step.gradient
            self._loss, self._step, t = None if self._step is None else self._step.loss, None, self.session.round
            # Before anything is sent: a peer whose frames are refused cannot tell anybody why it ends.
            if self._loss is not None:
                self._loss = require_finite_loss(t, self._loss, is_misled=self.reaches.is_misled(t))
            own_norm = self._judge.own_norm() if t % self._health_every == 0 else 0.0
            changes = self._views is not None and self._views.membership.changes_at(t)
            # A newcomer had none before, and of one that was moved others have not heard.
            if changes or self.reaches.is_misled(t - 1) > self.reaches.is_misled(t):
                self.reaches.note_own(t, self._judge.own_norm())
            if self.reaches.is_misled(t):
                z_step = debiased_step_rate(self._rate, self.algorithm.u, self.algorithm.node.push_weight_guard)
                gradient = self.algorithm.shortened(t, gradient, z_step)
            effects = self.session.begin(gradient, self._rate, now, left_out)
            del gradient
            require_finite_model(t, self.algorithm.x)
            if not self.reaches.has_judged(t):
                sends = [*effects.sends, *self.algorithm.unsent().items()]
                different = {id(message.layers): (message, self._rate, receiver) for receiver, message in sends}
                # One for each round: so much of the room comes back.
                reach = max((self._judge.reach(*each) for each in different.values()), default=0.0)
                self.reaches.check_own(t, reach, self._judge.own_norm, {receiver for receiver, _ in effects.sends})
            # Behind the check: some algorithms send the model as it is now.
            self.reaches.note_own(t, own_norm)
            effects = self._perform(effects, now)
        self._sent_at = now
        return effects

    def receive(self, sender: int, frame: bytes, now: float) -> Effects:
        """Take a frame from a neighbour. Raises RemoteProtocolError, which names the sender: drop the frame."""
        return self.take(self.proven(sender, frame), now, source=sender)

    def judged(self, sender: int, frame: bytes) -> Message | Change:
        """Return the content of a neighbour's frame, if an honest one would send it now; nothing changes except how far
        messages are known to reach. `take` cannot fail on the result. Raises RemoteProtocolError, which names the
        sender."""
        if membership_codec.is_notice(frame):
            with blaming(sender):
                change = membership_codec.decode(frame, self.membership.num_numbers, sender=sender)
                check_notice(self.membership, change, sender)
                return change
        message = self.decode(sender, frame)
        self.judge(message)
        self.weigh(message)
        return message

    def proven(self, sender: int, frame: bytes) -> Message | Change:
        """Do as `judged` does, and refuse a change of members that its issuer did not sign. For frames that have just
        come, not for those of a replay."""
        content = self.judged(sender, frame)
        if isinstance(content, Change):
            with blaming(sender):
                check_proof(self.membership, content, sender)
        return content

    def judge(self, message: Message) -> None:
        """Raise RemoteProtocolError, which names the sender, if an honest peer would not send a message now."""
        with blaming(message.sender), self._account.gossiping():
            self._judge.judge(message)

    def weigh(self, message: Message) -> None:
        """Do what `judge` does for how far a message moves the model, and take note of that: it will be taken."""
        with blaming(message.sender), self._account.gossiping():
            self._judge.check_reach(message, self.local_steps.rate(message.round))

    def check_form(self, message: Message) -> None:
        """Raise RemoteProtocolError if no honest peer would send a message in any round. For messages that come too
        early to be judged."""
        with blaming(message.sender), self._account.gossiping():
            self._judge.check_form(message)

    def decode(self, sender: int, frame: bytes, *, before: Message | None = None) -> Message:
        """Return the message in a frame from a neighbour, the next of its stream; nothing changes. `before`: the last
        message, if it was not taken yet. Raises RemoteProtocolError, which names the sender."""
        with blaming(sender), self._account.gossiping():
            if before is None and self.last_codes is not None:
                before = self.last_codes.of(sender)
            return self._decode(sender, frame, self.layout, self.algorithm.x.dtype, previous=before)

    def take(self, message: Message | Change, now: float, source: int | None = None) -> Effects:
        """Take a result of `judged` from a neighbour, `source`."""
        if isinstance(message, Change):
            return self.learn(message, now, source=source)
        with self._account.gossiping():
            effects = self.session.receive(message, now)
            # A message that came twice was noted the first time; in the order of the stream it is not the newest.
            if self.last_codes is not None and not effects.duplicates:
                self.last_codes.hear(message)
            if message.kind is MessageKind.REPAIR:
                self.agreement.answered(message.sender)
            return self._perform(effects, now)

    def timer(self, now: float) -> Effects:
        """Go on without late neighbours if the last `wake_at` has passed."""
        return self._perform(self.session.timer(now), now)

    def absorb_late(self) -> None:
        """Apply late messages, and mass that comes back from a lost peer. Between rounds; `step` does so too."""
        self._observe_returned(self.session.absorb_late())

    # Requests of others and to others.

    def requests_to(self, receiver: int) -> list[OutgoingFrame]:
        """Return open requests to a neighbour that has come back, to be sent again."""
        return self._encode([Send(receiver, message) for message in self.session.open_requests(receiver)])

    def check_replicas(self) -> tuple[Effects, list[str]]:
        """Compare replicas with the digests that their neighbours gave; return requests for layers that differ, and a
        sentence on each neighbour concerned. Between rounds."""
        effects, (sends, sentences) = self.unchanged(), self.agreement.compare()
        effects.frames = self._encode(sends)
        return effects, sentences

    def is_for_all(self, message: Message) -> bool:
        """Whether all receivers of its sender are to get the same message."""
        spec = self.algorithm.spec
        if spec.tells_all is None:
            return False
        if message.phase == TRANSFER_PHASE:
            return self._views is not None and levels(self._views, message.round, spec)
        return message.phase == spec.tells_all and message.kind is self.algorithm.message_kind

    def expects(self, repair: Message) -> bool:
        """Whether a repair is one that was asked for."""
        return self.session.awaits_repair(repair) or self.agreement.has_asked(repair.sender, repair.layer_ids or ())

    # Members that come and go.

    def learn(self, change: Change, now: float, source: int | None = None) -> Effects:
        """Note a change of the members and pass it on; `source` told it, None stands for this peer's own.

        Changes that others tell were judged before.
        """
        effects = self.unchanged()
        learned = self.membership_news.learn(change, source)
        if learned is None:
            return effects
        effects.news = [*learned.news]
        # The notices before anything that follows from the change: a receiver of the last message of a round has to
        # know by then that the next one has other members.
        effects.frames = [
            self._account.notice(receiver, membership_codec.encode(each)) for receiver, each in learned.notices
        ]
        following = self.session.join(change.effective, now) if learned.joins else self.session.go_on(now)
        effects.extend(self._perform(following, now))
        return effects

    def lose(self, peer: int, unreceived: Sequence[bytes], now: float) -> Effects:
        """Go on without a peer whose loss `learn` noted; `unreceived` are the own frames that it does not have for
        good. The mass of those that it used in a round of which others have heard is nevertheless gone."""
        frames = [frame for frame in unreceived if not membership_codec.is_notice(frame)]
        # From the journaled bytes rather than from messages that were kept: after a restart there are no others.
        if not self.algorithm.spec.push_sum:
            frames = []  # Nothing is given, and nothing comes back.
        messages = [wire.decode(frame, self.layout, dtype=self.algorithm.x.dtype) for frame in frames]
        return self._perform(self.session.lose(peer, messages, now), now)

    # State.

    def to_checkpoint(self) -> tuple[dict[str, object], dict[str, Any]]:
        """Return everything that the next rounds depend on, as (JSON values, arrays). Between rounds only."""
        # Late messages are in no journal after this checkpoint: they belong to the state, not to the inbox.
        self.absorb_late()
        values: dict[str, object] = {
            "session": self.session.state().to_json(),
            "layout": self.layout.digest,
            "repairs": self.agreement.repairs,
        }
        if changes := self.membership.state():
            values["members"] = changes
        arrays = grouped(
            algorithm={**self.algorithm.state(), **self.reaches.state()},
            buffer=self.algorithm.transport_state(),
            training=self.local_steps.state(),
            budget={} if self.budget is None else self.budget.state(),
            codes={} if self.last_codes is None else self.last_codes.state(self.round),
        )
        return values, arrays

    def restore(self, values: Mapping[str, Any], arrays: Arrays) -> None:
        """Restore a result of `to_checkpoint`. Raises StateError if it cannot be that, or belongs to another model or
        algorithm."""
        with refusing_what_does_not_fit():
            session, algorithm = SessionState.from_json(values["session"]), Group(arrays, "algorithm")
            if values["layout"] != self.layout.digest:
                raise StateError("the checkpoint holds a model of another shape; use a new state folder")
            # The first releases wrote nothing of repairs and members: there were none.
            self.agreement.repairs = int(values.get("repairs", 0))
            if self.budget is not None:
                self.budget.restore(group(arrays, "budget"))
                self.algorithm.use_compressor(self._variants[self.budget.variant])
            # The members first: the edges decide which replicas the algorithm has.
            self.membership.restore(values.get("members", ()))
            self.session.restore(session)
            self.membership.restore_edges()
            self.algorithm.restore(algorithm)
            self.algorithm.restore_transport(Group(arrays, "buffer"))
            self.local_steps.restore(Group(arrays, "training"))
            self.reaches.restore(algorithm, self._judge.own_norm)
            if self.last_codes is not None:
                self.last_codes.restore(group(arrays, "codes"))

    # Inside.

    def _perform(self, effects: Effects, now: float) -> Effects:
        """Return the effects of the session with its messages as frames, and the record of a round that is over."""
        self._observe_returned(effects)
        effects.frames += self._encode(effects.sends)
        if self.last_codes is not None:
            codes = {receiver: message for receiver, message in effects.sends if message.kind is MessageKind.GOSSIP}
            if codes:
                # After encoding: these were coded against the reference codes, whose place they take.
                self.last_codes.tell(next(iter(codes.values())), codes)
        effects.sends = []
        if effects.finished is not None:
            effects.record = self._close_round(effects.finished, effects, now)
        return effects

    def _encode(self, sends: Sequence[Send]) -> list[OutgoingFrame]:
        if not sends:
            return []
        # Receivers share the payload.
        for message in {id(message.layers): message for _, message in sends}.values():
            of_factors = self.algorithm.spec.sends_factors
            largest = excess(message, self.algorithm.x.dtype, self.algorithm.node, of_factors=of_factors)
            require_sendable(message, largest)
        frames = self._account.encode(sends, previous=None if self.last_codes is None else self.last_codes.told)
        for number, (_, message) in enumerate(sends if self.algorithm.spec.tells_all is not None else ()):
            if self.is_for_all(message):
                frames[number] = replace(frames[number], told_in=(message.round, message.phase))
        for (receiver, message), outgoing in zip(sends, frames, strict=True):
            if self.budget is not None:
                self.budget.sent(receiver, len(outgoing.frame))
            if self._observe is not None and message.kind is MessageKind.GOSSIP and message.phase <= TRANSFER_PHASE:
                what = "gave" if message.phase == TRANSFER_PHASE else "sent"
                self._observe(what, message.round, receiver, outgoing.frame)
        return frames

    def _observe_returned(self, effects: Effects) -> None:
        if self._observe is not None:
            for peer, message in effects.returned:
                self._observe("returned", message.round, peer, wire.encode(message, self.layout))

    def _close_round(self, t: int, effects: Effects, now: float) -> RoundRecord:
        """Let momentum and reference codes know that round t is over; return its record."""
        if self._z_before is not None:
            # Mass that others hand over at the end of the round is no displacement of this peer's.
            z = self.algorithm.model() if effects.settled_model is None else effects.settled_model
            self.local_steps.after_round(self._z_before, z, self._rate)
            self._z_before = None
        if self._observe is not None:
            for round_, sender in effects.applied:
                self._observe("applied", round_, sender, b"")
            for giver in effects.given:
                self._observe("took", t, giver, b"")
        if self.last_codes is not None:
            self.last_codes.forget_before(self.round)
            if self._views is not None and self._views.membership.changes_at(self.round):
                self.last_codes.keep_only(self._views.all_senders(self.peer), self.round)
        # The norms cost a pass over the model each: with a large one they are taken now and then.
        health = self.algorithm.metrics() if t % self._health_every == 0 else Metrics(self.algorithm.u)
        used = self.algorithm.node.compressor
        record = RoundRecord(
            peer=self.peer,
            round=t,
            time_s=now,
            loss=self._loss,
            rate=self._rate,
            wait_s=now - self._sent_at if self._sent_at is not None else 0.0,
            cpu_s=self._account.cpu_s(),
            late=len(effects.skipped),
            push_weight=health.push_weight,
            error_norm=health.error_norm,
            replica_error=health.replica_error,
            neighbor_distance=health.neighbor_distance,
            repairs=health.repairs + self.agreement.repairs,
            theta=health.theta,
            fraction=getattr(used, "fraction", None),
            bits=getattr(used, "bits", None),
        )
        self._loss = None
        return self._account.added_to(record)
