"""Repairs are asked for by those who can use them, and sent to those who asked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from peer import wire
from peer.compress.payload import MoreBits, WholeIntegers
from peer.errors import RemoteProtocolError
from peer.wire.message import Message, MessageKind, RepairWish
from tests.hostile.meaning.liars import LAYOUT, REPLICAS, SENDER, SETTINGS, finishes_like_an_honest_run, started, told

ASKING = ("moniqua", "moniqua-d2", *REPLICAS)


@pytest.mark.parametrize("algorithm", sorted(SETTINGS.keys() - set(ASKING)))
def test_who_has_no_repairs_is_asked_for_none(algorithm: str) -> None:
    world = started(algorithm)
    _, honest = world.until()
    for phase in (0, 1):
        request = Message(MessageKind.REPAIR_REQUEST, SENDER, honest.round - 1, phase, wanted=(RepairWish(0, 0, 0),))
        world.refuses(0, request, "REPAIR_REQUEST in phase")
        repair = Message(MessageKind.REPAIR, SENDER, honest.round, phase, layers=_whole(), layer_ids=(0,))
        world.refuses(0, repair, "REPAIR in phase")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", ASKING)
def test_requests_that_cannot_be_answered_are_refused(algorithm: str) -> None:
    world = started(algorithm)
    _, honest = world.until()
    request = _request(algorithm, honest.round - 1)
    world.peers[1].connected(SENDER, world.peers[1].links.out[SENDER].acknowledged)
    world.refuses(0, told(request, phase=7), "REPAIR_REQUEST in phase 7")
    world.refuses(0, told(request, phase=1 << 62), "REPAIR_REQUEST in phase")
    for far in (world.rounds, 1 << 62, 1 << 63, (1 << 64) - 1):
        world.refuses(0, told(request, round=far), "in a run of 7")
    world.refuses(0, told(request, mixing_weight=0.5), "told the weights")
    world.refuses(0, told(request, wanted=()), "no layer|which is over")
    world.refuses(0, told(request, wanted=(RepairWish(0, 64, 16),)), "does not keep|bits above 64|over")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", ASKING)
def test_a_request_for_a_round_to_come_is_refused_where_no_power_cut_can_have_undone_it(algorithm: str) -> None:
    world = started(algorithm, durability="power")
    world.until()
    world.refuses(0, _request(algorithm, world.rounds - 1), "not sent yet")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", ASKING)
def test_elsewhere_the_newest_one_waits_for_that_round(algorithm: str) -> None:
    world = started(algorithm)
    world.until()
    victim, disk = world.peers[1], world.disks[1]
    before, frame = len(disk.operations), wire.encode(_request(algorithm, world.rounds - 1), LAYOUT)
    assert not any(victim.receive(SENDER, 0, frame, world.now).frames for _ in range(100))
    assert len(disk.operations) == before
    finishes_like_an_honest_run(world)


def _request(algorithm: str, round_: int) -> Message:
    phase = int(algorithm.startswith("moniqua"))
    return Message(MessageKind.REPAIR_REQUEST, SENDER, round_, phase, wanted=(RepairWish(0, 0, 0),))


@pytest.mark.parametrize("algorithm", ["moniqua", "moniqua-d2"])
def test_a_request_for_bits_that_no_receiver_can_use_is_refused(algorithm: str) -> None:
    world = started(algorithm)
    _, honest = world.until(MessageKind.REPAIR, at_round=0)
    # As after a reconnection: requests are answered once.
    world.peers[1].connected(SENDER, world.peers[1].links.out[SENDER].acknowledged)
    for known, more in ((52, 16), (52, 1), (37, 16), (0, 4)):
        request = Message(MessageKind.REPAIR_REQUEST, SENDER, honest.round, 1, wanted=(RepairWish(0, known, more),))
        world.refuses(0, request, f"asks for {more} bits above {known}")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", REPLICAS)
def test_a_request_is_answered_once_on_a_connection(algorithm: str) -> None:
    world = started(algorithm)
    _, honest = world.until()
    request = Message(MessageKind.REPAIR_REQUEST, SENDER, honest.round - 1, wanted=(RepairWish(0, 0, 0),))
    victim, frame = world.peers[1], wire.encode(request, LAYOUT)
    answers = [len(victim.receive(SENDER, 0, frame, world.now).frames) for _ in range(20)]
    assert answers == [1] + [0] * 19
    victim.connected(SENDER, victim.links.out[SENDER].acknowledged)
    assert len(victim.receive(SENDER, 0, frame, world.now).frames) == 1


@pytest.mark.parametrize("algorithm", REPLICAS)
@pytest.mark.parametrize("reconnects", [True, False])
def test_who_asks_for_the_same_without_end_is_refused(algorithm: str, reconnects: bool) -> None:
    world = started(algorithm)
    _, honest = world.until()
    request = Message(MessageKind.REPAIR_REQUEST, SENDER, honest.round - 1, wanted=(RepairWish(0, 0, 0),))
    victim, frame = world.peers[1], wire.encode(request, LAYOUT)

    def ask() -> int:
        if reconnects:
            victim.connected(SENDER, victim.links.out[SENDER].acknowledged)
        return len(victim.receive(SENDER, 0, frame, world.now).frames)

    answers = sum(ask() for _ in range(33))
    with pytest.raises(RemoteProtocolError, match="same repair again and again"):
        ask()
    assert answers == (33 if reconnects else 1)
    # What it cannot have asked for yet is answered all the same, and so are others.
    later = world.now + 10.0
    victim.connected(SENDER, victim.links.out[SENDER].acknowledged)
    assert len(victim.receive(SENDER, 0, frame, later).frames) == 1
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", REPLICAS)
def test_a_replica_that_nobody_asked_for_is_dropped(algorithm: str) -> None:
    world = started(algorithm)
    _, honest = world.until()
    victim, disk = world.peers[1], world.disks[1]
    repair = Message(MessageKind.REPAIR, SENDER, honest.round, layers=_whole(), layer_ids=(0,))
    before = len(disk.operations)
    assert not victim.receive(SENDER, 0, wire.encode(repair, LAYOUT), world.now).frames
    assert len(disk.operations) == before
    for value in (np.inf, np.nan, 3e38):
        world.refuses(0, told(repair, layers=_whole(value)), "numbers up to")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", ["moniqua", "moniqua-d2"])
def test_a_repair_of_other_bits_is_refused_and_asked_for_still(algorithm: str) -> None:
    world = started(algorithm)
    _, honest = world.until(MessageKind.REPAIR, at_round=0)
    layers = honest.layers
    for number, layer in enumerate(layers):
        lies = [WholeIntegers(np.zeros(_size(honest, number), np.int64))]
        lies += [WholeIntegers(np.full(_size(honest, number), value, np.int64)) for value in (1 << 62, -(1 << 63))]
        for lie in lies:
            world.refuses(0, told(honest, layers=(*layers[:number], lie, *layers[number + 1 :])), "integers")
        if isinstance(layer, MoreBits):
            other = dataclasses.replace(layer, low=layer.low + 1)
            world.refuses(0, told(honest, layers=(*layers[:number], other, *layers[number + 1 :])), "other bits")
    finishes_like_an_honest_run(world)


def _whole(value: float = 1.0) -> tuple[WholeIntegers, ...]:
    return (WholeIntegers(np.full(LAYOUT.sizes[0], value, np.float32).view(np.int32).astype(np.int64)),)


def _size(repair: Message, position: int) -> int:
    assert repair.layer_ids is not None
    return LAYOUT.sizes[repair.layer_ids[position]]
