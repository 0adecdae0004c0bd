"""What a member may not decide for others, and what nobody tells of the past."""

from __future__ import annotations

import pytest

from peer.errors import RemoteProtocolError
from peer.gossip.membership import Change, ChangeKind
from peer.node import membership_codec
from peer.node.durable import NOTICES_AT_ONCE
from peer.node.membership_news import MOST_VERSIONS
from tests.node.changing_members import Cluster

LEAVE, LOST, JOIN = ChangeKind.LEAVE, ChangeKind.LOST, ChangeKind.JOIN


def tell(cluster: Cluster, change: Change, now: float = 0.0) -> None:
    """Let peer 0 tell peer 1 of a change."""
    seq = cluster.peers[1].links.incoming[0].last_seq + 1
    cluster.perform(1, cluster.peers[1].receive(0, seq, membership_codec.encode(change), now))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change(LEAVE, 3, 3, 1), "past"),
        (Change(LOST, 3, 2, 2), "past"),
        (Change(LOST, 3, 2, 1 << 61), "a run of 100"),
        (Change(LOST, 1, 2, 60), "this peer of its own LOST"),
        (Change(LEAVE, 1, 1, 60), "this peer of its own LEAVE"),
        (Change(LOST, 3, 1, 60), "in the name of peer 1"),
        (Change(LOST, 3, 2, 60, 60), "was heard in round 60"),
        (Change(LEAVE, 3, 3, 60, 7), "was heard in round 7"),
        (Change(JOIN, 3, 2, 60), "a member from the start"),
        (Change(LOST, 5, 2, 60), "is no member"),
    ],
)
@pytest.mark.parametrize("algorithm", ["sparse-push", "choco-sgd"])
def test_a_notice_that_no_member_announces_ends_nobody(algorithm: str, change: Change, text: str) -> None:
    # The link to peer 0 has other honest frames before it: those are read first.
    cluster = Cluster(algorithm, seed=3)
    cluster.run(5)
    before = len(cluster.disks[1].operations), cluster.peers[1].links.received()
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        tell(cluster, change)
    assert caught.value.peer == 0
    assert (len(cluster.disks[1].operations), cluster.peers[1].links.received()) == before
    cluster.restart(1)
    cluster.run(12)
    assert cluster.rounds() == dict.fromkeys(range(5), 12)


def test_an_issuer_that_contradicts_itself_is_believed_a_few_times() -> None:
    cluster = Cluster("sparse-push", seed=3)
    cluster.run(2)
    for number in range(20):
        tell(cluster, Change(LOST, 3, 2, 60 + number, 1))
    known = cluster.peers[1].participant.membership.changes
    assert sum(change.issuer == 2 for change in known) == MOST_VERSIONS


def test_notices_are_budgeted_and_known_ones_cost_no_sync() -> None:
    cluster = Cluster("sparse-push", seed=3)
    cluster.run(2)
    change, victim = Change(LOST, 3, 2, 60, 1), cluster.peers[1]
    tell(cluster, change)
    before = _syncs(cluster)
    for _ in range(NOTICES_AT_ONCE - 1):
        victim.receive(0, victim.links.incoming[0].last_seq + 1, membership_codec.encode(change), 0.0)
    assert _syncs(cluster) == before
    with pytest.raises(RemoteProtocolError, match="changes of members at once"):
        tell(cluster, change)
    tell(cluster, change, now=1.0)


def _syncs(cluster: Cluster) -> int:
    return sum("sync" in operation for operation in cluster.disks[1].operations)
