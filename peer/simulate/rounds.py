"""N peers of one process on a virtual clock: the same participants as in real processes, driven by an agenda.

With `late = "wait"` the trajectories are those of `sotto up`, bit for bit: a peer's results depend on the content of
messages, never on their arrival times. Runs without rounds are in `peer.simulate.pairs`, runs in several processes in
`peer.simulate.parallel`.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from functools import cached_property, partial

import numpy.typing as npt

from peer.compress.layout import Layout
from peer.gossip.effects import Effects
from peer.node.frame_account import decode_from
from peer.node.local_steps import LocalSteps
from peer.node.participant import Participant
from peer.simulate.virtual_run import Arrival, Event, Finished, StepDone, Timer, VirtualRun, subject
from peer.wire.message import Message


class Simulator(VirtualRun[Participant]):
    """One simulated run that goes in rounds."""

    def _built(self) -> None:
        self._ready: list[tuple[int, float]] = []
        """(peer, time since when) of peers that wait for the others (stacked only)."""
        self._arrived: Counter[tuple[int, int]] = Counter()
        """(sender, receiver) → frames that arrived; here a receiver confirms them at once. Filled only if rounds may go
        on without late neighbours, which alone needs it."""
        if self._rows is not None:
            self._rows.algorithms = [participant.algorithm for participant in self.participants]

    def _make_participant(self, peer: int, steps: LocalSteps) -> Participant:
        return self.setup.participant(
            peer, steps, self.trainer.layout, self._x0, decode=self._decoding, cpu_clock=self._cpu_clock
        )

    @cached_property
    def _decoding(self) -> SharedDecoding:
        return SharedDecoding()

    @cached_property
    def _cpu_clock(self) -> _CpuClock:
        return _CpuClock(max(1, self.num_peers // 16))

    def _start(self) -> None:
        for participant in self.participants:
            if participant.membership.is_member:
                self._ready_for_step(participant.peer, 0.0)

    def _handle(self, event: Event) -> None:
        self._perform(event, *self._outcome(event, self.now))

    def _outcome(self, event: Event, now: float) -> tuple[Effects, Finished | None]:
        """Let an event happen to its peer; return its effects, and the round that it completed, if any."""
        effects = self._call(event, now)
        if effects.record is None:
            return effects, None
        return effects, self._finished(self.participants[subject(event)], effects.record)

    def _call(self, event: Event, now: float) -> Effects:
        """Let an event happen to its peer."""
        if isinstance(event, StepDone):
            participant = self.participants[event.peer]
            participant.step()
            receipts = partial(self._receipts, event.peer)
            return participant.begin(now, participant.session.silent_receivers(receipts, now))
        if isinstance(event, Arrival):
            if self.setup.late_policy is not None:
                self._arrived[event.sender, event.receiver] += 1
            return self.participants[event.receiver].receive(event.sender, event.frame, now)
        return self.participants[event.peer].timer(now)

    def _perform(self, event: Event, effects: Effects, finished: Finished | None) -> None:
        """Perform the effects of an event."""
        peer = subject(event)
        self.deliver(peer, effects.frames)
        # After a message the timer may be due earlier: each neighbour can have a deadline of its own.
        if not isinstance(event, Timer) and effects.wake_at is not None:
            self.agenda.add(effects.wake_at, Timer(peer))
        if finished is not None:
            self._finish_round(finished)

    def _receipts(self, sender: int, receiver: int) -> tuple[int, int]:
        """Return (number of frames of a link that arrived, number sent)."""
        return self._arrived[sender, receiver], self._links.get((sender, receiver), [0])[0]

    def _ready_for_step(self, peer: int, now: float) -> None:
        now = self._keep_to_budget(self.participants[peer], now)
        if self._rows is None:
            self.agenda.add(now + self.step_s[peer], StepDone(peer))
            return
        # The first peer of a group that begins lets the gradients of all be computed: nobody may lack its model then.
        self._ready.append((peer, now))
        if len(self._ready) == self.num_peers:
            ready, self._ready = sorted(self._ready), []
            for other, since in ready:
                self.agenda.add(since + self.step_s[other], StepDone(other))

    def _keep_to_budget(self, participant: Participant, now: float) -> float:
        """Return when the next round may start; tell the budget the packet bytes of the virtual links."""
        if participant.budget is not None:
            overhead = self._network.model.overhead_bytes
            for receiver in self.setup.schedule.all_receivers(participant.peer):
                frames, _, frame_bytes = self._links.get((participant.peer, receiver), (0, 0, 0))
                participant.budget.measured(receiver, frame_bytes + frames * overhead)
        return participant.ready(now)


class _CpuClock:
    """CPU seconds of the process, read once for several peers: they share them, and where the system is slow to say, a
    reading takes a tenth of a round."""

    def __init__(self, every: int) -> None:
        self._every, self._calls, self._now_s = every, 0, 0.0

    def __call__(self) -> float:
        if self._calls % self._every == 0:
            self._now_s = time.process_time()
        self._calls += 1
        return self._now_s


KEPT = 4
"""Frames kept with their messages. All receivers of a frame take it one after the other if links are alike; the two
kinds of frames of a round, with and without weight, go side by side."""


class SharedDecoding:
    """Implements `Participant`'s `decode`: every receiver gets the same message, whose arrays nobody writes to."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[int, int], tuple[bytes, Message | None, Message]] = OrderedDict()

    def __call__(
        self, sender: int, frame: bytes, layout: Layout, dtype: npt.DTypeLike, *, previous: Message | None = None
    ) -> Message:
        # The frames kept are alive, so that no other object has their identity.
        key = id(frame), id(previous)
        found = self._newest.get(key)
        if found is None:
            found = frame, previous, decode_from(sender, frame, layout, dtype, previous=previous)
            self._newest[key] = found
            if len(self._newest) > KEPT:
                self._newest.popitem(last=False)
        return found[2]
