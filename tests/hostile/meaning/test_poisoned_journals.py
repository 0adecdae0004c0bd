"""A journal of an earlier release may hold what is refused today: it was written before it was judged."""

from __future__ import annotations

import pytest

from peer import wire
from peer.state.journal import Received
from tests.hostile.meaning.liars import LAYOUT, SENDER, SETTINGS, finishes_like_an_honest_run, started, told


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_poisoned_record_is_left_out_with_a_sentence(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until(at_round=4)
    lie = wire.encode(told(honest, mixing_weight=2.0), LAYOUT)
    # The journal goes on after it, as that of a peer that died in its next round.
    world.peers[1].disk_state.append(
        Received(world.now, SENDER, seq, lie), Received(world.now, SENDER, seq + 1, wire.encode(honest, LAYOUT))
    )
    recovery = world.restart(1)
    (sentence,) = recovery.notices
    assert "left out a frame that is refused: peer 0: told the weights 2 and" in sentence
    assert world.peers[1].links.incoming[SENDER].last_seq == seq - 1
    finishes_like_an_honest_run(world)


def test_a_poisoned_frame_of_a_checkpoint_is_left_out_and_asked_for_again() -> None:
    world = started("sgp", save_every=1, lag=lambda sender, number: 2 * (sender == 2))
    victim = world.peers[1]
    while not victim._peer.waiting.all() or victim.participant.session.in_round:
        world.now += 1.0
        for peer in (0, 1, 2):
            world.turn(peer)
    kept = victim._peer.waiting.all()[-1]
    poisoned = wire.encode(told(wire.decode(kept.frame, LAYOUT), mixing_weight=2.0), LAYOUT)
    victim._peer.waiting._frames[kept.peer][-1] = type(kept)(kept.peer, kept.seq, poisoned)
    victim.save({}, anew=True)
    recovery = world.restart(1)
    (sentence,) = recovery.notices
    assert "the checkpoint holds a frame that is refused" in sentence
    assert world.peers[1].links.incoming[kept.peer].last_seq == kept.seq - 1
