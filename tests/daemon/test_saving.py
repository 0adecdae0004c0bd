"""When the state of a peer may be saved: never in the midst of a round, whatever the operator asks for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.config.options import StateOptions
from peer.daemon.checkpoint_cadence import CheckpointCadence
from peer.daemon.parts import CommonParts
from peer.daemon.round_frames import RoundFrames
from peer.daemon.runtime import Runtime
from peer.daemon.saving import RoundSaver
from peer.node.durable import DurablePeer
from tests.node.local_steps import OfScript, Pull


class Durable:
    """A peer that takes note of when it is saved."""

    def __init__(self) -> None:
        self.session = SimpleNamespace(in_round=False)
        self.participant = SimpleNamespace(session=self.session, local_steps=None)
        self.saved = 0

    def save(self, description: object, *, anew: bool) -> dict[int, int]:
        assert not self.session.in_round
        self.saved += 1
        return {1: 7}


class StepsOfScript(OfScript, Pull):
    savable = True

    @property
    def can_be_saved(self) -> bool:
        return self.savable


class Peer:
    def __init__(self) -> None:
        self.runtime, self.durable = Runtime(), Durable()
        self.cadence = CheckpointCadence(StateOptions(), rounds=50, every=0)
        self.confirmed: list[Any] = []
        self.flushed = 0
        common = SimpleNamespace(
            local=SimpleNamespace(describe=lambda seconds: {}),
            runtime=self.runtime,
            cadence=self.cadence,
            metrics=SimpleNamespace(flush=self.flush),
        )
        self.saver = RoundSaver(
            cast(CommonParts, common),
            cast(DurablePeer, self.durable),
            cast(RoundFrames, SimpleNamespace(confirm=self.confirmed.append)),
        )

    def flush(self) -> None:
        self.flushed += 1


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.runtime.close()


def test_between_rounds_a_snapshot_is_taken_at_once(peer: Peer) -> None:
    peer.saver.is_at_rest = True
    asyncio.run(peer.saver.take_snapshot())
    assert (peer.durable.saved, peer.flushed, peer.confirmed) == (1, 1, [{1: 7}])
    assert not peer.cadence.snapshot_wanted


def test_of_a_script_it_waits_for_a_state_that_is_noted(peer: Peer) -> None:
    peer.durable.participant.local_steps = steps = StepsOfScript(0.0)
    peer.saver.is_at_rest, steps.savable = True, False
    asyncio.run(peer.saver.take_snapshot())
    assert peer.confirmed == [{1: 7}], "the journal is synced"
    assert peer.cadence.is_foreseen(7)
    steps.savable = True
    asyncio.run(peer.saver.take_snapshot())
    assert not peer.cadence.is_foreseen(7)


def test_within_a_round_it_waits_for_the_end(peer: Peer) -> None:
    peer.saver.is_at_rest = False
    asyncio.run(peer.saver.take_snapshot())
    assert peer.durable.saved == 0
    assert peer.cadence.is_due(7, journal_bytes=0)


def test_a_round_that_begins_before_the_worker_gets_to_it_is_not_torn(peer: Peer) -> None:
    gate = threading.Event()

    def begin_round() -> None:
        gate.wait(10)
        peer.durable.session.in_round = True

    async def story() -> None:
        begun = asyncio.ensure_future(peer.runtime.work(begin_round))
        await asyncio.sleep(0)
        peer.saver.is_at_rest = True
        saved = asyncio.ensure_future(peer.saver.take_snapshot())
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(begun, saved)

    asyncio.run(story())
    assert (peer.durable.saved, peer.confirmed) == (0, [])
    assert peer.cadence.snapshot_wanted
