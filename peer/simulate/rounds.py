"""N peers of one process on a virtual clock: the same participants as in real processes, driven by an agenda.

With `late = "wait"` the trajectories are those of `sotto up`, bit for bit: what a peer computes depends on the content
of the messages, never on when they came. Runs without rounds are in `peer.simulate.pairs`.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property, partial

from peer.node.local_steps import LocalSteps
from peer.node.participant import Participant
from peer.simulate.decoding import SharedDecoding
from peer.simulate.virtual_run import Arrival, Event, StepDone, Timer, VirtualRun


class Simulator(VirtualRun[Participant]):
    """One simulated run that goes in rounds."""

    def _make_participant(self, peer: int, steps: LocalSteps) -> Participant:
        return self.setup.participant(peer, steps, self.trainer.layout, self._x0, decode=self._decoding)

    @cached_property
    def _decoding(self) -> SharedDecoding:
        return SharedDecoding()

    def _start(self) -> None:
        self._ready: list[tuple[int, float]] = []
        """(peer, since when) of those that wait for the others (stacked only)."""
        self._arrived: Counter[tuple[int, int]] = Counter()
        """(sender, receiver) → frames that came; here a receiver confirms them at once. Only where a round may go on
        without late neighbours, which alone asks for it."""
        if self._rows is not None:
            self._rows.algorithms = [participant.algorithm for participant in self.participants]
        for participant in self.participants:
            if participant.membership.is_member:
                self._ready_for_step(participant.peer, 0.0)

    def _handle(self, event: Event) -> None:
        if isinstance(event, StepDone):
            participant = self.participants[event.peer]
            participant.step()
            receipts = partial(self._receipts, event.peer)
            effects = participant.begin(self.now, participant.session.silent_receivers(receipts, self.now))
        elif isinstance(event, Arrival):
            participant = self.participants[event.receiver]
            if self.setup.late_policy is not None:
                self._arrived[event.sender, event.receiver] += 1
            effects = participant.receive(event.sender, event.frame, self.now)
        else:
            participant = self.participants[event.peer]
            effects = participant.timer(self.now)
        self._deliver(participant.peer, effects.frames)
        # After a message the timer may be due earlier: each neighbour can have a deadline of its own.
        if not isinstance(event, Timer) and effects.wake_at is not None:
            self._agenda.add(effects.wake_at, Timer(participant.peer))
        if effects.record is not None:
            self._finish_round(participant, effects.record)

    def _receipts(self, sender: int, receiver: int) -> tuple[int, int]:
        """Return (how many frames of a link have arrived, how many were sent)."""
        return self._arrived[sender, receiver], self._links.get((sender, receiver), [0])[0]

    def _ready_for_step(self, peer: int, now: float) -> None:
        now = self._keep_to_budget(self.participants[peer], now)
        if self._rows is None:
            self._agenda.add(now + self._step_s[peer], StepDone(peer))
            return
        # The first peer of a group that begins lets the gradients of all be computed: nobody may lack its model then.
        self._ready.append((peer, now))
        if len(self._ready) == self.num_peers:
            ready, self._ready = sorted(self._ready), []
            for other, since in ready:
                self._agenda.add(since + self._step_s[other], StepDone(other))

    def _keep_to_budget(self, participant: Participant, now: float) -> float:
        """Return when the next round may start; tell the budget what the packets of the virtual links come to."""
        if participant.budget is not None:
            overhead = self._network.model.overhead_bytes
            for receiver in self.setup.schedule.all_receivers(participant.peer):
                frames, _, frame_bytes = self._links.get((participant.peer, receiver), (0, 0, 0))
                participant.budget.measured(receiver, frame_bytes + frames * overhead)
        return participant.ready(now)
