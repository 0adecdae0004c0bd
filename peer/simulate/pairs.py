"""Runs without rounds on the virtual clock: the same pair nodes as in real processes, each at its own pace.

A peer's gradient takes its step time; requests, replies and refusals take the time of the links; averaging takes no
time. The outcome depends only on the configuration and these times. In comparisons "after round r", each peer is taken
after its own r-th step, whenever that was; the last evaluation is of the models once nothing is on its way.
"""

from __future__ import annotations

import math

from peer.gossip.effects import Effects
from peer.node.local_steps import LocalSteps
from peer.node.pair_participant import PairParticipant
from peer.simulate.virtual_run import Arrival, Event, StepDone, Timer, VirtualRun


class AsynchronousSimulator(VirtualRun[PairParticipant]):
    """One simulated run of a pairwise algorithm."""

    has_rounds = False

    def _built(self) -> None:
        self._waiting_since: dict[int, float] = {}
        """Peer that has yet to begin its next step → time since when it could: only an open exchange keeps it."""

    def _make_participant(self, peer: int, steps: LocalSteps) -> PairParticipant:
        return self.setup.pair_participant(peer, steps, self.trainer.layout, self._x0)

    def _start(self) -> None:
        # Spread over one step: in lockstep, as real devices never are, all requests would cross each other for ever.
        for peer in range(self.num_peers):
            self._waiting_since[peer] = self.step_s[peer] * peer / self.num_peers
            self.agenda.add(self._waiting_since[peer], Timer(peer))

    def _handle(self, event: Event) -> None:
        if isinstance(event, StepDone):
            participant = self.participants[event.peer]
            participant.compute()
            effects = participant.step(self.now)
            participant.take_events()
        elif isinstance(event, Arrival):
            participant = self.participants[event.receiver]
            effects = participant.receive(event.sender, event.frame, self.now)
        else:
            participant = self.participants[event.peer]
            effects = participant.timer(self.now)
        self._perform(participant, effects)
        if effects.record is not None:
            self._finish_round(self._finished(participant, effects.record))
        if self.now >= self._waiting_since.get(participant.peer, math.inf) and participant.can_read:
            self._begin(participant, self.now - self._waiting_since.pop(participant.peer))

    def _ready_for_step(self, peer: int, now: float) -> None:
        self._waiting_since[peer] = now

    def _begin(self, participant: PairParticipant, waited_s: float) -> None:
        """Begin a step."""
        self._perform(participant, participant.read(waited_s))
        self.agenda.add(self.now + self.step_s[participant.peer], StepDone(participant.peer))

    def _perform(self, participant: PairParticipant, effects: Effects) -> None:
        self.deliver(participant.peer, effects.frames)
        if effects.wake_at is not None and effects.wake_at > self.now:
            self.agenda.add(effects.wake_at, Timer(participant.peer))

    def _is_evaluated(self, done: int) -> bool:
        return done < self.config.run.rounds and super()._is_evaluated(done)

    def _finish(self) -> None:
        for participant in self.participants:
            record = participant.closing_record()
            if record is not None and self._metrics is not None:
                self._metrics.put(record)
        states = [(participant.algorithm.x, participant.algorithm.u) for participant in self.participants]
        self._evaluate(self.config.run.rounds, states)
