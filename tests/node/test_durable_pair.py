"""A peer without rounds survives the end of its process: nothing that it answered or asked is forgotten."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.errors import StateError
from peer.gossip.effects import Effects
from peer.node.durable_pair import DurablePair
from peer.node.pair_participant import EXCHANGES_SKIPPED
from tests.cluster import Pairs
from tests.gossip.drive import contexts, ring, schedule_of
from tests.gossip.event_logs import next_exchange
from tests.node.local_steps import SIZES, Pull
from tests.peers import durable_pair
from tests.state.failing_disk import FailingDisk, ProcessEnds

MODULO = {
    "compressor": ("modulo", {"bits": 4, "rounding": "dither", "verified": True}),
    "verified": True,
    "theta": (0.01,),
}
STEPS = 6


class World(Pairs):
    """Three peers on a ring, with links that deliver in order and a seeded order of everything else."""

    def __init__(self, algorithm: str, *, save_every: int = 2, durability: str = "process") -> None:
        super().__init__(3, algorithm, STEPS)
        self.algorithm, self.save_every, self.durability = algorithm, save_every, durability
        self.moved: dict[tuple[int, int], FloatArray] = {}
        """(peer, step) → what the step took from x."""

    def make(self, peer: int) -> DurablePair:
        more = MODULO if self.algorithm == "moniqua-ad-psgd" else {}
        node = contexts(schedule_of(ring(3)), Layout.of_sizes(SIZES), rounds=STEPS, **more)[peer]
        start = np.full(sum(SIZES), peer, np.float32)
        steps = Pull(float(peer))
        return durable_pair(self.algorithm, node, start, steps, self.disks[peer], durability=self.durability)

    def after(self, me: int, effects: Effects) -> None:
        self.repeated(me, self.peers[me])
        if self.peers[me].round % self.save_every == 0:
            self.peers[me].save({"seconds": self.now})

    def repeated(self, me: int, peer: DurablePair) -> None:
        self.moved[me, peer.round] = 0.25 * peer.participant.gradient

    def error(self) -> float:
        """Return by how much Σx is not what the steps made of it."""
        total = sum(peer.participant.algorithm.x.astype(np.float64) for peer in self.peers.values())
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
    assert sum(peer.participant.algorithm.staleness.exchanges for peer in undisturbed.peers.values()) > STEPS
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
        assert [peer.round for peer in world.peers.values()] == [STEPS] * 3
        assert world.error() < 1e-5, f"ended at operation {end_at}"


@pytest.mark.parametrize("algorithm", ["ad-psgd", "moniqua-ad-psgd"])
def test_recovery_leads_to_where_the_peer_was_in_the_middle_of_a_step_too(algorithm: str) -> None:
    world = World(algorithm, save_every=3)
    world.start()
    in_iteration = with_request = 0
    while any(peer.round < STEPS for peer in world.peers.values()):
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
    peer.disk_state.close()
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
