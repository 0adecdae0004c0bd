"""Devices that tell each other how frequent the classes are in their data, before the first round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from peer.daemon.notes import class_votes
from peer.daemon.notes.class_votes import ClassVotes
from peer.daemon.notes.notes import (
    CLASS_SHARES,
    CLASSES,
    Hearsay,
    class_vote,
    decode_class_vote,
    decode_shares,
    encode_shares,
)
from peer.daemon.process import Daemon
from peer.daemon.runtime import Runtime
from peer.errors import ConfigError, PeerUnreachable, RemoteProtocolError, StateError
from peer.net.handler import MAX_BULLETIN_BYTES
from peer.node.statements import MAX_PROOF_BYTES, Statements, Unsigned, unsealed
from peer.proto.sottovoce.v1.note_pb2 import ClassNote
from peer.state.disk import Disk
from peer.state.kept_file import CLASS_VOTES
from peer.train.label_adjustment import Float64Array, declared_shares
from peer.train.task import Task
from tests.daemon.parts import FakeTransport, neighbors_over
from tests.daemon.test_members import Devices
from tests.daemon.test_own_data import final_model, opened, run_both, write_kits
from tests.node.changing_members import Cluster
from tests.state.folders import begin


class Peer:
    """Peer 0 of four, with neighbours 1 and 2; it has 70, 20 and 10 samples of three classes."""

    def __init__(
        self,
        folder: Path,
        *,
        statements: Statements | None = None,
        voters: Collection[int] = range(4),
        total_samples: int | None = None,
        all_speak: bool = False,
    ) -> None:
        self.transport, self.runtime = FakeTransport(up={1, 2}), Runtime()
        self.shares: list[Float64Array] = []
        self.neighbors = neighbors_over(self.transport, (1, 2))
        self.votes = ClassVotes(
            Hearsay(0, voters, statements or Unsigned(), self.neighbors.is_up, self.runtime.now),
            (70, 20, 10),
            voters=frozenset(voters),
            total_samples=total_samples,
            disk=Disk(folder),
            neighbors=self.neighbors,
            runtime=self.runtime,
            name=lambda peer: f"peer-{peer}",
            all_speak=lambda: all_speak,
            use=self.shares.append,
        )

    def settle(self) -> None:
        async def settle() -> None:
            # Whoever waits in vain does not wait for ever.
            asyncio.get_running_loop().call_later(0.2, self.runtime.request_stop, "the test is over")
            await self.votes.settle(lambda: (1, 2))

        asyncio.run(settle())


def told(peer: int, *counts: int, tells_samples: bool = False) -> bytes:
    return class_vote(peer, counts, tells_samples=tells_samples).SerializeToString()


def vote_of(peer: int, shares: Sequence[int], samples: int) -> bytes:
    return ClassNote(peer=peer, shares=shares, samples=samples).SerializeToString()


def settled(folder: Path) -> Peer:
    peer = Peer(folder)
    for voter, source in ((1, 1), (2, 2), (3, 2)):
        peer.votes.heard(source, told(voter, 0, 50 * voter, 50 * voter))
    peer.settle()
    return peer


def test_the_first_round_waits_for_all_and_the_mean_of_their_shares_counts(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    peer.votes.heard(1, told(1, 0, 5, 5))
    peer.votes.heard(2, told(2, 0, 50, 50))
    peer.settle()
    assert peer.votes.missing == [3]
    assert not peer.votes.is_settled
    assert not peer.shares
    peer = settled(tmp_path)
    assert peer.votes.is_settled
    # A device with many samples counts no more than one with few.
    assert np.allclose(peer.shares, [[0.7 / 4, (0.2 + 1.5) / 4, (0.1 + 1.5) / 4]], atol=1e-12)


def test_where_samples_count_alike_devices_weigh_by_their_samples(tmp_path: Path) -> None:
    peer = Peer(tmp_path, voters=(0, 1), total_samples=400)
    peer.votes.heard(1, told(1, 0, 150, 150, tells_samples=True))
    peer.settle()
    assert np.allclose(peer.shares, [[70 / 400, 170 / 400, 160 / 400]], atol=1e-6)


def test_a_class_with_a_single_sample_is_not_rounded_away() -> None:
    assert class_vote(0, (1, 0, 9_999_999), tells_samples=False).shares == [1, 0, 1_000_000]
    assert decode_class_vote(told(0, 1, 0, 9_999_999), 3).shares == [1, 0, 1_000_000]


def test_a_vote_on_as_many_classes_as_are_allowed_fits_into_a_note() -> None:
    most = SimpleNamespace(name="many", num_classes=10_000)
    assert declared_shares(cast(Task, most), "vote") is None
    # The longest shares: three bytes each.
    vote = vote_of((1 << 31) - 1, [1_000_000] * most.num_classes, 1 << 53)
    assert len(vote) + MAX_PROOF_BYTES < MAX_BULLETIN_BYTES
    with pytest.raises(ConfigError, match=r"data\.class_shares: task many has 10001 classes, too many"):
        declared_shares(cast(Task, SimpleNamespace(name="many", num_classes=10_001)), "vote")


def test_news_is_passed_on_once_and_told_to_who_was_away(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    peer.votes.heard(1, told(3, 1, 1, 2))
    peer.votes.heard(2, told(3, 1, 1, 2))
    assert peer.transport.notes == [(2, CLASSES, told(3, 1, 1, 2))]
    assert list(peer.votes.linked(1)) == [told(0, 70, 20, 10), told(3, 1, 1, 2)]


def test_a_peer_that_is_started_again_uses_what_was_kept(tmp_path: Path) -> None:
    before = settled(tmp_path)
    again = Peer(tmp_path)
    assert again.votes.is_settled
    assert np.array_equal(again.shares, before.shares)
    assert list(again.votes.linked(1)) == list(before.votes.linked(1)), "those that join hear them"
    again.votes.heard(1, told(1, 9, 0, 0))
    assert list(again.votes.linked(1)) == list(before.votes.linked(1)), "what comes later changes nothing"


def test_a_peer_that_waits_says_again_what_it_knows_and_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_votes, "_AGAIN_S", 0.05)
    waiting = Peer(tmp_path)
    waiting.votes.heard(2, told(3, 1, 1, 2))
    waiting.transport.notes.clear()
    waiting.settle()
    said = [(peer, CLASSES, note) for note in (told(3, 1, 1, 2), told(0, 70, 20, 10)) for peer in (1, 2)]
    assert waiting.transport.notes[:4] == said
    other = settled(tmp_path)
    other.transport.notes.clear()
    for _ in range(2):
        other.votes.heard(1, told(3, 1, 1, 2))
    assert other.transport.notes == [(1, CLASSES, note) for note in other.votes.linked(1)], "once in a while"


def test_a_device_that_joins_uses_the_votes_and_gives_none(tmp_path: Path) -> None:
    peer = Peer(tmp_path, voters=(1, 2))
    for voter in (1, 2):
        peer.votes.heard(voter, told(voter, 0, 1, 1))
    peer.settle()
    # Its own classes have a share in any case.
    assert np.allclose(peer.shares, [[0.7 / 3, 1.2 / 3, 1.1 / 3]], atol=1e-6)
    assert list(peer.votes.linked(0)) == [told(1, 0, 1, 1), told(2, 0, 1, 1)]


def test_a_run_that_is_over_is_not_waited_for(tmp_path: Path) -> None:
    peer = Peer(tmp_path, voters=(1, 2))
    peer.neighbors.left.update({1: "completed", 2: "completed"})
    with pytest.raises(PeerUnreachable, match="came to its end"):
        peer.settle()


def test_a_run_that_began_without_votes_goes_on_without(tmp_path: Path) -> None:
    begin(Disk(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.class_shares: cannot be set in a run that began without it"):
        Peer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"a": "AA=="}', '{"1": "?"}', '{"1": "AAAA"}', '{"1": 7}'])
def test_kept_votes_that_are_damaged_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / CLASS_VOTES.name).write_text(content)
    with pytest.raises(StateError, match=r"class-votes\.json is damaged; without it"):
        Peer(tmp_path)


# -- members that lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "note",
    [
        b"\xff",
        told(1, 1, 1),
        told(1, 1, 1, 1, 1),
        vote_of(1, (0, 0, 0), 0),
        vote_of(1, (4_000_000_000, 0, 0), 0),
        vote_of(1, (400_000, 400_000, 100_000), 0),
        vote_of(1 << 31, (400_000, 400_000, 200_000), 0),
        told(1, 1, 1, 1, tells_samples=True),
    ],
)
def test_a_vote_that_makes_no_sense_is_an_offence(tmp_path: Path, note: bytes) -> None:
    peer = Peer(tmp_path)
    with pytest.raises(RemoteProtocolError):
        peer.votes.heard(1, note)
    assert peer.transport.notes == []
    assert peer.votes.missing == [0, 1, 2, 3]


@pytest.mark.parametrize("samples", [0, 401, (1 << 64) - 1])
def test_nobody_weighs_more_than_all_samples(tmp_path: Path, samples: int) -> None:
    peer = Peer(tmp_path, voters=(0, 1), total_samples=400)
    with pytest.raises(RemoteProtocolError, match="samples"):
        peer.votes.heard(1, vote_of(1, (400_000, 400_000, 200_000), samples))


def test_a_liar_moves_the_shares_by_its_own_part_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "honest").mkdir()
    (honest,) = settled(tmp_path / "honest").shares
    peer = Peer(tmp_path)
    for voter, source, counts in ((1, 1, (0, 1, 1)), (2, 2, (0, 1, 1)), (3, 2, (1 << 52, 0, 0))):
        peer.votes.heard(source, told(voter, *counts))
    peer.settle()
    (lied,) = peer.shares
    assert np.abs(lied - honest).max() <= 0.25 + 1e-6


def test_who_is_not_asked_has_no_vote(tmp_path: Path) -> None:
    peer = Peer(tmp_path, voters=(0, 1, 2))
    peer.votes.heard(1, told(3, 1, 1, 1))
    peer.votes.heard(1, told(0, 1, 1, 1))
    assert peer.transport.notes == []
    assert list(peer.votes.linked(1)) == [told(0, 70, 20, 10)]


def test_without_certificates_a_connected_neighbour_speaks_for_itself(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    peer.votes.heard(1, told(2, 1, 0, 0))
    assert 2 in peer.votes.missing
    peer.votes.heard(2, told(2, 0, 1, 0))
    peer.votes.heard(1, told(2, 1, 0, 0))
    assert list(peer.votes.linked(1)) == [told(0, 70, 20, 10), told(2, 0, 1, 0)]
    # It was started again with other data, before the run has begun.
    peer.votes.heard(2, told(2, 0, 0, 1))
    assert list(peer.votes.linked(1)) == [told(0, 70, 20, 10), told(2, 0, 0, 1)]


def test_with_certificates_a_vote_is_believed_whoever_brings_it_and_the_newest_counts(tmp_path: Path) -> None:
    cluster = Cluster("sparse-push", signed=True)
    peer = Peer(tmp_path, statements=cluster.statements(0))
    others = cluster.statements(3)
    first, second = (others.sign(CLASSES, told(3, *counts)) for counts in ((1, 0, 0), (0, 1, 0)))
    peer.votes.heard(1, second)
    assert peer.votes.missing == [0, 1, 2]
    peer.votes.heard(2, first)
    assert peer.transport.notes == [(2, CLASSES, second)]
    with pytest.raises(RemoteProtocolError, match="in its name"):
        peer.votes.heard(1, others.sign(CLASSES, told(1, 1, 0, 0)))
    peer.votes.heard(1, told(2, 1, 0, 0))
    assert peer.votes.missing == [0, 1, 2], "it is not signed"


def test_a_voter_that_never_stops_is_not_passed_on_for_ever(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    for number in range(1, 1000):
        peer.votes.heard(2, told(2, number, 1000 - number, 0))
    assert len(peer.transport.notes) <= 12


def all_voted(folder: Path, *, told_last: tuple[int, int, int] = (0, 1, 1)) -> tuple[Peer, Cluster, bytes]:
    """Return a peer that has all votes, of whom the last one is a liar's; the cluster; and what the peer then told."""
    cluster = Cluster("sparse-push", signed=True)
    peer = Peer(folder, statements=cluster.statements(0), all_speak=True)
    for voter, counts in ((1, (0, 1, 1)), (2, (0, 1, 1)), (3, told_last)):
        peer.votes.heard(2, cluster.statements(voter).sign(CLASSES, told(voter, *counts)))
    (own,) = peer.votes.linked_reports(1)
    return peer, cluster, unsealed(own)[0]


def test_nobody_begins_before_all_have_said_that_they_have_the_same_votes(tmp_path: Path) -> None:
    peer, cluster, own = all_voted(tmp_path)
    assert not peer.votes.missing
    assert peer.votes.unequal == [1, 2, 3]
    _, digest = decode_shares(own)
    for voter in (1, 2):
        peer.votes.heard_report(1, cluster.statements(voter).sign(CLASS_SHARES, encode_shares(voter, digest)))
    peer.settle()
    assert not peer.votes.is_settled
    assert not (tmp_path / CLASS_VOTES.name).exists()
    peer.votes.heard_report(1, cluster.statements(3).sign(CLASS_SHARES, encode_shares(3, digest)))
    assert peer.votes.unequal == []
    peer.runtime.stop_reason = None
    peer.settle()
    assert peer.votes.is_settled


def test_who_votes_differently_to_each_is_named_by_two_signed_votes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one").mkdir()
    one, cluster, own = all_voted(tmp_path / "one")
    (tmp_path / "other").mkdir()
    other, _, differs = all_voted(tmp_path / "other", told_last=(0, 0, 1))
    assert own != differs
    one.transport.notes.clear()
    # What the other told in place of voter 1, which has that vote.
    report = cluster.statements(1).sign(CLASS_SHARES, encode_shares(1, decode_shares(differs)[1]))
    one.votes.heard_report(1, report)
    cluster_vote = other.votes._notes[3]
    assert (1, CLASSES, cluster_vote) not in one.transport.notes
    assert {topic for _, topic, _ in one.transport.notes} == {CLASSES, CLASS_SHARES}, "all votes are told again"
    one.votes.heard(1, cluster_vote)
    assert one.votes.told_two.keys() == {3}
    assert "peer-3 has signed two different votes" in caplog.text
    for note in one.votes.told_two[3]:
        assert cluster.statements(0).check(CLASSES, 3, note)
    assert (2, CLASSES, cluster_vote) in one.transport.notes, "the others see it, too"
    # Nor is anybody named by what it has not signed.
    with pytest.raises(RemoteProtocolError, match="in its name"):
        one.votes.heard(1, cluster.statements(3).sign(CLASSES, told(1, 1, 0, 0)))
    one.votes.heard(1, cluster.statements(2).sign(CLASSES, told(2, 0, 1, 1)))
    assert one.votes.told_two.keys() == {3}
    assert 1 in one.votes.unequal


@pytest.mark.parametrize("note", [b"\xff", encode_shares(1, b"short"), encode_shares(1 << 31, bytes(32))])
def test_a_digest_of_votes_that_makes_no_sense_is_an_offence(tmp_path: Path, note: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Peer(tmp_path, all_speak=True).votes.heard_report(1, note)


def test_while_some_run_an_older_release_nobody_waits_for_what_they_cannot_tell(tmp_path: Path) -> None:
    peer = settled(tmp_path)
    assert peer.votes.is_settled
    assert list(peer.votes.linked_reports(1)) == []


# -- real peers --------------------------------------------------------------------------------------------------------


def shares_of(peer: Daemon) -> npt.NDArray[np.float64]:
    trainer = peer.local.trainer
    assert trainer._adjustment is not None
    return trainer._adjustment._shares


def test_a_vote_trains_to_the_bits_of_shares_that_are_declared(tmp_path: Path) -> None:
    voting, declaring = tmp_path / "voting", tmp_path / "declaring"
    for folder in (voting, declaring):
        folder.mkdir()
    folders = write_kits(voting, "data.class_shares=vote")
    first, second = (shares_of(peer) for peer in run_both(folders))
    assert np.array_equal(first, second)
    assert np.allclose(
        first, [(70 / 100 + 100 / 700) / 2, (20 / 100 + 200 / 700) / 2, (10 / 100 + 400 / 700) / 2], atol=1e-6
    )
    declared = write_kits(declaring, f"data.class_shares={first.tolist()}")
    run_both(declared)
    assert list(map(final_model, folders)) == list(map(final_model, declared))


def test_a_peer_that_is_stopped_while_it_waits_begins_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed = write_kits(tmp_path / "undisturbed", "data.class_shares=vote")
    run_both(undisturbed)
    folders = write_kits(tmp_path, "data.class_shares=vote")

    async def stopped(peer: Daemon) -> int:
        asyncio.get_running_loop().call_later(0.3, peer.runtime.request_stop, "stopped by the test")
        return await peer.main()

    alone = opened(folders[0])
    try:
        assert asyncio.run(stopped(alone)) == 0
        assert alone.loop.round == 0
    finally:
        alone.close()
    run_both(folders)
    assert list(map(final_model, folders)) == list(map(final_model, undisturbed))


def test_a_peer_that_is_killed_resumes_with_the_shares_that_it_began_with(tmp_path: Path) -> None:
    settings = ("data.class_shares=vote", "run.rounds=20", "evaluation.every_rounds=0")
    folders = write_kits(tmp_path, *settings)
    before = [shares_of(peer) for peer in run_both(folders)]
    kept = json.loads((folders[0] / "state" / CLASS_VOTES.name).read_text())
    assert sorted(kept) == ["0", "1"]
    again = opened(folders[0])
    try:
        assert again.loop.round == 20
        assert np.array_equal(shares_of(again), before[0])
    finally:
        again.close()
    (folders[0] / "state" / CLASS_VOTES.name).unlink()
    with pytest.raises(ConfigError, match=r"or that lost class-votes\.json"):
        opened(folders[0])


async def _one_joins(devices: Devices) -> None:
    for peer in (0, 1):
        devices.start(peer)
    await devices.until(lambda: devices.daemons[0].loop.round > 3)
    devices.start(2)
    await devices.until(lambda: devices.daemons[2].loop.round > 5)
    shares = [shares_of(devices.daemons[peer]) for peer in (0, 1, 2)]
    assert np.allclose(shares[2], shares[0], atol=1e-12)
    await devices.stop(0, 1, 2)


def test_a_device_that_joins_hears_the_votes_from_whom_it_meets(tmp_path: Path) -> None:
    options = ("data.partition=own", "data.class_shares=vote", "training.label_adjustment=true")
    Devices(tmp_path / "kits", rounds=60, num_peers=3, join_later=1, options=options).run(_one_joins)
