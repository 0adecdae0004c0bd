"""A message belongs to a round of the run and to an exchange of its algorithm, and comes in its turn."""

from __future__ import annotations

import numpy as np
import pytest

from peer import wire
from peer.compress import block_float
from peer.gossip.mixing import whole
from peer.wire.message import Message, MessageKind
from tests.hostile.meaning.liars import (
    LAYOUT,
    PUSH_SUM,
    RECEIVER,
    SENDER,
    SETTINGS,
    finishes_like_an_honest_run,
    started,
    told,
)

PART = block_float.encode(np.ones(9), np.array([9], np.int64), 8)


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_rounds_that_the_run_does_not_have_are_refused(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    for round_ in (world.rounds, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        world.refuses(seq, told(honest, round=round_), "in a run of 7")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_message_in_the_name_of_another_peer_is_refused(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    for sender in (RECEIVER, 2, 99, 1 << 31, (1 << 63) - 1):
        world.refuses(seq, told(honest, sender=sender), "in the name of peer|names peer|sender")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_number_that_was_used_brings_nothing_new_and_one_too_far_is_refused(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until(at_round=1)
    victim, lie = world.peers[RECEIVER], wire.encode(told(honest, round=honest.round + 1), LAYOUT)
    before = victim.links.received(), victim.participant.algorithm.x.tobytes()
    for used in range(1, seq):
        for content in (lie, b"whatever it is"):
            assert not victim.receive(SENDER, used, content, world.now).frames
    assert (victim.links.received(), victim.participant.algorithm.x.tobytes()) == before
    for far in (seq + 1, 1 << 63, (1 << 64) - 1):
        world.refuses(far, honest, f"where {seq} is next")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_round_out_of_turn_is_refused(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    for round_ in (honest.round - 1, honest.round + 1, honest.round + 3):
        world.refuses(seq, told(honest, round=round_), "out of turn")
    finishes_like_an_honest_run(world)


def test_a_message_that_is_due_cannot_follow_one_that_waits() -> None:
    # It was journaled and applied, and then refused in nobody's name.
    world = started("d-psgd", rounds=12, max_lead=2)
    seq, honest = world.until(at_round=0)
    early = wire.encode(told(honest, round=9), LAYOUT)
    assert not world.peers[RECEIVER].receive(SENDER, seq, early, world.now).frames
    world.refuses(seq + 1, honest, "of round 0 after later ones")


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_invented_phases_are_refused(algorithm: str) -> None:
    # Each was kept in memory for as long as the run: 373 kB on the wire became 1 GB.
    world = started(algorithm)
    seq, honest = world.until()
    for phase in (honest.phase + 2, 9, (1 << 16) - 2, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, (1 << 64) - 1):
        world.refuses(seq, told(honest, phase=phase), f"sent {honest.kind.name} in phase")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_kinds_of_other_runs_are_refused(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    layers = whole(np.zeros(LAYOUT.size, np.float32), LAYOUT)
    for kind in (MessageKind.PAIR_REQUEST, MessageKind.PAIR_REPLY):
        world.refuses(seq, told(honest, kind=kind, layers=layers), "weights|synchronous")
    other = {MessageKind.GOSSIP, MessageKind.PART} - {honest.kind}
    for kind in other:
        wrong = layers if kind is MessageKind.GOSSIP else PART
        world.refuses(seq, told(honest, kind=kind, layers=wrong), f"sent {kind.name} in phase")
    world.refuses(seq, Message(MessageKind.PAIR_BUSY, SENDER, honest.round), "synchronous")
    nothing = Message(MessageKind.NOTHING, SENDER, honest.round)
    if algorithm in set(PUSH_SUM) - {"quant-sgp"}:
        world.refuses(seq, told(nothing, mixing_weight=0.5), "told the weights")
        world.refuses(seq, told(nothing, round=honest.round + 1), "out of turn")
    else:
        world.refuses(seq, nothing, "sent NOTHING in phase 0|forbids")
    finishes_like_an_honest_run(world)
