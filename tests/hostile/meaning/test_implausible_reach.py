"""Numbers that can be added up, and that no honest peer sends: no message moves a model further than honest ones do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from peer import wire
from peer.compress.payload import Dense, FloatArray, ValueType, WholeIntegers
from peer.errors import DivergenceError, RemoteProtocolError
from peer.gossip.plausibility import HALF, OWN_MODEL, SENT, Reaches, norm_of
from peer.node.local_steps import LocalSteps, StepResult
from peer.state.journal import Received
from peer.wire.message import Message, MessageKind
from tests.cluster import OnItsWay
from tests.hostile.meaning.liars import (
    LAYOUT,
    REPLICAS,
    SENDER,
    SETTINGS,
    LiarWorld,
    finishes_like_an_honest_run,
    started,
)
from tests.hostile.meaning.test_pairs import asked, refuses
from tests.node.local_steps import SIZES
from tests.state.failing_disk import ProcessEnds
from tests.stress.plausible import blown_up, largest_lie

TOO_FAR = "sent what no honest peer does"
SEND_FIRST = ("d-psgd", "naive-quantized")
"""Algorithms whose message is made before the step of its round."""
COMPARED = sorted(SETTINGS.keys() - {"moniqua", "moniqua-d2"})
"""Those whose numbers say how large they are: a modulo code says how far they are from the receiver's."""
SHORTEN = ("compressed-allreduce", "low-rank")
"""Those that contribute as much as others let by, and no more."""


@pytest.mark.parametrize("largest", [1e30, 1e6])
@pytest.mark.parametrize("algorithm", sorted(SETTINGS))
def test_absurd_numbers_are_refused_before_the_journal(algorithm: str, largest: float) -> None:
    world = started(algorithm)
    seq, honest = world.until(at_round=0)
    for _ in range(3):
        # Once, and whenever it comes again.
        world.refuses(seq, blown_up(honest, largest), TOO_FAR)
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", COMPARED)
def test_a_little_more_than_passes_is_refused_and_a_little_less_ends_nobody(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    victim = world.peers[1].participant
    world.refuses(seq, largest_lie(victim, honest, 1.12), TOO_FAR)
    # A copy keeps it: what its sender adds to it afterwards would be refused beside more.
    share = 0.5 if algorithm in REPLICAS else 0.9
    world.queues[SENDER, 1][0] = OnItsWay(seq, wire.encode(largest_lie(victim, honest, share), LAYOUT))
    # All honest peers take what the others make of it, to the last round.
    world.run()
    assert {peer.round for peer in world.peers.values()} == {world.rounds}


@pytest.mark.parametrize("algorithm", COMPARED)
def test_what_a_journal_holds_already_is_repeated(algorithm: str) -> None:
    # Releases before 0.3 took such messages, and what they sent since rests on them.
    world = started(algorithm)
    seq, honest = world.until()
    lie = wire.encode(blown_up(honest, 1e6), LAYOUT)
    world.peers[1].disk_state.append(Received(world.now, SENDER, seq, lie))
    recovery = world.restart(1)
    assert recovery.notices == []
    assert world.peers[1].links.incoming[SENDER].last_seq == seq


@pytest.mark.parametrize("algorithm", COMPARED)
def test_from_a_poisoned_journal_all_go_back_to_a_round_before(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until(at_round=4)
    lie = wire.encode(blown_up(honest, 1e6), LAYOUT)
    world.peers[1].disk_state.append(Received(world.now, SENDER, seq, lie))
    world.restart(1)
    assert [peer.disk_state.go_back(3) for peer in world.peers.values()] == [3, 3, 3]
    for disk in world.disks.values():
        disk.restart()
    world.start()
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", REPLICAS)
def test_layers_of_a_replica_that_were_asked_for_are_compared_too(algorithm: str) -> None:
    world = started(algorithm)
    _, honest = world.until()
    spelled = np.full(LAYOUT.sizes[0], 1e6, np.float32).view(np.int32).astype(np.int64)
    repair = Message(MessageKind.REPAIR, SENDER, honest.round, layers=(WholeIntegers(spelled),), layer_ids=(0,))
    with patch.object(world.peers[1].participant, "expects", lambda repair: True):
        world.refuses(0, repair, TOO_FAR)


@pytest.mark.parametrize("largest", [1e30, 1e6])
def test_an_exchange_with_such_a_model_is_refused(largest: float) -> None:
    world, partner, _, request = asked("ad-psgd")
    layers = tuple(Dense(np.full(size, largest, np.float32), ValueType.FLOAT32) for size in SIZES)
    refuses(world.peers[partner], 0, replace(request, layers=layers), TOO_FAR)
    world.run()
    assert world.error() < 1e-5


def test_the_refusal_names_the_sender_and_the_bound() -> None:
    world = started("sgp")
    seq, honest = world.until()
    with pytest.raises(RemoteProtocolError, match=r"peer 0: sent what .* round \d+: it moves .* 7.94e\+06, and .* is"):
        world.peers[1].receive(SENDER, seq, wire.encode(blown_up(honest, 1e6), LAYOUT), world.now)


def lied_to(algorithm: str, share: float = 0.9) -> LiarWorld:
    """Return a world in which peer 1 is about to take a share of the largest message that passes."""
    world = started(algorithm)
    seq, honest = world.until()
    lie = largest_lie(world.peers[1].participant, honest, share)
    world.queues[SENDER, 1][0] = OnItsWay(seq, wire.encode(lie, LAYOUT))
    return world


@pytest.mark.parametrize("algorithm", COMPARED)
def test_who_moved_the_model_unusually_far_is_named_where_a_peer_ends_and_nobody_else(algorithm: str) -> None:
    world, honest = lied_to(algorithm), started(algorithm)
    participant, (seq, lie, _) = world.peers[1].participant, world.queues[SENDER, 1][0]
    assert participant.reaches.suspicion(participant.round, "peer-{}".format) == ""
    world.peers[1].receive(SENDER, seq, lie, world.now)
    assert participant.reaches.suspicion(participant.round, "peer-{}".format).startswith(
        f"; a message of peer-{SENDER} moved the model by "
    )
    honest.run()
    assert [each.participant.reaches.suspicion(each.round, "peer-{}".format) for each in honest.peers.values()] == [
        "",
        "",
        "",
    ]


@pytest.mark.parametrize("largest", [1e30, 1e6])
@pytest.mark.parametrize("algorithm", sorted(set(COMPARED) - set(SHORTEN)))
def test_a_peer_ends_rather_than_send_what_others_refuse(algorithm: str, largest: float) -> None:
    world = started(algorithm)
    world.until(at_round=1)
    peer, disk = world.peers[2], world.disks[2]
    while peer.participant.session.in_round:
        world.turn(2)
        world.turn(1)
        world.turn(0)
    written = len(disk.operations)
    for _ in range(2):
        # However often it is started: nothing of that step is in the journal.
        peer.step()
        step = peer.participant._step
        assert step is not None
        (step.gradient if algorithm not in SEND_FIRST else peer.participant.algorithm.x)[:] = largest
        with pytest.raises(DivergenceError, match=r"moves a model by .*lower the learning rate"):
            peer.begin(world.now)
        assert len(disk.operations) == written
        world.restart(2)
        peer = world.peers[2]
        written = len(disk.operations)


@pytest.mark.parametrize("algorithm", SHORTEN)
def test_a_contribution_is_shortened_to_what_others_let_by(algorithm: str) -> None:
    world = started(algorithm)
    world.until(at_round=2)
    participant = world.peers[2].participant
    length = 0.4 * participant.reaches.allowed(2) / participant.local_steps.rate(2)

    def longer(steps: LocalSteps, z: FloatArray, t: int, *arguments: float) -> StepResult:
        step = really_gradient(steps, z, t, *arguments)
        if steps is participant.local_steps and t == 3:
            step.gradient[:] = length / np.sqrt(z.size)
        return step

    really_shorten, shares = type(participant.reaches).share_of_step, []

    def share_of_step(reaches: Reaches, *arguments: Any) -> float:
        shares.append(really_shorten(reaches, *arguments))
        return shares[-1]

    steps = type(participant.local_steps)
    really_gradient = steps.gradient
    with patch.object(Reaches, "share_of_step", share_of_step), patch.object(steps, "gradient", longer):
        world.run()
    assert min(shares) < 1.0
    assert {peer.round for peer in world.peers.values()} == {world.rounds}, "nobody refuses it"


@pytest.mark.parametrize("algorithm", COMPARED)
def test_what_a_peer_sent_already_is_not_asked_again(algorithm: str) -> None:
    # A release before 0.3 asked nothing.
    world = started(algorithm)
    world.until(at_round=1)
    with (
        patch.object(Reaches, "check_own", lambda *message: None),
        patch.object(Reaches, "check", lambda *message: None),
        patch.object(Reaches, "share_within", lambda *change: 1.0),
        patch.object(Reaches, "share_of_step", lambda *change: 1.0),
    ):
        vars(world.peers[2].participant.local_steps)["target"][:] = 1e6
        world.run()
    before = world.models()
    for peer in range(3):
        assert world.restart(peer).notices == []
    assert world.models() == before


def test_what_is_known_of_others_survives_a_crash() -> None:
    world = started("quant-sgp", rounds=8)
    world.run()
    known = [peer.participant.reaches.state()["reaches"].tolist() for peer in world.peers.values()]
    for peer in range(3):
        sent = {SENT - other for other in range(3) if other != peer}
        assert {int(row[0]) for row in known[peer]} == {OWN_MODEL, 0, 1, 2} | sent
        world.restart(peer)
    assert [peer.participant.reaches.state()["reaches"].tolist() for peer in world.peers.values()] == known


def test_whoever_takes_the_whole_room_in_every_round_is_refused_by_name() -> None:
    reaches, message = started("sgp").peers[1].participant.reaches, Message(MessageKind.GOSSIP, SENDER, 3)
    furthest = reaches.allowed(SENDER)
    reaches.check(3, message, furthest, lambda: 0.0)
    reaches.note(3, SENDER, furthest)
    # Another one may still reach as far.
    assert reaches.allowed(2) == pytest.approx(furthest)
    with pytest.raises(RemoteProtocolError, match=f"peer {SENDER}: {TOO_FAR}"):
        reaches.check(4, message, furthest, lambda: furthest)


def test_room_comes_back_and_what_was_reached_costs_nothing() -> None:
    reaches = started("sgp").peers[1].participant.reaches
    before = reaches.allowed(SENDER)
    reaches.note(3, SENDER, before / 3.0)
    after = reaches.allowed(SENDER)
    for _ in range(200):
        reaches.note(3, SENDER, before / 3.0)
    assert before == pytest.approx(after, rel=0.01)
    assert reaches.allowed(SENDER) > 1.2 * after


@pytest.mark.parametrize("rows", [[[1.0, 7.0], [0.0, 90.0]], None])
def test_behind_a_state_of_an_earlier_release_nothing_is_shortened(rows: list[list[float]] | None) -> None:
    # The first states of 0.3 held two columns, those of 0.2 nothing: their journals hold what was sent whole.
    reaches = started("sgp").peers[1].participant.reaches
    reaches.restore({} if rows is None else {"reaches": np.array(rows)}, lambda: 5.0)
    assert reaches.allowed(SENDER, share=0.0) == pytest.approx(5.0 if rows is None else 90.0)
    reaches.note(3, SENDER, 1e3)
    assert reaches.share_within(3, np.ones(8), lambda: np.full(8, 1e6)) == 1.0
    assert "suspect" not in reaches.state()


@pytest.mark.parametrize("change", [[1e6, 0.0], [-1e6, 0.0], [3e3, -4e3], [1.0, 1.0]])
def test_a_change_is_shortened_so_that_the_model_stays_where_own_messages_may_reach(change: list[float]) -> None:
    reaches, x = started("sgp").peers[1].participant.reaches, np.array([60.0, 20.0])
    assert reaches.share_within(3, x, lambda: np.array(change)) == 1.0, "nobody moved the model"
    reaches.note(3, SENDER, 0.9 * reaches.allowed(SENDER))
    limit = reaches.allowed(OWN_MODEL, share=HALF)
    share = reaches.share_within(3, x, lambda: np.array(change))
    assert np.linalg.norm(x + share * np.array(change)) <= limit * (1.0 + 1e-9)
    assert share == 1.0 or np.linalg.norm(x + 1.001 * share * np.array(change)) > limit


@pytest.mark.parametrize("algorithm", ["d-psgd", "sgp", "d2"])
def test_a_shortened_step_is_repeated_behind_a_kill(algorithm: str) -> None:
    """Gradients are a thousand times as long where the lie moves the model."""

    def exploding(steps: LocalSteps, z: FloatArray, *arguments: Any) -> StepResult:
        step = really_gradient(steps, z, *arguments)
        if norm_of(z) > 20.0:
            step.gradient[:] *= 1e3
        return step

    def attacked() -> LiarWorld:
        return lied_to(algorithm, 0.5 if algorithm in REPLICAS else 0.9)

    world = attacked()
    steps = type(world.peers[1].participant.local_steps)
    really_gradient = steps.gradient
    with patch.object(steps, "gradient", exploding):
        first = len(world.disks[1].operations)
        world.run()
        assert world.peers[1].participant.reaches.has_shortened
        assert {peer.round for peer in world.peers.values()} == {world.rounds}, "nobody ended"
        for at in range(first, len(world.disks[1].operations)):
            again = attacked()
            again.disks[1].end_at = at
            with pytest.raises(ProcessEnds):
                again.run()
            assert again.restart(1).notices == []
            again.run()
            # Where the lie was lost with the process, nothing was shortened.
            assert again.models() == world.models() or not again.peers[1].participant.reaches.has_shortened


@pytest.mark.parametrize("algorithm", ["sgp", "quant-sgp", "allreduce", "d2"])
def test_a_kill_at_any_operation_of_the_disk_repeats_what_was_let_by(algorithm: str) -> None:
    # A copy keeps it: what its sender adds to it afterwards would be refused beside more.
    share = 0.5 if algorithm in REPLICAS else 0.9
    world, honest = lied_to(algorithm, share), started(algorithm)
    first = len(world.disks[1].operations)
    world.run()
    honest.run()
    assert world.models() != honest.models()
    for at in range(first, len(world.disks[1].operations)):
        again = lied_to(algorithm, share)
        again.disks[1].end_at = at
        with pytest.raises(ProcessEnds):
            again.run()
        assert again.restart(1).notices == []
        again.run()
        # Where the lie was lost with the process, its sender says under that number what it has: the honest message.
        assert again.models() in (world.models(), honest.models())
