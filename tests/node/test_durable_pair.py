"""A peer without rounds survives the end of its process: nothing that it answered or asked is forgotten."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from random import Random

import numpy as np
import pytest

from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.errors import StateError
from peer.gossip import build_pair_node
from peer.gossip.effects import Effects
from peer.node.durable_pair import DurablePair
from peer.node.pair_participant import EXCHANGES_SKIPPED, PairParticipant
from tests.gossip.drive import contexts, ring, schedule_of
from tests.gossip.event_logs import next_exchange
from tests.node.local_steps import SIZES, Pull
from tests.state.failing_disk import FailingDisk, ProcessEnds

MODULO = {
    "compressor": ("modulo", {"bits": 4, "rounding": "dither", "verified": True}),
    "verified": True,
    "theta": (0.01,),
}
STEPS = 6


class World:
    """Three peers on a ring, with links that deliver in order and a seeded order of everything else."""

    def __init__(self, algorithm: str, *, save_every: int = 2, durability: str = "process") -> None:
        self.algorithm, self.save_every, self.durability = algorithm, save_every, durability
        self.disks = [FailingDisk() for _ in range(3)]
        self.links = {(a, b): deque[bytes]() for a in range(3) for b in range(3) if a != b}
        self.moved: dict[tuple[int, int], FloatArray] = {}
        """(peer, step) → what the step took from x."""
        self.random = Random(algorithm)
        self.now = 0.0
        self.last = [Effects() for _ in range(3)]
        """What each peer asked for last: when to wake it, and its open request."""
        self.peers = [self.make(peer) for peer in range(3)]

    def make(self, peer: int) -> DurablePair:
        more = MODULO if self.algorithm == "moniqua-ad-psgd" else {}
        node = contexts(schedule_of(ring(3)), Layout.of_sizes(SIZES), rounds=STEPS, **more)[peer]
        start = np.full(sum(SIZES), peer, np.float32)
        participant = PairParticipant(
            algorithm=build_pair_node(self.algorithm, node, start),
            local_steps=Pull(float(peer)),
            cpu_clock=lambda: 0.0,
        )
        return DurablePair(
            participant,
            self.disks[peer],
            identity={"peer": str(peer)},
            durability=self.durability,  # type: ignore[arg-type]
        )

    def start(self) -> None:
        for peer in self.peers:
            peer.open()

    def run(self) -> None:
        """Go on until every peer has taken its steps and nothing is on its way."""
        for _ in range(100_000):
            self.now += 1.0
            peers = self.random.sample(range(3), 3)
            busy = [self.turn(peer) for peer in peers]
            if not any(busy) and not any(self.links.values()):
                return
        raise AssertionError([(peer.round, peer.participant.open_partner) for peer in self.peers])

    def turn(self, me: int) -> bool:
        """Let a peer do one thing; return whether there was any."""
        peer = self.peers[me]
        participant = peer.participant
        waiting = [sender for sender in range(3) if sender != me and self.links[sender, me]]
        if waiting and self.random.random() < 0.7:
            sender = self.random.choice(waiting)
            self.send(me, peer.receive(sender, self.links[sender, me][0], self.now))
            self.links[sender, me].popleft()
        elif (wake_at := self.last[me].wake_at) is not None and self.now >= wake_at:
            self.send(me, peer.timer(self.now))
        elif participant.in_iteration:
            peer.compute()
            self.send(me, peer.step(self.now))
            self.moved[me, participant.round] = 0.25 * participant.gradient
            if participant.round % self.save_every == 0:
                peer.save({"seconds": self.now})
        elif participant.round < STEPS and participant.can_read:
            self.send(me, peer.read(0.0))
        else:
            return bool(waiting) or participant.open_partner is not None
        return True

    def send(self, me: int, effects: Effects) -> None:
        self.last[me] = effects
        for outgoing in effects.frames:
            self.links[me, outgoing.receiver].append(outgoing.frame)

    def restart(self, me: int) -> None:
        """Start the process of a peer again, and connect it to the others."""
        self.disks[me].restart()
        self.peers[me] = self.make(me)
        self.last[me] = self.peers[me].open(lambda effects: self.note_again(me)).effects
        for other in {0, 1, 2} - {me}:
            self.links[me, other].clear()
            self.links[other, me].clear()
            self.send(other, self.peers[other].disconnected(me))
            for a, b in ((me, other), (other, me)):
                request = self.last[a].open_request
                if request is not None and request.receiver == b and not self.links[a, b]:
                    self.links[a, b].append(request.frame)

    def note_again(self, me: int) -> None:
        participant = self.peers[me].participant
        self.moved[me, participant.round] = 0.25 * participant.gradient

    def error(self) -> float:
        """Return by how much Σx is not what the steps made of it."""
        total = sum(peer.participant.algorithm.x.astype(np.float64) for peer in self.peers)
        return float(np.abs(total - (0 + 1 + 2) + sum(self.moved.values())).max())


def everything(peer: DurablePair, last: Effects) -> list[object]:
    """Return what the future of a peer depends on, but for the number of its next exchange."""
    participant = peer.participant
    arrays = participant.algorithm.state() | dict(participant.local_steps.state())
    return [
        {name: np.array(array).tobytes() for name, array in arrays.items() if name != "counters"},
        (participant.round, participant.in_iteration, last.wake_at, participant.open_partner),
        last.open_request and last.open_request.frame,
    ]


@pytest.mark.parametrize("algorithm", ["ad-psgd", "moniqua-ad-psgd"])
def test_a_process_that_ends_at_any_operation_on_the_disk_forgets_nothing(algorithm: str) -> None:
    undisturbed = World(algorithm)
    undisturbed.start()
    undisturbed.run()
    assert undisturbed.error() < 1e-5
    assert sum(peer.participant.algorithm.staleness.exchanges for peer in undisturbed.peers) > STEPS
    operations = len(undisturbed.disks[1].operations)
    assert operations > 30
    for end_at in range(operations):
        world = World(algorithm)
        world.disks[1].end_at, world.disks[1].torn = end_at, 0.5
        begun = False
        try:
            world.start()
            begun = True
            world.run()
        except ProcessEnds:
            if not begun:
                continue  # It had met nobody.
            world.restart(1)
            world.run()
        assert [peer.round for peer in world.peers] == [STEPS] * 3
        assert world.error() < 1e-5, f"ended at operation {end_at}"


@pytest.mark.parametrize("algorithm", ["ad-psgd", "moniqua-ad-psgd"])
def test_recovery_leads_to_where_the_peer_was_in_the_middle_of_a_step_too(algorithm: str) -> None:
    world = World(algorithm, save_every=3)
    world.start()
    in_iteration = with_request = 0
    while any(peer.round < STEPS for peer in world.peers):
        world.now += 1.0
        for peer in range(3):
            world.turn(peer)
        ended, again = world.peers[1], world.make(1)
        disk_before = {name: world.disks[1].read(name) for name in world.disks[1].names()}
        recovered = again.open().effects
        assert everything(again, recovered) == everything(ended, world.last[1])
        assert next_exchange(again.participant.algorithm) == (
            next_exchange(ended.participant.algorithm)
            + EXCHANGES_SKIPPED * (ended.round + ended.disk_state.journal_bytes > 0)
        )
        put_back(world.disks[1], disk_before)
        in_iteration += again.participant.in_iteration
        with_request += recovered.open_request is not None
    assert in_iteration > 1
    assert with_request > 1


def put_back(disk: FailingDisk, files: Mapping[str, bytes]) -> None:
    """Let a journal be as it was before somebody looked at it."""
    for name, data in files.items():
        disk.truncate(name, len(data))


def test_a_checkpoint_that_is_written_once_more_holds_what_was_answered_since() -> None:
    world = World("ad-psgd")
    world.start()
    world.run()
    peer = world.peers[1]
    peer.save({})
    calls = len(peer.disk_state.files.read_journal(peer.disk_state.base_round, []).records)
    assert calls > 0
    expected = everything(peer, world.last[1])
    peer.close()
    world.peers[1] = world.make(1)
    recovery = world.peers[1].open()
    assert recovery.replayed_rounds == 0
    assert everything(world.peers[1], recovery.effects) == expected


def test_a_damaged_checkpoint_costs_nothing_but_the_calls_before_it() -> None:
    world = World("ad-psgd")
    world.start()
    world.run()
    expected = everything(world.peers[1], world.last[1])
    newest = max(name for name in world.disks[1].names() if name.startswith("checkpoint"))
    world.disks[1].change(newest, world.disks[1].size(newest) - 1, 1)
    world.peers[1] = world.make(1)
    recovery = world.peers[1].open()
    assert "its checksum does not match" in recovery.notices[0]
    assert recovery.replayed_rounds == 2
    assert everything(world.peers[1], recovery.effects) == expected


def test_what_gives_other_bits_stops_the_peer_in_a_sentence() -> None:
    world = World("ad-psgd", save_every=100)
    world.start()
    world.run()
    again = world.make(1)
    again.participant.local_steps.target = 7.0  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="gives another model in step 1; the machine"):
        again.open()


def test_with_power_what_was_sent_survives_a_power_cut() -> None:
    undisturbed = World("ad-psgd", durability="power")
    undisturbed.start()
    undisturbed.run()
    for end_at in range(5, len(undisturbed.disks[1].operations), 3):
        world = World("ad-psgd", durability="power")
        world.start()
        world.disks[1].end_at = end_at
        try:
            world.run()
        except ProcessEnds:
            world.disks[1].lose_power()
            world.restart(1)
            world.run()
        assert world.error() < 1e-5, f"ended at operation {end_at}"
