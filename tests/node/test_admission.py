"""A loss that the lost peer has admitted: every member believes it, with and without votes, as after any kill."""

from __future__ import annotations

import numpy as np
import pytest

from peer.errors import ConfigError
from peer.gossip.membership import ChangeKind
from peer.node.membership_planning import plan_change
from peer.node.progress import ADMISSION, Progress, encode_admission
from tests.node.changing_members import Cluster


def admitted_by(cluster: Cluster, peer: int, signer: int | None = None) -> bytes:
    admission = encode_admission(peer, state=Progress(round=2), signed=Progress(round=9))
    return cluster.statements(peer if signer is None else signer).sign(ADMISSION, admission)


@pytest.mark.parametrize("by_majority", [False, True])
@pytest.mark.parametrize(("algorithm", "graph"), [("quant-sgp", "exponential"), ("sgp", "ring"), ("d-psgd", "ring")])
def test_every_member_goes_on_without_a_peer_that_admits_it(algorithm: str, graph: str, by_majority: bool) -> None:
    cluster = Cluster(algorithm, graph, num_first=5, num_peers=5, seed=3, signed=True, by_majority=by_majority)
    cluster.run(6)
    cluster.kill(3)
    membership = cluster.peers[2].participant.membership
    with pytest.raises(ConfigError, match="peer-2"):
        plan_change(membership, ChangeKind.LOST, 3, admitted=admitted_by(cluster, 3, signer=2))
    change = plan_change(membership, ChangeKind.LOST, 3, admitted=admitted_by(cluster, 3))
    cluster.perform(2, cluster.peers[2].announce(change, 0.0))
    cluster.run(change.effective + 20)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4), change.effective + 20)
    assert all(each.membership.is_lost(3) for each in cluster.members)
    assert all(each.admitted for member in cluster.members for each in member.membership.changes)
    # A kill later, what was believed is believed.
    before = [member.algorithm.x.tobytes() for member in cluster.members]
    for peer in (0, 1, 2, 4):
        cluster.restart(peer)
    assert [member.algorithm.x.tobytes() for member in cluster.members] == before
    assert np.isfinite(cluster.spread())
