"""N peers of one process on a virtual clock: the same participants as in real processes, driven by an agenda.

With `late = "wait"` the trajectories are those of `sotto up`, bit for bit: what a peer computes depends on the content
of the messages, never on when they came. Runs without rounds are in `peer.simulate.pairs`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from peer.node.local_steps import LocalSteps
from peer.node.participant import Participant
from peer.simulate.virtual_run import Arrival, Event, StepDone, Timer, VirtualRun


class Simulator(VirtualRun[Participant]):
    """One simulated run that goes in rounds."""

    def _make_participant(self, peer: int, steps: LocalSteps) -> Participant:
        return self.setup.participant(peer, steps, self.trainer.layout, self._x0)

    def _start(self) -> None:
        self._ready: set[int] = set()
        """Peers that wait for the common local step (stacked only)."""
        self._arrived: Counter[tuple[int, int]] = Counter()
        """(sender, receiver) → frames that came; here a receiver confirms them at once."""
        for participant in self.participants:
            if participant.membership.is_member:
                self._ready_for_step(participant.peer, 0.0)

    def _handle(self, event: Event) -> None:
        if isinstance(event, StepDone):
            participant = self.participants[event.peer]
            if self._rows is None:
                participant.step()
            receipts = partial(self._receipts, event.peer)
            effects = participant.begin(self.now, participant.session.silent_receivers(receipts, self.now))
        elif isinstance(event, Arrival):
            participant = self.participants[event.receiver]
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
        # The gradient depends on the model alone, so that computing all of them when the last peer is ready, and
        # letting each begin at its own virtual time, changes nothing.
        self._ready.add(peer)
        self._rows.ready_at[peer] = now
        if len(self._ready) == self.num_peers:
            self._ready.clear()
            algorithms = [participant.algorithm for participant in self.participants]
            self._rows.compute(
                [algorithm.model() for algorithm in algorithms],
                [algorithm.u for algorithm in algorithms],
                self.config.algorithm.push_weight_guard,
                self.participants[0].round,
            )
            for other, participant in enumerate(self.participants):
                participant.step()
                self._agenda.add(self._rows.ready_at[other] + self._step_s[other], StepDone(other))

    def _keep_to_budget(self, participant: Participant, now: float) -> float:
        """Return when the next round may start; tell the budget what the packets of the virtual links come to."""
        if participant.budget is not None:
            overhead = self._network.model.overhead_bytes
            for receiver in self.setup.schedule.all_receivers(participant.peer):
                frames, _, frame_bytes = self._links.get((participant.peer, receiver), (0, 0, 0))
                participant.budget.measured(receiver, frame_bytes + frames * overhead)
        return participant.ready(now)
