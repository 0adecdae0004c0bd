"""A change of the members that an older release would misunderstand: every peer that hears of it first makes its state
one that such a release refuses."""

from __future__ import annotations

import pytest

from peer.errors import StateError
from peer.gossip.membership import Change, ChangeKind
from peer.node import membership_codec
from peer.node.durable import DurablePeer
from peer.protocol import NEWEST, OLDEST
from peer.state.checkpoints import Checkpoint
from peer.state.journal import Announced, Received, read_journal
from peer.state.recovery import StateFiles
from tests.node.changing_members import Cluster
from tests.state.failing_disk import FailingDisk, ProcessEnds


def needs_newest(each: Change) -> int:
    """Let the departure of a peer stand for something new."""
    return NEWEST if each.kind is ChangeKind.LEAVE else OLDEST


def changed(seed: int, restarts: float, *, pins: bool) -> Cluster:
    cluster = Cluster(
        "sparse-push", seed=seed, restarts=restarts, protocol_of=needs_newest if pins else lambda _: OLDEST
    )
    change(cluster)
    return cluster


def change(cluster: Cluster) -> None:
    """Let a peer join, and another one leave."""
    cluster.run(4)
    cluster.announce(1, ChangeKind.JOIN, 5)
    cluster.run(8)
    assert protocols(cluster) == {OLDEST}
    leave = cluster.announce(2, ChangeKind.LEAVE, 2)
    cluster.run(leave.effective + 3)


def protocols(cluster: Cluster) -> set[int]:
    return {peer.disk_state.protocol for peer in cluster.peers.values()}


def _newest(peer: DurablePeer) -> Checkpoint:
    checkpoints = peer.disk_state.files.checkpoints
    return checkpoints.load(checkpoints.rounds()[-1])


def names(disk: FailingDisk, prefix: str) -> list[str]:
    return sorted(name for name in disk.names() if name.startswith(prefix))


@pytest.mark.parametrize("seed", range(3))
def test_every_peer_needs_the_version_from_then_on_and_computes_the_same(seed: int) -> None:
    pinned, plain = (changed(seed, 0.01, pins=pins) for pins in (True, False))
    assert (protocols(pinned), protocols(plain)) == ({NEWEST}, {OLDEST})
    assert [member.algorithm.x.tobytes() for member in pinned.members] == [
        member.algorithm.x.tobytes() for member in plain.members
    ]
    for peer in pinned.peers.values():
        peer.save({}, anew=True)
    for number in range(len(pinned.peers)):
        pinned.restart(number)
    assert protocols(pinned) == {NEWEST}


def test_the_state_is_written_as_before_while_nothing_new_is_used() -> None:
    pinned = changed(0, 0.0, pins=True)
    for disk, peer in zip(pinned.disks.values(), pinned.peers.values(), strict=True):
        journal = names(disk, "journal-")[-1]
        expected = {"run": "(needs release 0.3) run", "protocol": NEWEST}
        assert read_journal(disk, journal).header.items() >= expected.items()
        peer.save({}, anew=True)
        assert _newest(peer).state.items() >= expected.items()
    plain = changed(0, 0.0, pins=False)
    for disk, peer in zip(plain.disks.values(), plain.peers.values(), strict=True):
        peer.save({}, anew=True)
        for state in (
            read_journal(disk, names(disk, "journal-")[-1]).header,
            _newest(peer).state,
        ):
            assert state["run"] == "run"
            assert "protocol" not in state


def written_anew(operations: list[str]) -> int:
    """Return which operation gives a journal its name for the second time."""
    begun = set[str]()
    for number, what in enumerate(operations):
        if what.startswith("rename") and "journal-" in what:
            if what in begun:
                return number
            begun.add(what)
    raise AssertionError("no journal was written anew")


def test_a_crash_at_any_instant_leaves_no_news_in_a_state_that_older_releases_would_read() -> None:
    pinned_at = written_anew(changed(0, 0.0, pins=True).disks[3].operations)
    for at in range(pinned_at - 3, pinned_at + 6):
        cluster = Cluster("sparse-push", protocol_of=needs_newest)
        disk = cluster.disks[3]
        disk.end_at = at
        with pytest.raises(ProcessEnds):
            change(cluster)
        disk.restart()
        for name in names(disk, "journal-"):
            content = read_journal(disk, name)
            told = [each.frame for each in content.records if isinstance(each, Received | Announced)]
            notices = [
                membership_codec.decode(frame, 6, sender=0) for frame in told if membership_codec.is_notice(frame)
            ]
            assert "protocol" in content.header or {each.kind for each in notices} <= {ChangeKind.JOIN}
        cluster.restart(3)
        assert cluster.peers[3].disk_state.protocol in (OLDEST, NEWEST)


def test_a_state_of_a_later_release_is_refused_and_left_alone() -> None:
    cluster = Cluster("sparse-push")
    cluster.run(3)
    peer, disk = cluster.peers[0], cluster.disks[0]
    peer.disk_state.files.protocol = NEWEST + 1
    peer.save({}, anew=True)
    before = disk.names()
    files = StateFiles(disk, {"run": "run", "peer": "0"}, keep=2, regular=0)
    with pytest.raises(StateError, match="uses what came with a later release; install that one"):
        files.load_newest([])
    assert disk.names() == before


def test_a_state_in_which_the_release_before_named_the_oldest_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("sparse-push")
    cluster.run(3)
    peer = cluster.peers[0]
    with monkeypatch.context() as release_before:
        release_before.setattr("peer.state.recovery.OLDEST", OLDEST - 1)
        peer.disk_state.files.protocol = OLDEST
        peer.save({}, anew=True)
    written = _newest(peer)
    assert written.state["run"] == "(needs release 0.2) run"
    cluster.restart(0)
    assert cluster.peers[0].disk_state.protocol == OLDEST
    cluster.run(6)
