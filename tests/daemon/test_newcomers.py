"""Peers that nobody listed join in the midst of a run, whatever is killed around it; see `changing_members`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.errors import RemoteProtocolError
from peer.gossip.membership import Change, ChangeKind
from peer.node import membership_codec
from tests.node.changing_members import Cluster
from tests.peers import newcomer


def _two_join(seed: int, restarts: float, algorithm: str, graph: str) -> Cluster:
    cluster = Cluster(algorithm, graph, num_first=4, num_peers=6, num_listed=4, seed=seed, restarts=restarts)
    cluster.run(3)
    cluster.announce(1, ChangeKind.JOIN, 5)
    first = cluster.peers[1].participant.membership.coming_changes[0]
    cluster.run(first.effective + 2)
    # Whoever lists neither joins through one whom nobody listed.
    cluster.announce(5, ChangeKind.JOIN, 4)
    cluster.run(50)
    return cluster


@pytest.mark.parametrize(("algorithm", "graph"), [("quant-sgp", "exponential"), ("d-psgd", "ring")])
def test_kills_around_newcomers_leave_no_trace(algorithm: str, graph: str) -> None:
    models = []
    for seed, restarts in ((1, 0.0), (2, 0.02)):
        cluster = _two_join(seed, restarts, algorithm, graph)
        assert cluster.rounds() == dict.fromkeys(range(6), 50)
        models.append([(member.algorithm.x.tobytes(), member.algorithm.u) for member in cluster.members])
        for peer in range(6):
            cluster.restart(peer)
            assert dict(cluster.peers[peer].participant.membership.newcomers) == {4: newcomer(4), 5: newcomer(5)}
    assert models[0] == models[1]


def test_a_newcomer_leaves_and_another_is_lost_like_any_other_peer() -> None:
    cluster = _two_join(3, 0.0, "sgp", "exponential")
    change = cluster.announce(4, ChangeKind.LEAVE, 4)
    cluster.run(change.effective + 1)
    cluster.kill(5)
    cluster.run(80)
    cluster.declare_lost(5)
    cluster.run(95)
    assert cluster.rounds() == dict.fromkeys(range(4), 95)


@pytest.mark.parametrize("seed", range(3))
def test_two_sponsors_that_know_nothing_of_each_other_are_one(seed: int) -> None:
    """A sponsor ends right after it announced; the newcomer asks another one, and both announcements count."""
    cluster = Cluster("quant-sgp", "exponential", num_first=5, num_peers=6, num_listed=5, seed=seed)
    cluster.run(4)
    changes = [cluster.announce(peer, ChangeKind.JOIN, 5) for peer in (seed, seed + 1)]
    cluster.run(60)
    assert cluster.rounds() == dict.fromkeys(range(6), 60)
    assert cluster.weight() == pytest.approx(5.0, abs=1e-12)
    joined = cluster.peers[5].participant.membership.changes
    assert set(joined) == set(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change(ChangeKind.JOIN, 4, 1, 40), "whom nobody knows|where there are 4 peers"),
        (Change(ChangeKind.JOIN, 4, 1, 40, newcomer=newcomer(5)), "peer 4 joins: the certificate is another peer's"),
        (Change(ChangeKind.JOIN, 3, 1, 40, newcomer=newcomer(3)), "whom everybody lists"),
        (Change(ChangeKind.LOST, 2, 1, 40, newcomer=newcomer(2)), "changes by LOST"),
        (Change(ChangeKind.JOIN, 4, 9, 40, newcomer=newcomer(4)), "by peer 9"),
        (Change(ChangeKind.JOIN, 1 << 20, 1, 40, newcomer=newcomer(4)), "change of peer 1048576"),
        (Change(ChangeKind.JOIN, 4, 1, 40, newcomer=replace(newcomer(4), certificate=bytes(9000))), "bytes"),
    ],
)
def test_a_member_cannot_invent_a_newcomer(change: Change, words: str) -> None:
    cluster = Cluster("sgp", num_first=4, num_peers=5, num_listed=4)
    cluster.run(2)
    with pytest.raises(RemoteProtocolError, match=words):
        cluster.peers[0].participant.receive(1, membership_codec.encode(change), 0.0)
    assert not cluster.peers[0].participant.membership.changes


def test_whoever_is_no_member_tells_of_itself_alone() -> None:
    cluster = Cluster("sgp", num_first=4, num_peers=5, num_listed=4)
    cluster.run(2)
    with pytest.raises(RemoteProtocolError, match="no member yet and told of a change of others"):
        cluster.peers[0].participant.receive(4, membership_codec.encode(Change(ChangeKind.LOST, 2, 1, 40, 1)), 0.0)


def test_notices_of_before_are_read() -> None:
    frame = b"SM" + bytes([0x08, 1, 0x10, 3, 0x18, 1, 0x20, 40])
    assert membership_codec.decode(frame, 4, sender=1) == Change(ChangeKind.JOIN, 3, 1, 40)
    assert membership_codec.encode(Change(ChangeKind.JOIN, 3, 1, 40)) == frame
