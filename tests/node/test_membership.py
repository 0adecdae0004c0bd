"""Peers join, leave and are lost in the midst of a run, whatever is killed around it; see `changing_members`."""

from __future__ import annotations

import numpy as np
import pytest

from peer.errors import ConfigError, RemoteProtocolError, StateError
from peer.gossip.membership import Change, ChangeKind
from peer.gossip.options import RobustMixing, RobustRule
from peer.node.membership_checks import check_notice
from peer.node.membership_codec import encode
from peer.node.membership_planning import plan_change
from tests.node.changing_members import Cluster

pytestmark = pytest.mark.slow

PUSH_SUM = [("sgp", "exponential"), ("sparse-push", "directed-ring"), ("scsp", "ring"), ("quant-sgp", "exponential")]
DOUBLY = [
    ("d-psgd", "ring"), ("deep-squeeze", "ring"), ("choco-sgd", "ring"), ("dcd-psgd", "ring"), ("moniqua", "ring"),
    ("d2", "ring"), ("moniqua-d2", "line"), ("allreduce", "complete"),
    ("low-rank", "complete"), ("compressed-allreduce", "complete"),
]  # fmt: skip
UNSTEADY = [("naive-quantized", "ring"), ("ecd-psgd", "ring")]
"""The mean of these moves by what the compressor leaves out."""


@pytest.mark.parametrize(("algorithm", "graph"), PUSH_SUM)
def test_a_leaving_peer_hands_over_all_its_mass(algorithm: str, graph: str) -> None:
    cluster = Cluster(algorithm, graph, seed=1)
    before = cluster.drift()
    cluster.run(4)
    change = cluster.announce(2, ChangeKind.LEAVE, 2)
    cluster.run(change.effective + 3)
    assert cluster.rounds() == dict.fromkeys((0, 1, 3, 4), change.effective + 3)
    assert cluster.peers[2].participant.membership.has_left
    assert cluster.weight() == pytest.approx(5.0, abs=1e-12)
    np.testing.assert_allclose(cluster.drift(), before, atol=2e-5)


@pytest.mark.parametrize(("algorithm", "graph"), PUSH_SUM)
def test_a_joining_peer_gets_half_of_its_sponsor(algorithm: str, graph: str) -> None:
    cluster = Cluster(algorithm, graph, seed=2)
    before = cluster.drift()
    cluster.run(4)
    change = cluster.announce(1, ChangeKind.JOIN, 5)
    cluster.run(change.effective + 3)
    assert cluster.rounds() == dict.fromkeys(range(6), change.effective + 3)
    assert cluster.weight() == pytest.approx(5.0, abs=1e-12)
    np.testing.assert_allclose(cluster.drift(), before, atol=2e-5)


@pytest.mark.parametrize(("algorithm", "graph"), PUSH_SUM)
def test_what_a_lost_peer_never_received_returns(algorithm: str, graph: str) -> None:
    cluster = Cluster(algorithm, graph, seed=3)
    cluster.run(4)
    cluster.kill(3)
    cluster.run(60)
    waiting = cluster.rounds()
    assert max(waiting.values()) < 12, "its neighbours wait for it"
    change = cluster.declare_lost(3)
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4), 90)
    # What is missing is what the lost peer had, and what it had from others for good: never more than that.
    assert change.effective < 60
    assert 3.0 < cluster.weight() < 5.0
    assert cluster.spread() < 0.5


@pytest.mark.parametrize(("algorithm", "graph"), DOUBLY)
def test_the_mean_is_that_of_those_who_are_there(algorithm: str, graph: str) -> None:
    cluster = Cluster(algorithm, graph, seed=4, gradients_until=8)
    cluster.run(8)
    change = cluster.announce(2, ChangeKind.LEAVE, 2)
    cluster.run(change.effective)
    mean = cluster.drift()
    cluster.run(change.effective + 8)
    np.testing.assert_allclose(cluster.drift(), mean, atol=2e-5)
    change = cluster.announce(0, ChangeKind.JOIN, 5)
    cluster.run(change.effective)
    sponsored = cluster.drift()
    cluster.run(change.effective + 4)
    np.testing.assert_allclose(cluster.drift(), sponsored, atol=2e-5)
    cluster.kill(4)
    cluster.declare_lost(4)
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 1, 3, 5), 90)
    assert cluster.spread() < 0.5


@pytest.mark.parametrize(("algorithm", "graph"), UNSTEADY)
def test_an_unsteady_mean_goes_on_with_other_members(algorithm: str, graph: str) -> None:
    cluster = Cluster(algorithm, graph, seed=4, gradients_until=8)
    cluster.run(4)
    cluster.announce(2, ChangeKind.LEAVE, 2)
    change = cluster.announce(0, ChangeKind.JOIN, 5)
    cluster.run(change.effective + 2)
    cluster.kill(4)
    cluster.declare_lost(4)
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 1, 3, 5), 90)
    assert cluster.spread() < 0.1


@pytest.mark.parametrize("algorithm", ["moniqua", "moniqua-d2"])
def test_codes_are_read_before_anyone_goes(algorithm: str) -> None:
    """With so small a θ neighbours ask for more bits; whoever leaves, or gets other neighbours, answers before that."""
    models = []
    for seed, restarts in ((5, 0.0), (6, 0.02)):
        cluster = Cluster(algorithm, "ring", seed=seed, theta=1e-3, restarts=restarts)
        cluster.run(4)
        cluster.announce(2, ChangeKind.LEAVE, 2)
        cluster.announce(3, ChangeKind.JOIN, 5)
        cluster.run(34)
        assert cluster.rounds() == dict.fromkeys((0, 1, 3, 4, 5), 34)
        assert all(member.algorithm.metrics().repairs for member in cluster.members if member.peer != 5)
        models.append([member.algorithm.x.tobytes() for member in cluster.members])
    assert models[0] == models[1]


def test_a_fixed_theta_bears_other_members() -> None:
    cluster = Cluster("moniqua", "ring", seed=5, theta=8.0, verified=False, gradients_until=8)
    cluster.run(8)
    change = cluster.announce(2, ChangeKind.LEAVE, 2)
    cluster.run(change.effective)
    mean = cluster.drift()
    cluster.run(60)
    np.testing.assert_allclose(cluster.drift(), mean, atol=2e-5)
    assert cluster.spread() < 0.1


@pytest.mark.parametrize("algorithm", ["d2", "moniqua-d2"])
def test_what_was_had_of_a_lost_peer_is_not_added_for_ever(algorithm: str) -> None:
    """D² repeats what its mean did in the last round: without the plain step it would drift by the same in each."""
    cluster = Cluster(algorithm, "ring", seed=6, gradients_until=12)
    cluster.run(6)
    cluster.kill(1)
    cluster.run(60)
    change = cluster.declare_lost(1)
    cluster.run(change.effective + 1)
    mean = cluster.drift()
    cluster.run(90)
    np.testing.assert_allclose(cluster.drift(), mean, atol=1e-3)
    assert cluster.spread() < 0.1


@pytest.mark.parametrize("algorithm", ["allreduce", "low-rank", "compressed-allreduce"])
@pytest.mark.parametrize("seed", range(4))
def test_all_have_one_model_again_after_a_loss(seed: int, algorithm: str) -> None:
    """Some heard the last gradient, or the last sum, of the lost peer and others did not."""
    cluster = Cluster(algorithm, "complete", seed=seed, gradients_until=100)
    cluster.run(4)
    cluster.kill(1)
    cluster.run(60)
    change = cluster.declare_lost(1)
    for rounds in (0, 1, 2, 7):
        cluster.run(change.effective + rounds)
        assert len({member.algorithm.x.tobytes() for member in cluster.members}) == 1


@pytest.mark.parametrize("algorithm", ["low-rank", "compressed-allreduce"])
def test_sums_begin_anew_with_what_all_have_where_members_change(algorithm: str) -> None:
    """A newcomer gets the model alone: whatever else all hold alike has to be the same without a message."""
    cluster = Cluster(algorithm, "complete", seed=3, gradients_until=100)
    cluster.run(5)
    for issuer, kind, subject in ((0, ChangeKind.JOIN, 5), (2, ChangeKind.LEAVE, 2)):
        change = cluster.announce(issuer, kind, subject)
        for rounds in (0, 1, 4):
            cluster.run(change.effective + rounds)
            states = [member.algorithm.state() for member in cluster.members]
            shared = [{k: v.tobytes() for k, v in state.items() if k != "error_memory"} for state in states]
            assert all(each == shared[0] for each in shared)
            assert ("basis" in shared[0]) == (rounds > 0 and algorithm == "low-rank")
    assert all(np.abs(state["error_memory"]).max() > 0 for state in states)


@pytest.mark.parametrize(("algorithm", "graph"), [*PUSH_SUM, *DOUBLY[2:], *UNSTEADY])
def test_kills_around_every_change_leave_no_trace(algorithm: str, graph: str) -> None:
    """A peer leaves and one joins while processes end and start again: the bits are those of the run without that."""
    models = []
    for seed, restarts, is_script in ((5, 0.0, False), (6, 0.01, False), (7, 0.03, False), (8, 0.03, True)):
        cluster = Cluster(algorithm, graph, seed=seed, restarts=restarts, is_script=is_script)
        cluster.run(4)
        cluster.announce(2, ChangeKind.LEAVE, 2)
        cluster.announce(3, ChangeKind.JOIN, 5)
        cluster.run(34)
        assert cluster.rounds() == dict.fromkeys((0, 1, 3, 4, 5), 34)
        models.append([(member.algorithm.x.tobytes(), member.algorithm.u) for member in cluster.members])
    assert all(each == models[0] for each in models)


@pytest.mark.parametrize("rule", ["clipped", "trimmed-mean"])
@pytest.mark.parametrize("algorithm", ["d-psgd", "choco-sgd", "dcd-psgd"])
def test_kills_leave_no_trace_where_mixing_is_robust(algorithm: str, rule: RobustRule) -> None:
    """A peer is lost and one joins; models are numbers, and the same in a run without kills."""
    models = []
    for seed, restarts in ((5, 0.0), (6, 0.03)):
        robust = RobustMixing(rule=rule)
        cluster = Cluster(algorithm, "complete", seed=seed, restarts=restarts, robust=robust)
        cluster.run(4)
        cluster.announce(2, ChangeKind.LEAVE, 2)
        cluster.announce(3, ChangeKind.JOIN, 5)
        cluster.run(34)
        models.append([member.algorithm.x.tobytes() for member in cluster.members])
        cluster.kill(1)
        cluster.run(40)
        cluster.declare_lost(1)
        cluster.run(60)
        assert cluster.rounds() == dict.fromkeys((0, 3, 4, 5), 60)
        assert all(np.isfinite(member.algorithm.x).all() for member in cluster.members)
    assert models[0] == models[1]


@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize("seed", range(len(PUSH_SUM) + len(DOUBLY)))
def test_kills_around_a_loss_lose_nothing(seed: int, is_script: bool) -> None:
    """Whoever is killed around the declaration of a loss takes back what it had given exactly once: the weight that is
    left is that of the run in which nobody else was killed, up to what the lost peer had for good by chance."""
    algorithm, graph = [*PUSH_SUM, *DOUBLY][seed]
    cluster = Cluster(algorithm, graph, seed=seed, restarts=0.02, is_script=is_script)
    cluster.run(4)
    cluster.kill(1)
    cluster.run(60)
    cluster.declare_lost(1)
    cluster.run(60)
    assert cluster.rounds() == dict.fromkeys((0, 2, 3, 4), 60)
    assert 3.0 < cluster.weight() < 5.0
    weight = cluster.weight()
    cluster.run(70)
    assert cluster.weight() == pytest.approx(weight, abs=1e-12)


def test_a_sponsor_that_joined_late_tells_of_itself_too() -> None:
    cluster = Cluster("quant-sgp", "exponential", num_peers=7, seed=14)
    cluster.run(3)
    for issuer, kind, subject in ((3, ChangeKind.LEAVE, 3), (1, ChangeKind.JOIN, 5), (5, ChangeKind.JOIN, 6)):
        change = cluster.announce(issuer, kind, subject)
        cluster.run(change.effective + 2)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4, 5, 6), change.effective + 2)
    assert cluster.weight() == pytest.approx(5.0, abs=1e-12)


def test_two_changes_at_the_same_time_need_no_settling() -> None:
    cluster = Cluster("quant-sgp", "exponential", seed=8)
    cluster.run(3)
    # Neither knows of the other.
    one, two = cluster.announce(0, ChangeKind.LEAVE, 0), cluster.announce(4, ChangeKind.LEAVE, 4)
    assert one.effective == two.effective
    cluster.run(one.effective + 4)
    assert cluster.rounds() == dict.fromkeys((1, 2, 3), one.effective + 4)
    assert cluster.weight() == pytest.approx(5.0, abs=1e-12)


def _sponsored_twice(algorithm: str) -> Cluster:
    """Return a line of three whose ends both let peer 3 join. It has heard of the one that names the later round."""
    cluster = Cluster(algorithm, "line", num_first=3, num_peers=4, seed=8)
    cluster.run(4)
    cluster.cut = {(0, other) for other in (1, 2, 3)}
    earlier = cluster.announce(0, ChangeKind.JOIN, 3)
    cluster.run(5)
    later = cluster.announce(2, ChangeKind.JOIN, 3)
    assert earlier.effective < later.effective
    cluster.cut = {(0, 3)}
    cluster.restart(0)
    cluster.queues[0, 3].clear()
    return cluster


@pytest.mark.parametrize("algorithm", ["sparse-push", "choco-sgd"])
def test_a_newcomer_that_has_heard_of_its_later_sponsor_alone_takes_what_is_sent_for_the_earlier_round(
    algorithm: str,
) -> None:
    cluster = _sponsored_twice(algorithm)
    cluster.run(60)
    cluster.cut = set()
    cluster.restart(0)
    cluster.run(60)
    assert cluster.rounds() == dict.fromkeys(range(4), 60)


def test_all_tell_a_newcomer_of_its_earlier_sponsor() -> None:
    """Else it would wait for ever for the later one, which gives it nothing, once the earlier one is lost."""
    cluster = _sponsored_twice("sparse-push")
    cluster.run(60)
    assert cluster.peers[3].participant.session.waiting_for == (0,)
    cluster.kill(0)
    cluster.run(60)
    cluster.declare_lost(0)
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((1, 2, 3), 90)


def test_a_lost_peer_may_have_been_about_to_leave() -> None:
    cluster = Cluster("sparse-push", "exponential", seed=9)
    cluster.run(3)
    leave = cluster.announce(2, ChangeKind.LEAVE, 2)
    cluster.run(6)
    cluster.kill(2)
    cluster.run(leave.effective - 1)
    # Its heir waits for it no more than anybody else.
    cluster.declare_lost(2)
    cluster.run(60)
    assert cluster.rounds() == dict.fromkeys((0, 1, 3, 4), 60)


@pytest.mark.parametrize("issuer", [0, 2])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_peer_that_is_about_to_leave_hears_of_a_loss_that_cuts_it_off(issuer: int, is_known: bool) -> None:
    """At the end of a line its only neighbour is lost, and the graph without that one counts only after it has left.
    The others wait for it unless they hear that it leaves."""
    cluster = Cluster("choco-sgd", "line", num_first=4, num_peers=4, seed=9)
    cluster.run(4)
    leave = cluster.announce(0, ChangeKind.LEAVE, 0)
    if is_known:
        cluster.run(9)
    cluster.kill(1)
    cluster.run(60)
    assert max(cluster.rounds().values()) < leave.effective
    cluster.announce(issuer, ChangeKind.LOST, 1)
    cluster.run(60)
    assert cluster.rounds() == {2: 60, 3: 60}
    assert cluster.peers[0].participant.membership.has_left
    assert cluster.peers[0].round == leave.effective


@pytest.mark.parametrize("upto", [6, 60])
@pytest.mark.parametrize(("algorithm", "graph"), [*PUSH_SUM, *DOUBLY])
def test_a_peer_may_be_lost_before_it_joins(algorithm: str, graph: str, upto: int) -> None:
    """At once, or when the others wait for what it says as it joins: its sponsor has the share that it did not get."""
    cluster = Cluster(algorithm, graph, seed=4)
    cluster.run(4)
    join = cluster.announce(1, ChangeKind.JOIN, 5)
    cluster.kill(5)
    cluster.run(upto)
    assert max(cluster.rounds().values()) <= join.effective + 5
    lost = cluster.declare_lost(5)
    assert lost.effective > join.effective
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys(range(5), 90)
    assert cluster.weight() == pytest.approx(5.0, abs=1e-12)
    assert cluster.spread() < 0.5


@pytest.mark.parametrize("seed", range(4))
def test_a_share_that_others_have_heard_of_does_not_return(seed: int) -> None:
    """A peer is lost that has joined: one neighbour has its first message, and its sponsor still waits for its replica
    when it hears of the loss."""
    cluster = Cluster("quant-sgp", "ring", num_first=4, num_peers=5, seed=seed)
    cluster.run(4)
    join = cluster.announce(3, ChangeKind.JOIN, 4)
    cluster.cut.add((4, 3))
    cluster.run(90)
    assert cluster.rounds()[3] == join.effective - 1
    assert cluster.rounds()[4] == join.effective
    assert cluster.peers[0].participant.session.last_heard(4) == join.effective
    cluster.kill(4)
    cluster.announce(3, ChangeKind.LOST, 4)
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys(range(4), 90)
    # Less what the lost peer had; more would be what it had given away and its sponsor took back.
    assert cluster.weight() < 4.0


@pytest.mark.parametrize("seed", range(4))
def test_a_peer_whose_sponsor_is_lost_joins_with_next_to_nothing(seed: int) -> None:
    """Nobody else can give it the half that its sponsor had promised; its neighbours' models are its model at once."""
    cluster = Cluster("sgp", "exponential", seed=seed)
    cluster.run(4)
    change = cluster.announce(1, ChangeKind.JOIN, 5)
    cluster.kill(1)
    cluster.run(60)
    cluster.declare_lost(1)
    cluster.run(change.effective)
    assert cluster.weight() < 5.0
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 2, 3, 4, 5), 90)
    assert cluster.spread() < 0.5


@pytest.mark.parametrize("algorithm", ["allreduce", "low-rank", "compressed-allreduce"])
@pytest.mark.parametrize("seed", range(3))
def test_a_peer_that_hears_late_of_a_loss_before_its_first_round_takes_the_model_of_the_first(
    algorithm: str, seed: int
) -> None:
    """A joining peer knows of its own joining first, and waits for its sponsor; after a loss the first member gives."""
    cluster = Cluster(algorithm, "complete", seed=seed)
    cluster.run(4)
    join = cluster.announce(2, ChangeKind.JOIN, 5)
    cluster.kill(4)
    assert cluster.declare_lost(4).effective == join.effective
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 3, 5), 90)
    assert cluster.spread() == 0.0


def test_without_push_sum_there_is_no_joining_without_a_sponsor() -> None:
    cluster = Cluster("d-psgd", "ring", seed=1)
    cluster.run(4)
    cluster.announce(1, ChangeKind.JOIN, 5)
    cluster.kill(1)
    cluster.run(60)
    cluster.declare_lost(1)
    with pytest.raises(StateError, match="the sponsor of this peer was lost"):
        cluster.run(60)


def test_nobody_runs_ahead_of_those_who_have_not_heard_of_a_loss() -> None:
    """On a line whose middle is lost the ends hear nobody until the graph without it counts."""
    cluster = Cluster("choco-sgd", "line", num_first=3, num_peers=3, seed=2)
    cluster.run(4)
    cluster.kill(1)
    cluster.run(60)
    waiting = cluster.rounds()
    change = plan_change(cluster.peers[0].participant.membership, ChangeKind.LOST, 1)
    deed = cluster.peers[0].announce(change, 0.0)
    cluster.run(60)
    assert cluster.rounds() == waiting, "peer 2 has said nothing of it"
    assert cluster.peers[0].participant.session.waiting_for == (2,)
    cluster.perform(0, deed)
    cluster.run(60)
    assert cluster.rounds() == {0: 60, 2: 60}


@pytest.mark.parametrize(
    ("algorithm", "graph"), [("sparse-push", "exponential"), ("choco-sgd", "ring"), ("d2", "ring")]
)
def test_two_peers_are_lost_at_once(algorithm: str, graph: str) -> None:
    """The second can say nothing of the first: all wait for it until it is given up too."""
    cluster = Cluster(algorithm, graph, seed=5)
    cluster.run(4)
    cluster.kill(1)
    cluster.kill(3)
    cluster.run(60)
    cluster.declare_lost(1)
    cluster.run(60)
    assert {member.session.waiting_for for member in cluster.members} == {(3,)}
    cluster.declare_lost(3)
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 2, 4), 90)
    assert cluster.spread() < 0.5


def test_all_go_by_who_heard_most_of_a_lost_peer() -> None:
    cluster = Cluster("sgp", "exponential", seed=3)
    cluster.run(4)
    cluster.kill(3)
    cluster.run(60)
    heard = {p.peer: p.session.last_heard(3) for p in cluster.members}
    cluster.declare_lost(3)
    cluster.run(60)
    reports = {change.issuer: change.heard_round for change in cluster.members[0].membership.changes}
    assert reports == {peer: round_ or 0 for peer, round_ in heard.items()}


def test_changes_that_cannot_be_are_refused() -> None:
    cluster = Cluster("sparse-push", seed=10)
    cluster.run(2)
    participant = cluster.peers[0].participant
    with pytest.raises(ConfigError, match="peer 5 is no member"):
        plan_change(participant.membership, ChangeKind.LOST, 5)
    with pytest.raises(ConfigError, match="peer 1 is a member"):
        plan_change(participant.membership, ChangeKind.JOIN, 1)
    cluster.announce(0, ChangeKind.LEAVE, 0)
    with pytest.raises(ConfigError, match="about to"):
        plan_change(participant.membership, ChangeKind.JOIN, 5)
    with pytest.raises(RemoteProtocolError, match="says that peer 3"):
        cluster.peers[1].receive(0, cluster.peers[1].links.incoming[0].last_seq + 1, _leave_of_another(), 0.0)
    membership = cluster.peers[1].participant.membership
    for change, text in (
        (Change(ChangeKind.LOST, 1, 2, 50), "told this peer of its own LOST"),
        (Change(ChangeKind.LOST, 4, 1, 50), "in the name of peer 1"),
        (Change(ChangeKind.LOST, 4, 2, 1), "round 1, which is past"),
        (Change(ChangeKind.LOST, 5, 2, 50), "peer 5, which is no member"),
        (Change(ChangeKind.JOIN, 3, 2, 50), "a member from the start"),
        (Change(ChangeKind.LOST, 4, 2, 50, 50), "was heard in round 50"),
        (Change(ChangeKind.LOST, 4, 2, 200), "a run of 100"),
        (Change(ChangeKind.LEAVE, 4, 4, 100), "a run of 100"),
    ):
        with pytest.raises(RemoteProtocolError, match=text) as caught:
            check_notice(membership, change, 2)
        assert caught.value.peer == 2
        assert change not in membership.changes


def test_a_peer_may_be_lost_in_the_last_rounds() -> None:
    """No round without it will ever come; but those that are left need not wait for it."""
    cluster = Cluster("sgp", seed=4)
    cluster.run(95)
    cluster.kill(3)
    cluster.run(100)
    assert max(cluster.rounds().values()) < 100
    change = cluster.declare_lost(3)
    assert change.effective >= 100
    cluster.run(100)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4), 100)
    with pytest.raises(ConfigError, match="the run ends after round 99"):
        plan_change(cluster.peers[0].participant.membership, ChangeKind.JOIN, 5)


@pytest.mark.parametrize("algorithm", ["d-psgd", "choco-sgd"])
def test_a_peer_is_lost_of_which_nobody_that_is_left_hears_anything(algorithm: str) -> None:
    cluster = Cluster(algorithm, "line", seed=4)
    cluster.run(6)
    cluster.kill(3)
    cluster.kill(4)
    cluster.run(60)
    cluster.announce(0, ChangeKind.LOST, 3)
    cluster.run(60)
    assert max(cluster.rounds().values()) < 60
    cluster.announce(0, ChangeKind.LOST, 4)
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2), 90)


def test_whoever_is_about_to_join_sponsors_nobody() -> None:
    """Its first round may never come, and is further ahead than anything that a newcomer can judge by."""
    cluster = Cluster("sgp", num_peers=7, seed=4)
    cluster.run(4)
    join = cluster.announce(0, ChangeKind.JOIN, 5)
    cluster.run(4)
    newcomer = cluster.peers[5].participant.membership
    assert newcomer.is_member
    with pytest.raises(ConfigError, match="about to join itself"):
        plan_change(newcomer, ChangeKind.JOIN, 6)
    cluster.run(join.effective + 1)
    assert plan_change(newcomer, ChangeKind.JOIN, 6).issuer == 5


@pytest.mark.parametrize("algorithm", ["quant-sgp", "choco-sgd"])
def test_a_newcomer_that_has_its_model_does_not_ask_for_another_when_a_neighbour_is_lost(algorithm: str) -> None:
    """It waits for a replica of peer 3, has sent its own, and nobody hands over twice."""
    cluster = Cluster(algorithm, "complete" if algorithm == "choco-sgd" else "exponential", seed=4)
    cluster.run(4)
    join = cluster.announce(0, ChangeKind.JOIN, 5)
    cluster.cut.add((3, 5))
    cluster.run(60)
    assert cluster.rounds()[5] == join.effective - 1
    cluster.kill(3)
    cluster.declare_lost(3)
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4, 5), 90)


def test_a_loss_of_the_past_is_refused_though_it_changes_no_members() -> None:
    """Whoever takes a peer that has left for lost takes back what that peer's heir has."""
    cluster = Cluster("sgp", seed=10)
    cluster.run(2)
    change = cluster.announce(3, ChangeKind.LEAVE, 3)
    cluster.run(change.effective + 1)
    with pytest.raises(RemoteProtocolError, match="LOST of peer 3 from round 1, which is past"):
        check_notice(cluster.peers[0].participant.membership, Change(ChangeKind.LOST, 3, 2, 1), 2)


def test_an_earlier_departure_of_whoever_has_left_is_refused() -> None:
    """It changes nothing for whoever hears it now, and a past round for a peer that is behind."""
    cluster = Cluster("sgp", seed=10)
    cluster.run(2)
    change = cluster.announce(3, ChangeKind.LEAVE, 3)
    cluster.run(change.effective + 1)
    membership = cluster.peers[0].participant.membership
    with pytest.raises(RemoteProtocolError, match="LEAVE of peer 3 from round 1, which is past"):
        check_notice(membership, Change(ChangeKind.LEAVE, 3, 3, 1), 2)
    check_notice(membership, change, 2)


@pytest.mark.parametrize("effective", range(1, 12))
def test_a_change_that_one_believes_is_believed_by_all(effective: int) -> None:
    """A member that lies leaves less time than its announcement takes to get around."""
    cluster = Cluster("sparse-push", "directed-ring", seed=1)
    cluster.cut.add((1, 2))
    cluster.run(30)
    assert cluster.rounds() == {2: 0, 3: 1, 4: 2, 0: 3, 1: 4}
    leave, hearer = Change(ChangeKind.LEAVE, 1, 1, effective), cluster.peers[2]
    seq = hearer.links.incoming[1].last_seq + 1
    if effective < 7:
        with pytest.raises(RemoteProtocolError, match="which is past" if effective == 1 else "too soon for all"):
            hearer.receive(1, seq, encode(leave), 0.0)
    else:
        effects = hearer.receive(1, seq, encode(leave), 0.0)
        cluster.kill(1)
        cluster.perform(2, effects)
        cluster.run(30)
        assert all(leave in member.membership.changes for member in cluster.members)


@pytest.mark.parametrize("kind", [ChangeKind.LEAVE, ChangeKind.LOST])
def test_a_former_member_cannot_come_back(kind: ChangeKind) -> None:
    cluster = Cluster("sparse-push", "exponential", seed=12)
    cluster.run(3)
    if kind is ChangeKind.LEAVE:
        change = cluster.announce(3, kind, 3)
    else:
        cluster.kill(3)
        change = cluster.declare_lost(3)
    cluster.run(change.effective + 2)
    with pytest.raises(ConfigError, match="whoever left or was lost cannot come back"):
        plan_change(cluster.peers[0].participant.membership, ChangeKind.JOIN, 3)


def test_a_change_after_the_end_is_refused() -> None:
    cluster = Cluster("sgp", seed=11)
    cluster.run(95)
    with pytest.raises(ConfigError, match="the run ends after round 99"):
        plan_change(cluster.peers[0].participant.membership, ChangeKind.LEAVE, 0)


def _leave_of_another() -> bytes:
    from peer.node.membership_codec import pb

    return b"SM" + pb.MembershipChange(kind=2, subject=3, issuer=0, effective_round=50).SerializeToString()


def test_a_change_that_a_neighbour_tells_again_costs_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("sgp")
    cluster.run(20)
    change = cluster.announce(2, ChangeKind.LEAVE, 2)
    cluster.run(21)
    peer, notice = cluster.peers[0], encode(change)
    assert change in peer.participant.membership.changes
    syncs: list[None] = []
    sync = peer.disk_state.sync
    monkeypatch.setattr(peer.disk_state, "sync", lambda: syncs.append(sync()))
    neighbor = 1
    first = peer.links.incoming[neighbor].last_seq + 1
    for seq in range(first, first + 16):
        assert peer.receive(neighbor, seq, notice, 0.0).frames == []
    # One, if it had not told it yet.
    assert len(syncs) <= 1
    # What was taken is counted after a restart, so that receipts for it hold.
    sync()
    cluster.restart(0)
    assert cluster.peers[0].links.incoming[neighbor].last_seq == first + 15
