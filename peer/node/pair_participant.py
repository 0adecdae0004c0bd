"""One peer of an asynchronous run, without clock, socket or disk: local step, pair node and wire put together.

The daemon drives it over gRPC and a state folder, the simulator on a virtual clock. One iteration is `read`, `compute`
and `step`; it counts as one round of the peer. Frames (`receive`) and the timer (`timer`, due at the last `wake_at`)
are handled at any time, also while `compute` runs: that is the only call that may overlap with others.

In each iteration the peer tries to open one exchange. If its partner is busy, it pauses for the back-off, then tries
another neighbour if there is one, else the same. An exchange that has not been opened by the step is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from peer.compress.payload import FloatArray
from peer.errors import LocalProtocolError, StateError
from peer.gossip.effects import Effects, OutgoingFrame, Send
from peer.gossip.pairs.events import Event
from peer.gossip.pairs.node import PairNode
from peer.gossip.value_bounds import excess
from peer.node.blame import blaming
from peer.node.checkpoint_arrays import Arrays, group, grouped, refusing_what_does_not_fit
from peer.node.divergence_guard import require_finite_loss, require_finite_model, require_sendable
from peer.node.frame_account import FrameAccount, decode_from
from peer.node.local_steps import LocalSteps, StepResult
from peer.records import RoundRecord
from peer.wire.message import Message, MessageKind

EXCHANGES_SKIPPED = 1 << 16
"""Exchange numbers left out when a state is restored: more than are used between two saved states."""


class PairParticipant:
    """One peer. All methods but `compute` must be called one at a time."""

    def __init__(
        self,
        *,
        algorithm: PairNode,
        local_steps: LocalSteps,
        cpu_clock: Callable[[], float] = time.process_time,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The two clocks only fill the record of times; no result depends on them."""
        self.algorithm = algorithm
        self.peer = algorithm.node.peer
        self.local_steps = local_steps
        self.layout, self.reaches = algorithm.node.layout, algorithm.reaches
        self.reachable = frozenset(algorithm.neighbors)
        """The neighbours that can be asked for an exchange now: to be set before a call."""
        self._last_round = max(0, algorithm.node.rounds - 1)
        self._read: FloatArray | None = None
        self._step: tuple[float, StepResult] | None = None
        self._wants_exchange = False
        self._refused_by: int | None = None
        self._open_request: OutgoingFrame | None = None
        self._wake_at: float | None = None
        self._account = FrameAccount(
            self.layout, packed=algorithm.node.packed, cpu_clock=cpu_clock, stopwatch=stopwatch
        )
        self._last_record: RoundRecord | None = None

    @property
    def round(self) -> int:
        """Gradient steps taken."""
        return self.algorithm.staleness.steps

    @property
    def can_read(self) -> bool:
        """Whether the next iteration can begin: not while the exchange of the last one is open."""
        return self.algorithm.can_read

    @property
    def in_iteration(self) -> bool:
        """Whether an iteration is under way (between `read` and `step`)."""
        return self._read is not None

    @property
    def open_partner(self) -> int | None:
        """Partner of the own open exchange; None if none is open."""
        request = self.algorithm.open_request
        return None if request is None else request[0]

    @property
    def gradient(self) -> FloatArray:
        """The gradient that was applied last, good until the next `compute`."""
        assert self._step is not None
        return self._step[1].gradient

    def model(self) -> FloatArray:
        """Return x: float32[n]. Not to be written to, and valid until the next call that changes the model."""
        return self.algorithm.model()

    def unchanged(self) -> Effects:
        """Return the effects of a call that changes nothing: timer and open request stay."""
        return Effects(wake_at=self._wake_at, open_request=self._open_request)

    # An iteration.

    def read(self, waited_s: float = 0.0) -> Effects:
        """Begin an iteration: keep the model for the gradient, and ask a neighbour for an exchange. `waited_s`: seconds
        during which it could not begin."""
        with self._account.gossiping():
            self._read = self.algorithm.read()
            self._account.waited(waited_s)
            self._wants_exchange, self._refused_by, self._wake_at = True, None, None
            return self._perform(Effects())

    def compute(self) -> None:
        """Compute the gradient at the model read (the expensive part, which may overlap with everything but `step`)."""
        if self._read is None:
            raise LocalProtocolError("a gradient is computed at what was read")
        with self._account.training():
            t = self.round
            rate = self.local_steps.rate(t)
            self._step = rate, self.local_steps.gradient(self._read, t, rate, rate)

    def step(self, now: float) -> Effects:
        """Apply the gradient and end the iteration, with an exchange or without."""
        if self._step is None:
            raise LocalProtocolError("a step needs a gradient")
        (rate, local), node = self._step, self.algorithm
        before = node.staleness.exchanges_between
        with self._account.gossiping():
            loss, is_misled = local.loss, self.reaches.is_misled(self.round)
            if loss is not None:
                loss = require_finite_loss(self.round, loss, is_misled=is_misled)
            node.step(local.gradient, rate)
            require_finite_model(self.round - 1, node.x)
            # A refused request is not repeated in the next iteration, which makes its own choice.
            self._wants_exchange, self._wake_at = False, None
            self._read = None
        health = node.metrics()
        self._last_record = self._account.added_to(
            RoundRecord(
                peer=self.peer,
                round=self.round - 1,
                time_s=now,
                loss=loss,
                rate=rate,
                cpu_s=self._account.cpu_s(),
                neighbor_distance=health.neighbor_distance,
                repairs=health.repairs,
                theta=health.theta,
                staleness=float(node.staleness.exchanges_between - before),
            )
        )
        effects = self.unchanged()
        effects.finished, effects.record = self._last_record.round, self._last_record
        return effects

    def closing_record(self) -> RoundRecord | None:
        """Return the record of the last step with the figures since added: peers that have finished still answer."""
        if self._last_record is not None:
            self._last_record = self._account.added_to(self._last_record)
        return self._last_record

    # Exchanges.

    def receive(self, sender: int, frame: bytes, now: float) -> Effects:
        """Take a frame from a neighbour. Raises RemoteProtocolError, which names the sender: drop the frame, which has
        changed nothing."""
        with self._account.gossiping():
            with blaming(sender):
                message = decode_from(sender, frame, self.layout, self.algorithm.x.dtype)
                reach = self.algorithm.judge(message)
            effects = self.algorithm.take(message)
            self.reaches.note(self.round, sender, reach)
            self._note(message, effects, now)
            return self._perform(effects)

    def timer(self, now: float) -> Effects:
        """Ask again, if the last `wake_at` has passed."""
        if self._wake_at is not None and now >= self._wake_at:
            # The pause that kept `_next_request` from asking.
            self._wake_at = None
        return self._perform(Effects())

    def disconnected(self, peer: int) -> Effects:
        """Note that the connection to a neighbour broke."""
        self.algorithm.disconnected(peer)
        return self._perform(Effects())

    def abandon(self, peer: int) -> Effects:
        """Give up the open exchanges with a neighbour that stays away. If it had answered by then, its half of the
        exchange is not matched here."""
        self.algorithm.lost(peer)
        self._open_request = None
        return self._perform(Effects())

    def skip_exchanges(self) -> Effects:
        """Leave out exchange numbers whose use a state from before a power cut may have forgotten: a number for two
        exchanges would be answered with the reply to the first."""
        self.algorithm.skip_exchanges(EXCHANGES_SKIPPED)
        return self.unchanged()

    def take_events(self) -> list[Event]:
        """Return the events whose serial place is final and forget them."""
        return self.algorithm.take_events()

    # State.

    def to_checkpoint(self) -> tuple[dict[str, object], dict[str, Any]]:
        """Return everything that the next iterations depend on, as (JSON values, arrays). Between iterations."""
        if self._read is not None:
            raise LocalProtocolError("the training state is in flux while a gradient is computed")
        algorithm = {name: np.array(value) for name, value in self.algorithm.state().items()}
        return {"layout": self.layout.digest}, grouped(algorithm=algorithm, training=self.local_steps.state())

    def restore(self, values: Mapping[str, Any], arrays: Arrays) -> Effects:
        """Restore a result of `to_checkpoint`. Raises StateError if it cannot be that, or belongs to another model or
        algorithm."""
        with refusing_what_does_not_fit():
            if values["layout"] != self.layout.digest:
                raise StateError("the checkpoint holds a model of another shape; use a new state folder")
            self.algorithm.restore(group(arrays, "algorithm"))
            self.local_steps.restore(group(arrays, "training"))
        request = self.algorithm.open_request
        self._open_request = None
        if request is not None:
            (self._open_request,) = self._encode([Send(*request)], is_repeated=True)
        return self.unchanged()

    # Inside.

    def _note(self, message: Message, effects: Effects, now: float) -> None:
        """Note the effects of a message."""
        if effects.mixed_with is not None:
            self._account.exchanged()
            # A mix as responder is not the exchange that this iteration asks for.
            if message.kind is MessageKind.PAIR_REPLY:
                self._wants_exchange = False
        if effects.retry_after_s is not None:
            self._refused_by = message.sender
            if self._wants_exchange:
                self._wake_at = now + effects.retry_after_s
        if self.algorithm.open_request is None:
            self._open_request = None

    def _perform(self, effects: Effects) -> Effects:
        """Return the effects of the pair node with its messages as frames, and the next request if it is due."""
        effects.frames += self._encode(effects.sends)
        effects.sends = []
        request = self._next_request()
        if request is not None:
            (self._open_request,) = self._encode([request])
            effects.frames.append(self._open_request)
        effects.wake_at, effects.open_request = self._wake_at, self._open_request
        return effects

    def _next_request(self) -> Send | None:
        """Open an exchange, if this iteration still wants one and nothing is in the way; return its request."""
        is_free = self._open_request is None and self._wake_at is None and self.algorithm.idle
        partners = [peer for peer in self.algorithm.neighbors if peer in self.reachable]
        if not (self._wants_exchange and is_free and partners):
            return None
        if len(partners) > 1 and self._refused_by in partners:
            # It is in an exchange of its own; another neighbour may be free.
            partners.remove(self._refused_by)
        partner = self.algorithm.choose_partner(partners)
        return Send(partner, self.algorithm.request(partner))

    def _encode(self, sends: list[Send], *, is_repeated: bool = False) -> list[OutgoingFrame]:
        for partner, message in sends:
            require_sendable(message, excess(message, self.algorithm.x.dtype, self.algorithm.node))
            if not is_repeated:
                self.algorithm.check_own(message, partner)
        # Frames sent after the last step are counted with it.
        return self._account.encode(sends, entropy_round=min(self.round, self._last_round))
