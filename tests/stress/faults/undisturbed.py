"""The run that nothing disturbs: every message comes at once. What the disturbed one is compared with, bit for bit."""

from __future__ import annotations

from collections import deque

from peer.compress.payload import FloatArray
from peer.gossip.effects import Effects
from peer.gossip.membership import Change
from tests.stress.faults.scenario import RoundState, Scenario, state_of


class UndisturbedRun:
    """The participants of a scenario in lockstep, without links, journals and clocks. It follows the changes of members
    that came about in the disturbed run, as long as nobody is lost: what a lost peer had is up to the links."""

    def __init__(self, scenario: Scenario) -> None:
        self.round = 0
        """Rounds that all members have completed."""
        self._peers = [scenario.participant(peer, on_step=_ignore_step) for peer in range(scenario.num_peers)]
        self._states: list[dict[int, RoundState]] = [{} for _ in self._peers]
        self._frames: deque[tuple[int, int, bytes]] = deque()

    def follow(self, change: Change) -> None:
        """Let the issuer of a change announce it. Raises StateError where that comes too late for the others."""
        peer = self._peers[change.issuer]
        if change not in peer.membership.changes:
            self._perform(change.issuer, peer.learn(change, 0.0))
            self._deliver()

    def after(self, peer: int, t: int) -> RoundState | None:
        """Return a peer's state after round t; None if it does not take part in that round."""
        while self.round <= t:
            self._do_round()
        return self._states[peer].get(t)

    def _do_round(self) -> None:
        t = self.round
        able = [peer for peer in self._peers if peer.membership.is_member and not peer.session.in_round]
        for peer in able:
            peer.step()
        for peer in able:
            self._perform(peer.peer, peer.begin(0.0))
        self._deliver()
        assert all(peer.round == t + 1 for peer in able), f"round {t} did not end"
        self.round = t + 1

    def _perform(self, peer: int, effects: Effects) -> None:
        self._frames += [(outgoing.receiver, peer, outgoing.frame) for outgoing in effects.frames]
        if effects.finished is not None:
            self._states[peer][effects.finished] = state_of(self._peers[peer])

    def _deliver(self) -> None:
        while self._frames:
            receiver, sender, frame = self._frames.popleft()
            self._perform(receiver, self._peers[receiver].receive(sender, frame, 0.0))


def _ignore_step(round_: int, rate: float, gradient: FloatArray) -> None:
    pass
