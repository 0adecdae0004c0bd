"""Who decides that a peer is lost where no person does: a strict majority, and never two parts of one cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.errors import ConfigError, RemoteProtocolError, SecurityError
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.net.security.certificates import Role
from peer.net.security.orders import loss_order
from peer.node import membership_codec
from peer.node.loss_votes import LOST, TELL_EVERY_S, LossVote, LossVotes, Quorum, decode_vote, ordered
from peer.node.membership_checks import check_own_loss
from peer.node.membership_planning import plan_change
from peer.node.statements import Unsigned
from tests.node.changing_members import AUTHORITY, Cluster

AFTER_S, LEAD = 10.0, 3


def voter(peer: int, membership: Membership) -> LossVotes:
    return LossVotes(peer, membership, Unsigned(), after_s=AFTER_S)


def electors(num_peers: int) -> list[LossVotes]:
    """Return the votes of all members of a run, each with its own view of who is a member."""
    return [voter(peer, Membership(tuple(range(num_peers)))) for peer in range(num_peers)]


def divide(parts: list[set[int]], num_peers: int, t: int = 7) -> list[LossVotes]:
    """Let peers in one part hear nothing of those in another for long; return what they know then."""
    everybody = electors(num_peers)
    for part in parts:
        for peer in part:
            away = dict.fromkeys(set(range(num_peers)) - part, AFTER_S + 1)
            for note in everybody[peer].look(t, LEAD, away, 0.0):
                for other in part - {peer}:
                    everybody[other].hear(note, t, LEAD)
    return everybody


@pytest.mark.parametrize(
    ("parts", "decides"),
    [
        ([{0, 1}, {2, 3}], None),
        ([{0}, {1, 2, 3}], {0}),
        ([{0, 1}, {2}, {3}], None),
        ([{0, 1, 2}, {3, 4}], {3, 4}),
        ([{0, 1}, {2, 3}, {4}], None),
        ([{0}, {1}], None),
        ([{0, 1}, {2}], {2}),
    ],
)
def test_only_a_strict_majority_decides(parts: list[set[int]], decides: set[int] | None) -> None:
    num_peers = sum(map(len, parts))
    everybody = divide(parts, num_peers)
    for part in parts:
        for peer in part:
            everybody[peer].decided(1000.0)  # The first of the voters at once, the others after a while.
        found = [{subject for subject, _ in everybody[peer].decided(2000.0)} for peer in part]
        expected = decides if decides is not None and part.isdisjoint(decides) else set()
        assert found == [expected] * len(part)


def test_the_voters_declare_a_loss_in_turn() -> None:
    everybody = divide([{0}, {1, 2, 3}], 4)
    asked = [[bool(everybody[peer].decided(now)) for peer in (1, 2, 3)] for now in (100.0, 102.5, 105.0, 110.0)]
    # Whoever finds that it cannot be announced yet tries again.
    assert asked == [[True, False, False], [False, True, False], [False, False, True], [True, False, False]]


def test_whoever_is_back_loses_its_votes() -> None:
    everybody = divide([{0}, {1, 2, 3}], 4)
    everybody[1].look(7, LEAD, {0: 0.0}, 1.0)
    assert everybody[1].own == set()
    assert everybody[1].decided(100.0) == everybody[1].decided(200.0) == []
    # Of a round that all have left behind, no vote counts.
    assert everybody[2].suspects == {0}
    everybody[2].look(7 + 2 * LEAD + 1, LEAD, {}, 100.0)
    assert everybody[2].suspects == set()


def test_nobody_votes_for_more_losses_than_leave_a_majority() -> None:
    (own, *_) = electors(5)
    own.look(7, LEAD, dict.fromkeys((1, 2, 3, 4), AFTER_S + 1), 0.0)
    assert own.own == {1, 2}


def test_votes_are_told_again_because_notes_may_be_lost() -> None:
    (own, *_) = electors(4)
    away = {3: AFTER_S + 1}
    assert len(own.look(7, LEAD, away, 0.0)) == 1
    assert own.look(7, LEAD, away, TELL_EVERY_S / 2) == []
    assert len(own.look(7, LEAD, away, TELL_EVERY_S)) == 1


def test_two_parts_never_both_believe_that_the_other_is_lost() -> None:
    """Whatever votes there are: those that one member believes leave a majority, of which another part lacks one."""
    membership = Membership((0, 1, 2, 3, 4))
    membership.add(Change(ChangeKind.LOST, 3, 0, 60))
    membership.add(Change(ChangeKind.LOST, 4, 0, 60))
    votes = [LossVote(peer, 0, 7) for peer in (1, 2, 3, 4)]
    assert not Quorum(membership, 0, votes).may_go_on
    assert Quorum(Membership((0, 1, 2, 3, 4)), 0, votes).may_go_on


def test_a_majority_of_the_members_before_and_after_a_change_is_needed() -> None:
    membership = Membership((0, 1, 2))
    for peer in (3, 4):
        membership.add(Change(ChangeKind.JOIN, peer, 0, 10))
    assert not Quorum(membership, 2, [LossVote(0, 2, 9), LossVote(1, 2, 10)]).has_decided
    assert Quorum(membership, 2, [LossVote(0, 2, 9), LossVote(1, 2, 10), LossVote(3, 2, 10)]).has_decided


@pytest.mark.parametrize("said", [b"\xff", b"\x08\x01" * 5000])
def test_bytes_that_are_no_vote_are_refused(said: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="vote"):
        electors(3)[0].hear(said, 0, LEAD)
    with pytest.raises(SecurityError):
        decode_vote(said)


# -- in a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster("sparse-push", seed=3, num_peers=5, signed=True, by_majority=True)
    cluster.run(6)
    cluster.kill(3)
    cluster.run(60)
    return cluster


def cast(cluster: Cluster, *voters: int, subject: int = 3, t: int | None = None) -> tuple[bytes, ...]:
    """Return the signed votes of these peers."""
    votes = []
    for peer in voters:
        member = cluster.peers[peer].participant
        lossy = member.membership.loss_votes(cluster.statements(peer), after_s=AFTER_S)
        votes += lossy.look(member.round if t is None else t, LEAD, {subject: AFTER_S + 1}, 0.0)
    return tuple(votes)


def announce(cluster: Cluster, peer: int, votes: tuple[bytes, ...] = (), ordered: bytes = b"") -> None:
    membership = cluster.peers[peer].participant.membership
    change = plan_change(membership, ChangeKind.LOST, 3, votes=votes, ordered=ordered)
    cluster.perform(peer, cluster.peers[peer].announce(change, 0.0))


def heard_by(cluster: Cluster, subject: int) -> int:
    return next(p.peer for p in cluster.members if p.session.last_heard(subject) is not None)


def test_the_others_go_on_without_a_peer_that_a_majority_has_not_reached(cluster: Cluster) -> None:
    announce(cluster, heard_by(cluster, 3), cast(cluster, 0, 1, 2))
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4), 90)
    for peer in (0, 1, 2, 4):
        cluster.restart(peer)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4), 90)


@pytest.mark.parametrize("how", ["minority", "none", "twice", "forged", "another", "old"])
def test_a_loss_that_no_majority_has_decided_is_refused(cluster: Cluster, how: str) -> None:
    votes = cast(cluster, 0, 1, 2)
    lie = {
        "minority": votes[:2],
        "none": (),
        "twice": (votes[0], votes[0], votes[1]),
        "forged": (*votes[:2], votes[2][:-1] + bytes([votes[2][-1] ^ 1])),
        "another": (*votes[:2], *cast(cluster, 2, subject=4)),
        "old": (*votes[:2], *cast(cluster, 2, t=90)),
    }[how]
    change = Change(ChangeKind.LOST, 3, 0, 60, 1, votes=lie)
    frame = membership_codec.MAGIC + cluster.statements(0).sign("members", membership_codec.encode(change)[2:])
    victim = cluster.peers[1]
    with pytest.raises(RemoteProtocolError, match="loss of peer 3"):
        victim.receive(0, victim.links.incoming[0].last_seq + 1, frame, 0.0)
    assert victim.participant.membership.changes == ()


def test_without_votes_only_an_operator_decides(cluster: Cluster) -> None:
    peer = heard_by(cluster, 3)
    with pytest.raises(ConfigError, match="the order of an operator"):
        announce(cluster, peer)
    with pytest.raises(ConfigError, match="2 have voted for it"):
        announce(cluster, peer, cast(cluster, 0, 1))
    operator = AUTHORITY.credentials(AUTHORITY.issue("operator", role=Role.OPERATOR))
    announce(cluster, peer, ordered=loss_order("peer-3", "run", operator))
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 4), 90)


@pytest.mark.parametrize("how", ["a peer's key", "another run", "another peer", "unsigned", "another incarnation"])
def test_an_order_that_no_operator_gave_is_refused(cluster: Cluster, how: str) -> None:
    operator = AUTHORITY.credentials(AUTHORITY.issue("operator", role=Role.OPERATOR))
    member = AUTHORITY.credentials(AUTHORITY.issue("peer-0"))
    order = {
        "a peer's key": loss_order("peer-3", "run", member),
        "another run": loss_order("peer-3", "another", operator),
        "another peer": loss_order("peer-4", "run", operator),
        "unsigned": loss_order("peer-3", "run", None),
        "another incarnation": loss_order("peer-3", "run", operator, 1),
    }[how]
    assert ordered(order) in (("peer-3", 0), ("peer-3", 1), ("peer-4", 0))
    change = Change(ChangeKind.LOST, 3, 0, 60, 1, ordered=order)
    frame = membership_codec.MAGIC + cluster.statements(0).sign("members", membership_codec.encode(change)[2:])
    victim = cluster.peers[1]
    with pytest.raises(RemoteProtocolError, match="loss of peer 3"):
        victim.receive(0, victim.links.incoming[0].last_seq + 1, frame, 0.0)


def test_a_member_signs_its_votes(cluster: Cluster) -> None:
    (vote,) = cast(cluster, 0)
    cluster.statements(1).check(LOST, 0, vote)
    with pytest.raises(SecurityError):
        cluster.statements(1).check(LOST, 2, vote)


def test_a_lost_peer_can_be_shown_that_it_is_and_by_nothing_less(cluster: Cluster) -> None:
    announce(cluster, heard_by(cluster, 3), cast(cluster, 0, 1, 2))
    cluster.run(90)
    lost = cluster.peers[3].participant.membership
    (proof,) = {member.membership.proofs_of_loss()[3] for member in cluster.members[:1]}
    check_own_loss(lost, proof)
    lone = Change(ChangeKind.LOST, 3, 0, 60, 1, votes=cast(cluster, 0))
    about_another = Change(ChangeKind.LOST, 4, 0, 60, 1, votes=cast(cluster, 0, 1, 2, subject=4))
    for change in (lone, about_another):
        statement = membership_codec.encode(change)[2:]
        with pytest.raises(SecurityError):
            check_own_loss(lost, membership_codec.MAGIC + cluster.statements(0).sign("members", statement))
    with pytest.raises(SecurityError):
        check_own_loss(
            lost, membership_codec.encode(Change(ChangeKind.LOST, 3, 0, 60, 1, votes=cast(cluster, 0, 1, 2)))
        )


def test_two_parts_hear_what_the_other_believes_where_the_lost_stood_between_them() -> None:
    """On a line: the graph without 3 leads from 2 to 4 alone, and the one without 4 from 5 to 3 alone."""
    cluster = Cluster("sparse-push", graph="line", seed=3, num_first=6, signed=True, by_majority=True)
    cluster.run(6)
    cluster.kill(3)
    cluster.kill(4)
    cluster.run(60)
    for peer, subject in ((2, 3), (5, 4)):
        votes = cast(cluster, 0, 1, 2, 5, subject=subject)
        change = plan_change(cluster.peers[peer].participant.membership, ChangeKind.LOST, subject, votes=votes)
        cluster.perform(peer, cluster.peers[peer].announce(change, 0.0))
    cluster.run(90)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 5), 90)
    assert {member.membership.members for member in cluster.members} == {(0, 1, 2, 5)}
    for peer in (0, 1, 2, 5):
        cluster.restart(peer)
    assert cluster.rounds() == dict.fromkeys((0, 1, 2, 5), 90)


# -- a peer that joins -------------------------------------------------------------------------------------------------


@pytest.fixture
def joining() -> Cluster:
    """A ring of five that peer 5 is about to join: it waits for its model in a round that no other has ended."""
    cluster = Cluster("sparse-push", graph="ring", seed=3, num_first=5, num_peers=6, signed=True, by_majority=True)
    cluster.run(30)
    cluster.announce(0, ChangeKind.JOIN, 5)
    cluster.run(30)
    assert cluster.rounds()[5] > 30
    return cluster


def test_a_newcomer_believes_a_loss_once_all_that_are_left_have_reported_it(joining: Cluster) -> None:
    """Peers 0 and 2 take each other for lost, and all others take 2 for lost."""
    participant = joining.peers[5].participant
    newcomer, news = participant.membership, participant.membership_news
    effective = joining.rounds()[5] + 1
    votes = {0: cast(joining, 1, 2, 3, subject=0), 2: cast(joining, 0, 1, 3, subject=2)}

    def believed(subject: int, issuer: int) -> set[int]:
        news.learn(Change(ChangeKind.LOST, subject, issuer, effective, 29, votes=votes[subject]), issuer)
        return {change.subject for change in newcomer.changes if change.kind is ChangeKind.LOST}

    assert believed(0, 2) == set()
    for issuer in (0, 1, 3):
        assert believed(2, issuer) == set()
    assert believed(2, 4) == {2}
    assert {change.issuer for change in newcomer.changes if change.subject == 2} == {0, 1, 3, 4, 5}


def test_what_a_newcomer_heard_while_it_joined_counts_with_what_it_hears_as_a_member(joining: Cluster) -> None:
    participant = joining.peers[5].participant
    newcomer, news = participant.membership, participant.membership_news
    effective, votes = joining.rounds()[5] + 20, cast(joining, 0, 1, 3, subject=2)
    for issuer in (0, 1):
        news.learn(Change(ChangeKind.LOST, 2, issuer, effective, 29, votes=votes), issuer)
    joining.run(effective - 10)
    news.learn(Change(ChangeKind.LOST, 2, 3, effective, 29, votes=votes), 3)
    assert {change.issuer for change in newcomer.changes if change.subject == 2} == {0, 1, 3, 5}


def test_a_newcomer_is_known_to_whom_it_tells_of_a_loss(joining: Cluster) -> None:
    """After a loss all members are told what each has heard of the lost peer, and not all know who joins."""
    news, votes = joining.peers[5].participant.membership_news, cast(joining, 0, 1, 3, subject=2)
    effective = joining.rounds()[5] + 1
    for issuer in (0, 1, 3, 4):
        learned = news.learn(Change(ChangeKind.LOST, 2, issuer, effective, 29, votes=votes), issuer)
    assert learned is not None
    for receiver in (1, 3):
        told = [(change.kind, change.issuer) for other, change in learned.notices if other == receiver]
        assert told.index((ChangeKind.JOIN, 0)) < told.index((ChangeKind.LOST, 5))


def test_a_newcomer_does_not_take_old_votes_for_a_lie(joining: Cluster) -> None:
    """It cannot judge what was decided before it came; nor does it believe it."""
    change = Change(ChangeKind.LOST, 2, 0, joining.rounds()[5] + 1, 1, votes=cast(joining, 0, 1, 3, subject=2, t=3))
    frame = membership_codec.MAGIC + joining.statements(0).sign("members", membership_codec.encode(change)[2:])
    newcomer, member = joining.peers[5], joining.peers[1]
    newcomer.receive(0, newcomer.links.incoming[0].last_seq + 1, frame, 0.0)
    assert 2 not in newcomer.participant.session.lost
    with pytest.raises(RemoteProtocolError, match="of a round long ago"):
        member.receive(0, member.links.incoming[0].last_seq + 1, frame, 0.0)


def test_a_newcomer_whose_sponsor_is_lost_already_is_told_who_is(cluster: Cluster) -> None:
    announce(cluster, heard_by(cluster, 3), cast(cluster, 0, 1, 2))
    cluster.run(8)
    news = cluster.peers[1].participant.membership_news
    learned = news.learn(Change(ChangeKind.JOIN, 5, 3, 60), 2)
    assert learned is not None
    introduction = [change for receiver, change in learned.notices if receiver == 5]
    assert [(change.kind, change.subject) for change in introduction][-1] == (ChangeKind.JOIN, 5)
    assert (ChangeKind.LOST, 3) in {(change.kind, change.subject) for change in introduction}


def test_all_reports_of_a_lost_peer_count_whatever_they_go_by() -> None:
    """An operator declares peer 1 lost where it was not believed; whoever believed the votes does not report again."""
    cluster = Cluster("sparse-push", seed=3, num_first=4, num_peers=4, signed=True, by_majority=True)
    cluster.run(6)
    participant = cluster.peers[2].participant
    member, news = participant.membership, participant.membership_news
    by_votes = Change(ChangeKind.LOST, 1, 3, 58, 5, votes=cast(cluster, 0, 2, 3, subject=1))
    assert news.learn(Change(ChangeKind.LOST, 0, 1, 60, 5, votes=cast(cluster, 1, 2, 3, subject=0)), 1) is not None
    assert news.learn(by_votes, 3) is None
    assert by_votes not in member.changes
    assert news.learn(Change(ChangeKind.LOST, 1, 3, 60, 5, ordered=b"by an operator"), 3) is not None
    assert by_votes in member.changes
    later = replace(by_votes, issuer=0)
    assert news.learn(later, 0) is not None
