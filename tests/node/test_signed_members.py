"""Members change in a run with certificates: what is said is signed, passed on as it came, and said again in the same
bytes after a kill, with whichever certificate; see `changing_members`."""

from __future__ import annotations

import pytest

from peer.errors import StateError
from peer.gossip.membership import ChangeKind
from peer.node.statements import counter_of
from peer.state.statement_counter import RESERVED, StatementCounter
from tests.node.changing_members import Cluster
from tests.state.failing_disk import FailingDisk, ProcessEnds


def _changed(algorithm: str, graph: str, seed: int, restarts: float, *, signed: bool = True) -> Cluster:
    cluster = Cluster(
        algorithm, graph, num_first=5, num_peers=7, num_listed=6, seed=seed, restarts=restarts, signed=signed
    )
    cluster.run(4)
    cluster.announce(1, ChangeKind.JOIN, 5)
    change = cluster.announce(2, ChangeKind.LEAVE, 2)
    cluster.run(change.effective + 1)
    cluster.kill(3)
    change = cluster.declare_lost(3)
    cluster.run(change.effective + 1)
    change = cluster.announce(0, ChangeKind.JOIN, 6)
    cluster.run(change.effective + 3)
    return cluster


def _lose(cluster: Cluster, subject: int) -> None:
    cluster.declare_lost(subject)
    cluster.run(60)


@pytest.mark.parametrize(("algorithm", "graph"), [("quant-sgp", "exponential"), ("d-psgd", "ring")])
def test_signatures_change_nothing_of_what_is_computed(algorithm: str, graph: str) -> None:
    models = []
    for signed in (False, True):
        cluster = _changed(algorithm, graph, 1, 0.0, signed=signed)
        models.append([(member.algorithm.x.tobytes(), member.algorithm.u) for member in cluster.members])
    assert models[0] == models[1]


@pytest.mark.parametrize("seed", range(4))
def test_kills_make_nobody_contradict_itself(seed: int) -> None:
    cluster = _changed("sparse-push", "exponential", seed, 0.02)
    assert set(cluster.rounds()) == {0, 1, 4, 5, 6}
    assert all(change.told for member in cluster.members for change in member.membership.changes)


def test_everybody_can_prove_to_a_newcomer_what_changed() -> None:
    cluster = _changed("sgp", "exponential", 2, 0.0)
    for member in cluster.members:
        numbers = set()
        for change in member.membership.changes:
            counter = counter_of(change.told[2:])
            assert counter is not None, change
            numbers.add((change.issuer, counter))
            cluster.statements(member.peer).check("members", change.issuer, change.told[2:])
        assert len(numbers) == len(member.membership.changes)
    before = [member.membership.state() for member in cluster.members]
    for peer in (0, 1, 4, 5, 6):
        cluster.restart(peer)  # With another certificate: what the journal holds is said again as it was.
    assert [member.membership.state() for member in cluster.members] == before


@pytest.mark.parametrize("tear", [0.0, 0.5, 1.0])
def test_a_kill_between_hearing_and_signing_is_mended(tear: float) -> None:
    """The process of peer 4 ends at each write that follows from the news of a loss, and is started again."""
    for number in range(1, 9):
        cluster = Cluster("sparse-push", num_first=5, num_peers=5, seed=5, signed=True)
        cluster.run(6)
        cluster.kill(3)
        disk = cluster.disks[4]
        disk.end_at, disk.torn = len(disk.operations) + number, tear
        with pytest.raises(ProcessEnds):
            _lose(cluster, 3)
        cluster.restart(4)
        cluster.run(60)
        assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4), 60)
        reports = {change.issuer for change in cluster.peers[0].participant.membership.changes}
        assert reports == {0, 1, 2, 4}
        assert all(change.told for change in cluster.peers[0].participant.membership.changes)


def test_a_journal_of_a_release_that_signed_nothing_is_gone_on_with() -> None:
    cluster = _changed("quant-sgp", "exponential", 3, 0.0, signed=False)
    models = [(member.algorithm.x.tobytes(), member.algorithm.u) for member in cluster.members]
    cluster.signed = True
    for peer in (0, 1, 4, 5, 6):
        cluster.disks[peer].restart()
        assert not cluster.open(peer).notices
    assert [(member.algorithm.x.tobytes(), member.algorithm.u) for member in cluster.members] == models


def test_no_counter_is_used_twice() -> None:
    disk = FailingDisk()
    seen: list[int] = []
    for now in (5.0, 5.0, 1.0):
        counter = StatementCounter(disk, now)
        seen += [counter.next() for _ in range(1500)]
        disk.lose_power()
    # Of a device that lost its folder.
    seen += [StatementCounter(FailingDisk(), 100.0).next()]
    assert seen == sorted(set(seen))


def test_a_counter_that_cannot_be_reserved_signs_nothing() -> None:
    disk = FailingDisk()
    disk.fill()
    with pytest.raises(StateError, match=RESERVED.name):
        StatementCounter(disk, 1.0).next()
    disk = FailingDisk()
    disk.create(RESERVED.name).append([b"no number"])
    with pytest.raises(StateError, match="damaged"):
        StatementCounter(disk, 1.0)
