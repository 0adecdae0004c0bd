"""What a peer signs of how far it is, what its neighbours keep of it, and what it admits that was set back."""

from __future__ import annotations

import pytest

from peer.errors import RemoteProtocolError, SecurityError
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.node import membership_codec
from peer.node.progress import (
    ADMISSION,
    PROGRESS,
    KnownProgress,
    Progress,
    check_admission,
    decode_progress,
    encode_admission,
    encode_progress,
)
from peer.node.statements import Statements, Unsigned, unsealed
from tests.node.changing_members import Cluster


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster("sgp", signed=True)


def at(round_: int, era: int = 0) -> Progress:
    return Progress(era=era, round=round_)


def known(cluster: Cluster, peer: int, start: Progress | None = None) -> KnownProgress:
    return KnownProgress(peer, cluster.statements(peer), at(0) if start is None else start, {})


def admission(statements: Statements, peer: int, state: int = 3, signed: int = 9, *, topic: str = ADMISSION) -> bytes:
    said = encode_admission(peer, state=at(state), signed=at(signed))
    return statements.sign(topic, said)


def test_a_peer_that_was_set_back_learns_it_from_its_own_signature_alone(cluster: Cluster) -> None:
    neighbor, before = known(cluster, 0), known(cluster, 1)
    assert neighbor.hear(1, before.own(at(40))) == at(40)
    after = known(cluster, 1, at(12))
    assert after.shown(neighbor.of(1)) == at(40)
    assert neighbor.is_behind(1, neighbor.hear(1, after.own(at(12))))
    # What it says now replaces nothing.
    assert decode_progress(neighbor.of(1)) == (1, at(40))


def test_nothing_that_a_peer_signed_of_the_state_that_it_has_sets_it_back(cluster: Cluster) -> None:
    """A power cut costs a peer rounds that neighbours have seen; it signs those only that it cannot lose."""
    neighbor, peer = known(cluster, 0), known(cluster, 1, at(5))
    for round_ in (5, 7, 30):
        neighbor.hear(1, peer.own(at(round_)))
        assert peer.shown(neighbor.of(1)) is None
    started_again = known(cluster, 1, at(30))
    assert started_again.shown(neighbor.of(1)) is None
    assert not neighbor.is_behind(1, neighbor.hear(1, started_again.own(at(30))))


def test_a_state_that_was_put_back_on_purpose_is_of_a_later_era(cluster: Cluster) -> None:
    neighbor = known(cluster, 0)
    neighbor.hear(1, known(cluster, 1).own(at(40)))
    put_back = known(cluster, 1, at(10, era=1))
    assert put_back.shown(neighbor.of(1)) is None
    assert not neighbor.is_behind(1, neighbor.hear(1, put_back.own(at(10, era=1))))
    # A copy from before that is set back, however many rounds it holds.
    assert known(cluster, 1, at(90)).shown(neighbor.of(1)) == at(10, era=1)


def test_notes_come_every_ten_rounds_at_most_and_leave_out_the_certificate(cluster: Cluster) -> None:
    neighbor, peer = known(cluster, 0), known(cluster, 1)
    neighbor.hear(1, peer.own(at(0)))
    told = [round_ for round_ in range(32) if peer.note(at(round_)) is not None]
    assert told == [1, 11, 21, 31]
    assert peer.note(at(33), is_last=True) is not None
    assert peer.note(at(33), is_last=True) is None
    note = peer.note(at(50))
    assert note is not None
    assert len(note) < 120
    assert neighbor.hear(1, note) == at(50)
    # What is shown is whole: whoever checks it may have another certificate by then.
    assert cluster.statements(1).check(PROGRESS, 1, neighbor.of(1))


def test_a_renewed_certificate_is_in_notes_and_takes_the_place_of_the_old_one(cluster: Cluster) -> None:
    neighbor, peer = known(cluster, 0), known(cluster, 1)
    neighbor.hear(1, peer.own(at(20)))
    peer._statements = cluster.statements(1)  # As `SignedStatements.renewed` does in a process that goes on.
    note = peer.note(at(30))
    assert note is not None
    assert neighbor.hear(1, note) == at(30)
    # Or the process was started again, and says in its hello what it had said before.
    again = known(cluster, 1, at(30))
    neighbor.hear(1, again.own(at(30)))
    note = again.note(at(40))
    assert note is not None
    assert neighbor.hear(1, note) == at(40)


@pytest.mark.parametrize(
    ("signer", "peer", "topic", "text"),
    [
        (2, 1, PROGRESS, "certificate of 'peer-2'"),
        (1, 2, PROGRESS, "that of peer 2"),
        (1, 1, "evaluation", "not that of the certificate"),
    ],
)
def test_progress_that_a_peer_did_not_sign_is_refused(
    cluster: Cluster, signer: int, peer: int, topic: str, text: str
) -> None:
    forged = cluster.statements(signer).sign(topic, encode_progress(peer, at(99)))
    with pytest.raises(RemoteProtocolError, match=text):
        known(cluster, 0).hear(1, forged)
    with pytest.raises(RemoteProtocolError, match=text):
        known(cluster, 1).shown(forged)


@pytest.mark.parametrize(
    "said", [b"\xff", b"", encode_progress(1, at(1 << 62)), encode_progress(1, at(7)), b"x" * 10_000]
)
def test_nonsense_and_what_nobody_signed_is_refused(cluster: Cluster, said: bytes) -> None:
    for statements in (cluster.statements(0), cluster.statements(0, unsigned="accept"), Unsigned()):
        with pytest.raises(RemoteProtocolError):
            KnownProgress(0, statements, at(0), {}).hear(1, said)


def test_an_admission_proves_the_loss_of_its_signer_alone(cluster: Cluster) -> None:
    statements = cluster.statements(0)
    said = admission(cluster.statements(1), 1)
    check_admission(statements, 1, said)
    bad = [
        (2, said),
        (1, admission(cluster.statements(2), 1)),
        (1, admission(cluster.statements(1), 1, topic=PROGRESS)),
        # An old hello is none, whatever it is taken for.
        (1, cluster.statements(1).sign(PROGRESS, encode_progress(1, at(3)))),
        (1, admission(cluster.statements(1), 1, state=9, signed=9)),
        (1, admission(Unsigned(), 1)),
        (1 + cluster.numbering.stride, said),
    ]
    for subject, other in bad:
        with pytest.raises(SecurityError):
            check_admission(statements, subject, other)
    for lenient in (cluster.statements(0, unsigned="accept"), Unsigned()):
        with pytest.raises(SecurityError, match="nobody"):
            check_admission(lenient, 1, unsealed(said)[0])


def test_changes_keep_an_admission_and_the_state_of_those_without_is_as_before(cluster: Cluster) -> None:
    loss = Change(ChangeKind.LOST, 1, 0, 60, 4, admitted=admission(cluster.statements(1), 1))
    frame = membership_codec.encode(loss)
    assert membership_codec.decode(frame, 6, sender=0).admitted == loss.admitted
    membership, again = Membership((0, 1, 2), (loss,)), Membership((0, 1, 2))
    again.restore(membership.state())
    assert again.changes[0].admitted == loss.admitted
    by_votes = Membership((0, 1, 2), (Change(ChangeKind.LOST, 1, 0, 60, 4, votes=(b"1",), ordered=b"2"),))
    assert by_votes.state() == [[3, 1, 0, 60, 4, None, "", ["31"], "32"]]
    with pytest.raises(RemoteProtocolError, match="votes on the LEAVE"):
        membership_codec.decode(
            membership_codec.encode(Change(ChangeKind.LEAVE, 1, 1, 60, admitted=loss.admitted)), 6, sender=0
        )
