"""Exchanges of pairs: halves of ½, of numbers that can be counted, answered by who was asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from peer import wire
from peer.compress.layout import Layout
from peer.compress.payload import Dense, ValueType
from peer.errors import RemoteProtocolError
from peer.node.durable_pair import REFUSALS_MAX, DurablePair
from peer.node.pair_participant import PairParticipant
from peer.wire.message import Message, MessageKind, RepairWish
from tests.node.local_steps import SIZES
from tests.node.test_durable_pair import World

LAYOUT = Layout.of_sizes(SIZES)
ALGORITHMS = ("ad-psgd", "moniqua-ad-psgd")


def asked(algorithm: str) -> tuple[World, int, int, Message]:
    """Return a world in which peer 0 has asked another; who that is, a third peer, and the request."""
    world = World(algorithm)
    world.start()
    world.perform(0, world.peers[0].read(0.0))
    partner = world.peers[0].participant.open_partner
    assert partner is not None
    return world, partner, 3 - partner, wire.decode(world.queues[0, partner][0].frame, LAYOUT)


def refuses(victim: DurablePair, sender: int, lie: Message, text: str) -> None:
    """Fail unless a lie is refused in the name of its sender, and nothing has come of it."""
    before = {name: np.array(array).tobytes() for name, array in victim.participant.algorithm.state().items()}
    size = victim.disk_state.journal_bytes
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        victim.receive(sender, wire.encode(lie, LAYOUT), 1.0)
    assert caught.value.peer == sender
    assert {name: np.array(a).tobytes() for name, a in victim.participant.algorithm.state().items()} == before
    assert victim.disk_state.journal_bytes == size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_requests_that_no_honest_peer_makes_are_refused(algorithm: str) -> None:
    world, partner, _, request = asked(algorithm)
    victim = world.peers[partner]
    for weight, u in ((1.0, 1.0), (2.0, 1.0), (-0.5, 1.0), (0.0, 1.0), (0.5, 0.5), (0.5, 1e300)):
        refuses(victim, 0, replace(request, mixing_weight=weight, push_weight=u), "told the weights")
    for number in (1 << 62, (1 << 64) - 1):
        refuses(victim, 0, replace(request, round=number), "speaks of exchange")
        refuses(victim, 0, replace(request, phase=number), "speaks of exchange")
    huge = tuple(Dense(np.full(size, 3e38, np.float32), ValueType.FLOAT32) for size in SIZES)
    refuses(victim, 0, replace(request, layers=huge), "diverged|layer 0 whole, where all send a code")
    for kind in (MessageKind.GOSSIP, MessageKind.NOTHING):
        layers = request.layers if kind is MessageKind.GOSSIP else ()
        refuses(victim, 0, replace(request, kind=kind, layers=layers), "asynchronous run")
    busy = Message(MessageKind.PAIR_BUSY, 0, request.round, mixing_weight=0.5)
    refuses(victim, 0, busy, "told the weights")
    world.run()
    assert world.error() < 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_repairs_of_what_was_not_asked_are_refused(algorithm: str) -> None:
    world, partner, other, request = asked(algorithm)
    initiator = world.peers[0]
    wanted = (RepairWish(0, 64, 16),)
    wish = Message(MessageKind.REPAIR_REQUEST, partner, request.round, 1, wanted=wanted)
    refuses(initiator, partner, wish, "in full|bits above 64")
    refuses(initiator, other, replace(wish, sender=other), "which is over")
    refuses(initiator, partner, replace(wish, round=request.round + 1), "which is over")


def test_a_request_for_bits_that_no_receiver_can_use_is_refused() -> None:
    world, partner, _, request = asked("moniqua-ad-psgd")
    for wanted in (RepairWish(0, 52, 16), RepairWish(0, 37, 16)):
        wish = Message(MessageKind.REPAIR_REQUEST, partner, request.round, 1, wanted=(wanted,))
        refuses(world.peers[0], partner, wish, "asks for 16 bits above")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_partner_that_only_lies_does_not_keep_a_peer_for_ever(algorithm: str) -> None:
    world, partner, _, request = asked(algorithm)
    initiator = world.peers[0]
    lie = replace(request, kind=MessageKind.PAIR_REPLY, sender=partner, mixing_weight=1.0, phase=0)
    for _ in range(REFUSALS_MAX - 1):
        refuses(initiator, partner, lie, "told the weights")
        assert initiator.participant.open_partner == partner
    effects = initiator.receive(partner, wire.encode(lie, LAYOUT), 1.0)
    assert [error.peer for error in effects.refused] == [partner]
    request_after = effects.open_request
    assert request_after is None or wire.decode(request_after.frame, LAYOUT).round > request.round
    # What was given up is given up after a restart as well.
    world.perform(0, effects)
    x = initiator.participant.algorithm.x.tobytes()
    world.restart(0)
    assert world.peers[0].participant.algorithm.x.tobytes() == x
    assert isinstance(world.peers[0].participant, PairParticipant)
