"""Peers that were lost take part again under another number; see `changing_members`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from peer.errors import ConfigError, RemoteProtocolError
from peer.gossip.effects import Effects
from peer.gossip.incarnations import MAX_INCARNATIONS
from peer.gossip.membership import Change, ChangeKind
from peer.node import membership_codec
from peer.node.loss_votes import LOST, decode_vote
from peer.node.membership_planning import plan_change
from peer.node.statements import MEMBERS, sealed, unsealed
from peer.proto.sottovoce.v1.membership_pb2 import LossVote
from tests.node.changing_members import Cluster
from tests.peers import newcomer


def _lost(algorithm: str = "sgp", graph: str = "exponential", **options: object) -> Cluster:
    """Return a cluster of five in which peer 2 was lost, and all have come to a round without it."""
    cluster = Cluster(algorithm, graph, num_first=5, num_peers=5, **options)  # type: ignore[arg-type]
    cluster.run(4)
    cluster.kill(2)
    cluster.run(60)
    change = cluster.declare_lost(2)
    cluster.run(change.effective + 1)
    return cluster


def _back(cluster: Cluster, peer: int = 2, sponsor: int = 0) -> int:
    """Let a lost peer come back, and all come to a round with it; return its number."""
    number = cluster.come_back(peer)
    change = cluster.announce(sponsor, ChangeKind.JOIN, number)
    cluster.run(change.effective + 2)
    return number


@pytest.mark.parametrize("algorithm", ["sgp", "sparse-push", "quant-sgp"])
def test_mass_is_conserved_when_a_lost_peer_takes_part_again(algorithm: str) -> None:
    cluster = _lost(algorithm)
    weight, drift = cluster.weight(), cluster.drift()
    number = _back(cluster)
    assert number in cluster.rounds()
    assert cluster.weight() == pytest.approx(weight, abs=1e-12)
    # x is float32.
    np.testing.assert_allclose(cluster.drift(), drift, atol=2e-5)


def test_a_peer_is_lost_and_comes_back_again_and_again() -> None:
    cluster = _lost()
    numbers = [2]
    for _ in range(2):
        numbers.append(_back(cluster, numbers[-1]))
        cluster.kill(numbers[-1])
        cluster.run(99)
        change = cluster.declare_lost(numbers[-1])
        cluster.run(change.effective + 1)
    numbers.append(cluster.come_back(numbers[-1]))
    stride = cluster.numbering.stride
    assert numbers == [2, 2 + stride, 2 + 2 * stride, 2 + 3 * stride]
    assert set(cluster.rounds()) == {0, 1, 3, 4}


def test_one_that_is_lost_before_its_join_counts_comes_back_as_the_next() -> None:
    cluster = _lost()
    number = cluster.come_back(2)
    join = cluster.announce(0, ChangeKind.JOIN, number)
    cluster.kill(number)
    cluster.run(99)
    loss = cluster.declare_lost(number)
    assert loss.effective > join.effective
    # Its loss has to count first.
    sponsor = cluster.peers[loss.issuer].participant.membership
    with pytest.raises(ConfigError, match="does not count yet"):
        plan_change(sponsor, ChangeKind.JOIN, number + cluster.numbering.stride, newcomer(2))
    cluster.run(loss.effective + 1)
    again = _back(cluster, number, sponsor=3)
    assert set(cluster.rounds()) == {0, 1, 3, 4, again}


@pytest.mark.parametrize(("algorithm", "graph"), [("quant-sgp", "exponential"), ("d-psgd", "ring")])
def test_kills_of_the_second_life_leave_no_trace(algorithm: str, graph: str) -> None:
    models = []
    for restarts in (0.0, 0.03):
        cluster = _lost(algorithm, graph, seed=3)
        cluster.restarts = restarts
        number = _back(cluster)
        cluster.run(90)
        for peer in (0, number):
            cluster.restart(peer)
        assert set(cluster.rounds()) == {0, 1, 3, 4, number}
        models.append([(member.peer, member.algorithm.x.tobytes(), member.algorithm.u) for member in cluster.members])
    assert models[0] == models[1]


def test_a_restart_while_it_hears_of_members_from_one_that_came_back() -> None:
    """What it has of a stream from a peer of whose joining it has not heard is in its checkpoint."""
    cluster = _lost(seed=1)
    first = _back(cluster)
    cluster.kill(3)
    cluster.run(99)
    change = cluster.declare_lost(3)
    cluster.run(change.effective + 1)
    second = cluster.come_back(3)
    join = cluster.announce(first, ChangeKind.JOIN, second)
    seq, frame, _ = cluster.queues[first, second].popleft()
    cluster.perform(second, cluster.peers[second].receive(first, seq, frame, 0.0))
    cluster.peers[second].save({}, anew=True)
    cluster.restart(second)
    assert cluster.peers[second].links.durable_from(first) == seq
    cluster.run(join.effective + 2)
    assert set(cluster.rounds()) == {0, 1, 4, first, second}


def test_what_a_member_sent_before_it_was_known_is_kept() -> None:
    """A newcomer may hear from a member first, and then from its sponsor that this member once joined."""
    cluster = _lost(seed=1)
    first = _back(cluster)
    cluster.kill(3)
    cluster.run(99)
    change = cluster.declare_lost(3)
    cluster.run(change.effective + 1)
    second = cluster.come_back(3)
    join = cluster.announce(0, ChangeKind.JOIN, second)
    cluster.queues[0, second].clear()
    cluster.cut.add((0, second))
    cluster.run(join.effective + 1)
    assert cluster.peers[second].participant.membership.is_outsider
    cluster.cut.clear()
    cluster.restart(0)  # It sends again what was cut off.
    cluster.run(join.effective + 2)
    assert set(cluster.rounds()) == {0, 1, 4, first, second}


def _joining() -> Cluster:
    """Return a cluster that peer 4 is about to join. It has heard no word since its sponsor 3 let it in, which did not
    know then that 1 is lost."""
    cluster = Cluster("sgp", num_first=4, num_peers=5, seed=2)
    cluster.run(4)
    cluster.kill(1)
    loss, join = cluster.announce(0, ChangeKind.LOST, 1), cluster.announce(3, ChangeKind.JOIN, 4)
    cluster.cut = {(other, 4) for other in (0, 2, 3)}
    cluster.run(60)
    assert loss.effective == join.effective == cluster.rounds()[0]
    assert cluster.peers[4].participant.session.is_joining
    return cluster


def test_a_newcomer_hears_of_another_before_it_hears_of_the_loss_of_whom_that_was() -> None:
    cluster = _joining()
    number = cluster.come_back(1)
    cluster.announce(0, ChangeKind.JOIN, number)
    cluster.run(60)
    assert cluster.peers[4].participant.membership.changes[-1].subject == 4
    cluster.cut.clear()
    for peer in (0, 2, 3):
        cluster.restart(peer)  # It sends again what was cut off.
    cluster.run(60)
    assert cluster.rounds() == dict.fromkeys((0, 2, 3, 4, number), 60)


def test_a_newcomer_refuses_as_a_member_what_makes_no_sense_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, perform, refused = _joining(), Cluster.perform, []

    def noted(self: Cluster, peer: int, effects: Effects) -> None:
        refused.extend(effects.refused)
        perform(self, peer, effects)

    monkeypatch.setattr(Cluster, "perform", noted)
    number = 3 + cluster.numbering.stride
    lie = membership_codec.encode(Change(ChangeKind.JOIN, number, 2, 60, newcomer=newcomer(3)))
    cluster.perform(4, cluster.peers[4].receive(2, cluster.peers[4].links.incoming[2].last_seq + 1, lie, 0.0))
    assert refused == []
    cluster.cut = {(2, 4)}
    cluster.restart(3)
    cluster.run(60)
    assert [str(error) for error in refused] == [
        f"peer 2: told that peer {number} joins: peer 3, which it was before, is not lost"
    ]


def _let_in_unheard() -> tuple[Cluster, int]:
    """Return a cluster whose peer 0 was lost after it had let a newcomer in that nobody else knows, and the newcomer's
    number. The others have reported the loss, and the join is still in time for them."""
    cluster = _lost()
    number = cluster.come_back(2)
    cluster.cut = {(peer, other) for peer in (0, number) for other in (1, 3, 4)}
    join = cluster.announce(0, ChangeKind.JOIN, number)
    cluster.run(99)
    cluster.kill(0)
    cluster.declare_lost(0)
    cluster.run(join.effective - 4)
    assert not cluster.arrived(cluster.living())
    assert {cluster.peers[peer].round for peer in (1, 3, 4)} == {join.effective - 4}
    return cluster, number


def test_a_newcomer_whom_only_a_lost_sponsor_knew_is_refused_by_all() -> None:
    """One member would pass it on to others for which it is too late."""
    cluster, number = _let_in_unheard()
    cluster.cut = set()
    for peer in (1, 3, 4):
        victim = cluster.peers[peer]
        frame = next(frame for seq, frame in cluster.peers[number].connected(peer, 0) if seq == 1)
        with pytest.raises(RemoteProtocolError, match="told late that it joins by peer 0, which is lost") as caught:
            victim.receive(number, 1, frame, 0.0)
        assert caught.value.peer == number
    cluster.run(90)
    assert {cluster.peers[peer].round for peer in (1, 3, 4)} == {90}


def _tell(cluster: Cluster, change: Change, liar: int = 1, victim: int = 0) -> None:
    """Let a member say something of members to another one."""
    body = membership_codec.encode(change)
    frame = membership_codec.MAGIC + cluster.statements(liar).sign(MEMBERS, body[len(membership_codec.MAGIC) :])
    peer = cluster.peers[victim]
    peer.receive(liar, peer.links.incoming[liar].last_seq + 1, frame, 0.0)


def test_nobody_takes_part_again_who_is_not_lost() -> None:
    cluster = _lost(signed=True)
    number = 3 + cluster.numbering.stride
    with pytest.raises(ConfigError, match="peer 3, which it was before, is not lost"):
        plan_change(cluster.peers[0].participant.membership, ChangeKind.JOIN, number, newcomer(3))
    with pytest.raises(RemoteProtocolError, match="peer 3, which it was before, is not lost"):
        _tell(cluster, Change(ChangeKind.JOIN, number, 1, 60, newcomer=newcomer(3)))


def test_a_wrong_number_is_refused() -> None:
    cluster = _lost(signed=True)
    stride = cluster.numbering.stride
    for number, words in (
        (2 + 2 * stride, "which it was before, is not lost"),
        (2 + MAX_INCARNATIONS * stride, "told of a change of peer"),
        (2 + (MAX_INCARNATIONS + 10_000) * stride, "told of a change of peer"),
    ):
        with pytest.raises(RemoteProtocolError, match=words):
            _tell(cluster, Change(ChangeKind.JOIN, number, 1, 60, newcomer=newcomer(2)))


def test_nobody_takes_part_again_before_its_loss_counts() -> None:
    cluster = Cluster("sgp", num_first=5, num_peers=5, signed=True)
    cluster.run(4)
    cluster.kill(2)
    cluster.run(60)
    loss = cluster.declare_lost(2)
    assert cluster.members[0].round < loss.effective
    number = 2 + cluster.numbering.stride
    issuer = loss.issuer
    with pytest.raises(ConfigError, match="does not count yet"):
        plan_change(cluster.peers[issuer].participant.membership, ChangeKind.JOIN, number, newcomer(2))
    liar = next(member.peer for member in cluster.members if member.peer != issuer)
    with pytest.raises(RemoteProtocolError, match="does not count yet"):
        _tell(cluster, Change(ChangeKind.JOIN, number, liar, loss.effective, newcomer=newcomer(2)), liar, issuer)


def test_another_device_cannot_take_its_place() -> None:
    cluster = _lost(signed=True)
    with pytest.raises(RemoteProtocolError, match="the certificate is another peer's"):
        _tell(cluster, Change(ChangeKind.JOIN, 2 + cluster.numbering.stride, 1, 60, newcomer=newcomer(4)))


def test_what_a_peer_said_before_it_was_lost_is_nothing_that_it_says_now() -> None:
    cluster = _lost(signed=True)
    stride, statements = cluster.numbering.stride, cluster.statements(0)
    number = _back(cluster)
    before = cluster.statements(2)
    said = before.sign(LOST, LossVote(voter=2, subject=3, round=5).SerializeToString(deterministic=True))
    assert decode_vote(said).voter == 2
    # The same words under the new number have another text, which nobody has signed.
    _, proof = unsealed(said)
    assert proof is not None
    now = sealed(LossVote(voter=number, subject=3, round=5).SerializeToString(deterministic=True), proof)
    with pytest.raises(Exception, match="its signature is not that of the certificate"):
        statements.check(LOST, number, now)
    frame = membership_codec.encode(Change(ChangeKind.LEAVE, 2, 2, 90))
    _, proof = unsealed(before.sign(MEMBERS, frame[len(membership_codec.MAGIC) :]))
    assert proof is not None
    leave = membership_codec.encode(replace(Change(ChangeKind.LEAVE, 2, 2, 90), subject=2 + stride, issuer=2 + stride))
    forged = membership_codec.MAGIC + sealed(leave[len(membership_codec.MAGIC) :], proof)
    victim = cluster.peers[0]
    with pytest.raises(RemoteProtocolError, match="its signature is not that of the certificate"):
        victim.receive(1, victim.links.incoming[1].last_seq + 1, forged, 0.0)


def test_whoever_left_does_not_come_back() -> None:
    cluster = Cluster("sgp", num_first=5, num_peers=5)
    cluster.run(4)
    change = cluster.announce(2, ChangeKind.LEAVE, 2)
    cluster.run(change.effective + 1)
    with pytest.raises(ConfigError, match="peer 2 has left the run"):
        plan_change(cluster.peers[0].participant.membership, ChangeKind.JOIN, 2 + cluster.numbering.stride, newcomer(2))
