"""One peer of an asynchronous run, without clock, socket or disk: local step, pair node and wire put together.

The daemon drives it over gRPC and a state folder, the simulator on a virtual clock. One iteration is `read`, `compute`
and `step`; it counts as one round of the peer. Frames (`receive`) and the timer (`timer`, due at `wake_at`) are handled
at any time, also while `compute` runs: that is the only call that may overlap with others.

In each iteration the peer tries to open one exchange. Whoever is busy is left alone for the pause that the back-off
gives, then a neighbour is tried again, another one if there is one; what has not come about by the step is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from peer import wire
from peer.compress.payload import FloatArray
from peer.errors import LocalProtocolError, RemoteProtocolError, StateError
from peer.gossip.pairwise import Event, PairNode, PairOutcome
from peer.node.participant import ENTROPY_EVERY, LocalSteps, Parcel, StepResult, Turn
from peer.round_record import RoundRecord
from peer.wire.message import Message, MessageKind

EXCHANGES_SKIPPED = 1 << 16
"""Exchange numbers left out when a state is restored: more than are used between two saved states."""


@dataclass(kw_only=True)
class PairTurn(Turn):
    """What one call asks the driver to do, and what is open after it."""

    open_request: Parcel | None = None
    """The own request without an answer: to be sent again whenever its receiver comes back."""


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
        """The two clocks only fill the record of times; nothing that is computed depends on them."""
        self.algorithm = algorithm
        self.peer = algorithm.node.peer
        self.local_steps = local_steps
        self.layout = algorithm.node.layout
        self.wake_at: float | None = None
        """When `timer` should be called."""
        self.reachable = frozenset(algorithm.neighbors)
        """The neighbours that can be asked for an exchange now: to be set before a call."""
        self._last_round = max(0, algorithm.node.rounds - 1)
        self._cpu_clock, self._stopwatch = cpu_clock, stopwatch
        self._read: FloatArray | None = None
        self._step: tuple[float, StepResult] | None = None
        self._wants_exchange = False
        self._refused_by: int | None = None
        self._open: Parcel | None = None
        self._account = _Account()
        self._cpu_mark = cpu_clock()
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
    def open_request(self) -> Parcel | None:
        """The own request without an answer: to be sent again whenever its receiver comes back."""
        return self._open

    @property
    def open_partner(self) -> int | None:
        """With whom an own exchange is open."""
        request = self.algorithm.open_request
        return None if request is None else request[0]

    def model(self) -> FloatArray:
        """Return x: float32[n]. Not to be written to, and valid until the next call that changes the model."""
        return self.algorithm.model()

    def read(self, waited_s: float = 0.0) -> PairTurn:
        """Begin an iteration: keep what the gradient is to be computed at, and ask a neighbour for an exchange.
        `waited_s`: for how long it could not begin."""
        started = self._stopwatch()
        self._read = self.algorithm.read()
        self._account.wait_s += waited_s
        self._wants_exchange, self._refused_by, self.wake_at = True, None, None
        turn = self._perform(())
        self._account.gossip_s += self._stopwatch() - started
        return turn

    def compute(self) -> None:
        """Compute the gradient at what was read (the expensive part, which may overlap with everything but `step`)."""
        if self._read is None:
            raise LocalProtocolError("a gradient is computed at what was read")
        started = self._stopwatch()
        t = self.round
        rate = self.local_steps.rate(t)
        self._step = rate, self.local_steps.gradient(self._read, t, rate, rate)
        self._account.train_s += self._stopwatch() - started

    def step(self, now: float) -> PairTurn:
        """Apply the gradient and end the iteration, with an exchange or without."""
        started = self._stopwatch()
        if self._step is None:
            raise LocalProtocolError("a step needs a gradient")
        rate, local = self._step
        node, before = self.algorithm, self.algorithm.staleness.exchanges_between
        node.step(local.gradient, rate)
        self._wants_exchange, self.wake_at = False, None
        self._read = None
        self._account.gossip_s += self._stopwatch() - started
        health, cpu = node.metrics(), self._cpu_clock()
        self._last_record = self._accounted(
            RoundRecord(
                peer=self.peer,
                round=self.round - 1,
                time_s=now,
                loss=local.loss,
                rate=rate,
                cpu_s=cpu - self._cpu_mark,
                neighbor_distance=health.neighbor_distance,
                repairs=health.repairs,
                theta=health.theta,
                staleness=float(node.staleness.exchanges_between - before),
            )
        )
        self._cpu_mark = cpu
        return PairTurn(open_request=self._open, finished=self._last_record)

    @property
    def gradient(self) -> FloatArray:
        """The gradient that was applied last, good until the next `compute`."""
        assert self._step is not None
        return self._step[1].gradient

    def receive(self, sender: int, frame: bytes, now: float) -> PairTurn:
        """Take a frame from a neighbour. Raises RemoteProtocolError, which names the sender: drop the frame."""
        started = self._stopwatch()
        try:
            message = wire.decode(frame, self.layout, dtype=self.algorithm.x.dtype)
        except RemoteProtocolError as error:
            raise type(error)(error.problem, peer=sender) from None
        if message.sender != sender:
            raise RemoteProtocolError(f"sent a frame in the name of peer {message.sender}", peer=sender)
        outcome = self.algorithm.receive(message)
        self._note(sender, message, outcome, now)
        turn = self._perform(outcome.sends)
        self._account.gossip_s += self._stopwatch() - started
        return turn

    def timer(self, now: float) -> PairTurn:
        """Ask again, if `wake_at` has passed."""
        if self.wake_at is not None and now >= self.wake_at:
            self.wake_at = None
        return self._perform(())

    def disconnected(self, peer: int) -> PairTurn:
        """Take note that the connection to a neighbour broke."""
        self.algorithm.disconnected(peer)
        return self._perform(())

    def abandon(self, peer: int) -> PairTurn:
        """Give up what is open with a neighbour that stays away. If it had answered by then, its half of the exchange
        is not matched here."""
        self.algorithm.lost(peer)
        self._open = None
        return self._perform(())

    def closing_record(self) -> RoundRecord | None:
        """Return the record of the last step with what was done since added to it: peers that have finished still
        answer."""
        if self._last_record is not None:
            self._last_record = self._accounted(self._last_record)
        return self._last_record

    def state(self) -> tuple[dict[str, object], dict[str, npt.NDArray[Any]]]:
        """Return (JSON values, arrays): everything the next iterations depend on. Between iterations."""
        if self._read is not None:
            raise LocalProtocolError("the training state is in flux while a gradient is computed")
        arrays = {f"algorithm/{name}": np.array(value) for name, value in self.algorithm.state().items()}
        arrays |= {f"training/{name}": value for name, value in self.local_steps.state().items()}
        return {"layout": self.layout.digest}, arrays

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> PairTurn:
        """Take back what `state` returned. Raises StateError if it belongs to another model or algorithm."""
        if state.get("layout") != self.layout.digest:
            raise StateError("the checkpoint holds a model of another shape; use a new state folder")
        try:
            self.algorithm.restore(_part(arrays, "algorithm/"))
            self.local_steps.restore(_part(arrays, "training/"))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the checkpoint does not fit this configuration: {error}") from None
        request = self.algorithm.open_request
        self._open = None if request is None else self._parcel(*request)
        return PairTurn(open_request=self._open)

    def skip_exchanges(self) -> None:
        """Leave out exchange numbers that a state from before a power cut may have forgotten the use of."""
        self.algorithm.skip_exchanges(EXCHANGES_SKIPPED)

    def take_events(self) -> list[Event]:
        """Return the events whose serial place is final and forget them."""
        return self.algorithm.take_events()

    def _note(self, sender: int, message: Message, outcome: PairOutcome, now: float) -> None:
        """Take note of what a message brought about."""
        self._account.exchanges += outcome.mixed_with is not None
        if message.kind is MessageKind.PAIR_REPLY and outcome.mixed_with is not None:
            self._wants_exchange = False
        if outcome.retry_after_s is not None:
            self._refused_by = sender
            if self._wants_exchange:
                self.wake_at = now + outcome.retry_after_s
        if self.algorithm.open_request is None:
            self._open = None

    def _perform(self, sends: Sequence[tuple[int, Message]]) -> PairTurn:
        """Return the messages as parcels, and the next request if it is time for one."""
        parcels = [self._parcel(receiver, message) for receiver, message in sends]
        if self._wants_exchange and self._open is None and self.wake_at is None and self.algorithm.idle:
            partners = [peer for peer in self.algorithm.neighbors if peer in self.reachable]
            if len(partners) > 1 and self._refused_by in partners:
                partners.remove(self._refused_by)
            if partners:
                partner = self.algorithm.choose_partner(partners)
                self._open = self._parcel(partner, self.algorithm.request(partner))
                parcels.append(self._open)
        return PairTurn(parcels=parcels, open_request=self._open)

    def _parcel(self, receiver: int, message: Message) -> Parcel:
        frame = wire.encode(message, self.layout)
        payload_bytes = wire.payload_bytes(frame, self.layout)
        account = self._account
        account.messages += 1
        account.payload_bytes += payload_bytes
        account.frame_bytes += len(frame)
        values, entropy_bits = 0, 0.0
        if message.layer_ids is not None:
            values = sum(self.layout.sizes[layer] for layer in message.layer_ids)
        elif message.layers:
            values = self.layout.size
        # What is sent after the last step is counted with it.
        if message.layers and min(self.round, self._last_round) % ENTROPY_EVERY == 0:
            entropy_bits = wire.entropy_bound_bits(message)
        account.values += values
        account.entropy_bits += entropy_bits
        return Parcel(receiver, frame, payload_bytes, sequenced=False, values=values, entropy_bits=entropy_bits)

    def _accounted(self, record: RoundRecord) -> RoundRecord:
        """Return the record with the running figures added, which begin anew."""
        account, self._account = self._account, _Account()
        return replace(
            record,
            messages=record.messages + account.messages,
            values=record.values + account.values,
            payload_bytes=record.payload_bytes + account.payload_bytes,
            frame_bytes=record.frame_bytes + account.frame_bytes,
            entropy_bits=record.entropy_bits + account.entropy_bits,
            train_s=record.train_s + account.train_s,
            gossip_s=record.gossip_s + account.gossip_s,
            wait_s=record.wait_s + account.wait_s,
            exchanges=record.exchanges + account.exchanges,
        )


@dataclass
class _Account:
    """Running figures of the iteration under way."""

    messages: int = 0
    values: int = 0
    payload_bytes: int = 0
    frame_bytes: int = 0
    entropy_bits: float = 0.0
    train_s: float = 0.0
    gossip_s: float = 0.0
    wait_s: float = 0.0
    exchanges: int = 0


def _part(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
