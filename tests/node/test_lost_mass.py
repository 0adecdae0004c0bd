"""What comes back of a lost peer is what it never had, whatever changed shortly before the loss.

What has to be left follows from the lost peer's own state: all that there was before its last round, less what it kept
of itself and what it gave to those that never heard of that round.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from peer.gossip.effects import Effects
from peer.gossip.membership import ChangeKind
from peer.gossip.mixing import own_weight
from peer.gossip.replicas import QuantSgp
from tests.node.changing_members import Cluster

pytestmark = pytest.mark.slow

CHANGES = [
    # The heir, and the sponsor: their replicas restart at the peer that is lost.
    (ChangeKind.LEAVE, 2, "ring", 4, 3),
    (ChangeKind.JOIN, 5, "ring", 2, 3),
    # It sends its differences to peer 5 from then on, and no more to the peer that is lost.
    (ChangeKind.JOIN, 5, "directed-ring", 0, 4),
]
"""(kind, subject, graph, who is lost, who had sent it something)"""


def lost_at_the_change(cluster: Cluster, effective: int, lost: int) -> tuple[npt.NDArray[np.float64], float]:
    """Let a peer be gone that got nothing any more of the last round before a change, when others have done that round;
    return what it kept of x and u in it."""
    cluster.run(effective - 1)
    cluster.cut |= {(other, lost) for other in range(cluster.num_peers)}
    cluster.run(effective)
    algorithm, session = cluster.peers[lost].participant.algorithm, cluster.peers[lost].participant.session
    assert isinstance(algorithm, QuantSgp)
    assert (session.round, session.in_round) == (effective - 1, True)
    cluster.kill(lost)
    given = algorithm.node.averaging_rate * (1.0 - own_weight(algorithm.node, session.round))
    return algorithm.x.astype(np.float64) - given * algorithm.replicas.own, (1.0 - given) * algorithm.u


@pytest.mark.parametrize("stage", ["between rounds", "in a round", "recovered"])
@pytest.mark.parametrize(("kind", "subject", "graph", "lost", "sender"), CHANGES)
def test_what_was_sent_before_replicas_restarted_comes_back(
    kind: ChangeKind, subject: int, graph: str, lost: int, sender: int, stage: str
) -> None:
    cluster = Cluster("quant-sgp", graph, seed=2)
    drift = cluster.drift()
    cluster.run(3)
    change = cluster.announce(subject if kind is ChangeKind.LEAVE else 3, kind, subject)
    x, u = lost_at_the_change(cluster, change.effective, lost)
    assert cluster.rounds()[sender] == change.effective
    if stage == "in a round":
        cluster.peers[sender].step()
        cluster.perform(sender, cluster.peers[sender].begin(0.0))
        assert cluster.peers[sender].participant.session.in_round
    elif stage == "recovered":
        cluster.perform(sender, Effects(receipts=cluster.peers[sender].save({})))
        assert cluster.peers[sender].disk_state.base_round == change.effective
        cluster.restart(sender)
    cluster.declare_lost(lost)
    cluster.run(60)
    assert set(cluster.rounds().values()) == {60}
    assert cluster.weight() == pytest.approx(5.0 - u, abs=1e-12)
    np.testing.assert_allclose(cluster.drift(), drift - x, atol=2e-5)


@pytest.mark.parametrize(("kind", "subject", "graph", "lost", "sender"), CHANGES)
def test_old_copies_are_forgotten(kind: ChangeKind, subject: int, graph: str, lost: int, sender: int) -> None:
    cluster = Cluster("quant-sgp", graph, seed=2)
    cluster.run(3)
    change = cluster.announce(subject if kind is ChangeKind.LEAVE else 3, kind, subject)
    cluster.run(change.effective + 10)
    assert not _kept(cluster)
    cluster.kill(lost)
    cluster.run(60)
    loss = cluster.declare_lost(lost)
    cluster.run(loss.effective)
    assert sender in _kept(cluster)
    cluster.run(loss.effective + 10)
    assert not _kept(cluster)


@pytest.mark.parametrize("is_recovered", [False, True])
@pytest.mark.parametrize("algorithm", ["sgp", "sparse-push", "quant-sgp"])
def test_nothing_comes_back_before_all_have_said_what_they_heard(algorithm: str, is_recovered: bool) -> None:
    """A peer learns of a loss between rounds. Another has heard of the round in which the lost peer had what this peer
    sent it last."""
    cluster = Cluster(algorithm, "exponential", seed=2)
    cluster.run(5)
    for peer in (1, 4):
        cluster.peers[peer].step()
        cluster.perform(peer, cluster.peers[peer].begin(0.0))
    ((seq, frame, _),) = cluster.queues.pop((4, 1))
    cluster.perform(1, cluster.peers[1].receive(4, seq, frame, 0.0))
    cluster.kill(4)
    cluster.queues = {pair: queue for pair, queue in cluster.queues.items() if pair[0] != 4}
    assert [cluster.peers[peer].participant.session.last_heard(4) for peer in (0, 1)] == [4, 5]
    announcer = cluster.peers[0]
    assert announcer.links.out[4].backlog, "it has confirmed all"
    cluster.announce(0, ChangeKind.LOST, 4)
    if is_recovered:
        # There is no checkpoint before that is settled.
        before = announcer.disk_state.base_round
        announcer.save({}, anew=True)
        assert announcer.disk_state.base_round == before < 5
        cluster.restart(0)
    cluster.peers[0].step()
    cluster.perform(0, cluster.peers[0].begin(0.0))
    cluster.run(60)
    lost = cluster.peers[4].participant.algorithm
    given = lost.node.averaging_rate * lost.node.schedule.weight(5, 1, 4)
    assert cluster.weight() == pytest.approx(5.0 - (1.0 - given) * lost.u, abs=1e-12)


@pytest.mark.parametrize("algorithm", ["sgp", "sparse-push", "quant-sgp"])
def test_a_peer_that_has_left_is_lost_to_those_who_are_behind(algorithm: str) -> None:
    """Its heir has all that it had, and one neighbour lacks its last message and waits for it."""
    cluster = Cluster(algorithm, "exponential", seed=2)
    cluster.run(3)
    effective = cluster.announce(2, ChangeKind.LEAVE, 2).effective
    cluster.run(effective - 1)
    cluster.cut.add((2, 1))
    cluster.run(effective)
    assert cluster.peers[2].participant.membership.has_left
    assert cluster.rounds()[1] == effective - 1
    cluster.kill(2)
    cluster.announce(1, ChangeKind.LOST, 2)
    cluster.run(60)
    assert cluster.rounds() == dict.fromkeys((0, 1, 3, 4), 60)
    rate = cluster.peers[2].participant.algorithm.node.averaging_rate
    # Of an exponential graph everyone has the same weight.
    assert cluster.weight() == pytest.approx(5.0 - rate * 0.25, abs=1e-12)


@pytest.mark.parametrize("algorithm", ["sgp", "sparse-push", "quant-sgp"])
def test_what_a_sponsor_had_does_not_come_back_where_its_share_holds_it(algorithm: str) -> None:
    """A sponsor is lost as it has given its share, before anybody has a message of its next round."""
    cluster = Cluster(algorithm, "exponential", seed=2)
    cluster.run(3)
    effective = cluster.announce(3, ChangeKind.JOIN, 5).effective
    cluster.run(effective)
    cluster.kill(3)
    assert any(cluster.peers[peer].links.out[3].backlog for peer in (1, 2)), "it has confirmed all"
    cluster.declare_lost(3)
    cluster.run(60)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4, 5), 60)
    assert cluster.weight() == pytest.approx(5.0 - cluster.peers[3].participant.algorithm.u, abs=1e-12)


def _kept(cluster: Cluster) -> set[int]:
    return {member.peer for member in cluster.members if any(".kept." in name for name in member.algorithm.state())}
