"""Losses that no majority and no operator has decided: nobody believes them, least of all who is said to be lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.errors import ConfigError, RemoteProtocolError, SecurityError
from peer.gossip.membership import Change, ChangeKind
from peer.node import membership_codec
from peer.node.loss_votes import LOST, LossVote, LossVotes, Quorum
from peer.node.membership_checks import check_own_loss
from peer.node.membership_planning import plan_change
from peer.node.statements import MEMBERS, Unsigned
from peer.proto.sottovoce.v1 import membership_pb2 as pb
from tests.node.changing_members import Cluster

LEAD = 3


def vote(cluster: Cluster, voter: int, subject: int, t: int) -> bytes:
    """Return what a member signs that wants another one, or itself, to be lost."""
    message = pb.LossVote(voter=voter, subject=subject, round=t)
    return cluster.statements(voter).sign(LOST, message.SerializeToString(deterministic=True))


def announced(cluster: Cluster, change: Change) -> bytes:
    """Return the frame with which the issuer of a change tells of it."""
    statement = membership_codec.encode(change)[len(membership_codec.MAGIC) :]
    return membership_codec.MAGIC + cluster.statements(change.issuer).sign(MEMBERS, statement)


def tell(cluster: Cluster, change: Change, receiver: int = 1) -> None:
    """Let the issuer of a change tell a peer of it."""
    victim = cluster.peers[receiver]
    seq = victim.links.incoming[change.issuer].last_seq + 1
    cluster.perform(receiver, victim.receive(change.issuer, seq, announced(cluster, change), 0.0))


def started(*, by_majority: bool = False, upto: int = 5, **options: bool) -> Cluster:
    cluster = Cluster("sparse-push", seed=3, num_first=5, num_peers=5, signed=True, by_majority=by_majority, **options)
    cluster.run(upto)
    return cluster


@pytest.mark.parametrize("by_majority", [False, True])
@pytest.mark.parametrize(
    "how", ["by its word", "by its vote", "by its votes", "by another's order", "by a forged order"]
)
def test_the_word_of_one_member_is_believed_by_nobody(how: str, by_majority: bool) -> None:
    cluster = started(by_majority=by_majority)
    own = vote(cluster, 0, 3, 5)
    grounds = {
        "by its word": {},
        "by its vote": {"votes": (own,)},
        "by its votes": {"votes": (own, own, own, own)},
        "by another's order": {"ordered": cluster.order(4)},
        "by a forged order": {"ordered": cluster.order(3)[:-1] + b"\0"},
    }[how]
    change = Change(ChangeKind.LOST, 3, 0, 40, 1, **grounds)
    for receiver in (1, 2, 4):
        journaled = len(cluster.disks[receiver].operations)
        with pytest.raises(RemoteProtocolError, match="told of the loss of peer 3") as caught:
            tell(cluster, change, receiver)
        assert caught.value.peer == 0
        assert len(cluster.disks[receiver].operations) == journaled
    cluster.run(30)
    assert cluster.rounds() == dict.fromkeys(range(5), 30)


def test_votes_of_all_are_nothing_where_members_declare_no_losses() -> None:
    cluster = started()
    votes = tuple(vote(cluster, voter, 3, 5) for voter in (0, 1, 2, 4))
    with pytest.raises(RemoteProtocolError, match="without the order of an operator"):
        tell(cluster, Change(ChangeKind.LOST, 3, 0, 40, 1, votes=votes))


def test_what_a_peer_says_of_its_own_loss_is_no_vote() -> None:
    """Two of four cannot reach it, and with its own vote they would be three: nobody declares that, nor believes it."""
    cluster = Cluster("sparse-push", seed=3, num_first=4, num_peers=4, signed=True, by_majority=True)
    cluster.run(5)
    votes = tuple(vote(cluster, voter, 3, 5) for voter in (0, 1, 3))
    with pytest.raises(ConfigError, match="no member would believe this loss: 2 have voted for it"):
        plan_change(cluster.peers[0].participant.membership, ChangeKind.LOST, 3, votes=votes)
    with pytest.raises(RemoteProtocolError, match="2 have voted for it"):
        tell(cluster, Change(ChangeKind.LOST, 3, 0, 40, 1, votes=votes))
    membership = cluster.peers[0].participant.membership
    deciding = LossVotes(0, membership.views.membership, cluster.statements(0), after_s=1.0)  # type: ignore[union-attr]
    deciding.look(5, LEAD, {3: 2.0}, 0.0)
    deciding.hear(votes[1], 5, LEAD)
    with pytest.raises(RemoteProtocolError, match="voted for its own loss") as caught:
        deciding.hear(votes[2], 5, LEAD)
    assert caught.value.peer == 3, "whoever passes it on may be of a release that does"
    assert not deciding.hear(votes[2], 5, LEAD), "one offence"
    assert deciding.count(3) == (2, 4)
    assert deciding.decided(100.0) == deciding.decided(200.0) == []
    # It may still vote on others, and with the vote of one that cannot reach it either, the loss is decided.
    assert deciding.hear(vote(cluster, 3, 2, 5), 5, LEAD)
    assert deciding.hear(vote(cluster, 2, 3, 5), 5, LEAD)
    deciding.decided(300.0)
    ((subject, decided),) = deciding.decided(400.0)
    change = plan_change(membership, ChangeKind.LOST, subject, votes=decided)
    for receiver in (1, 2):
        tell(cluster, replace(change, issuer=0), receiver)
        assert cluster.peers[receiver].participant.membership.is_lost(3)


def test_without_certificates_nobody_is_blamed_for_a_vote_in_its_name() -> None:
    cluster = Cluster("sparse-push", num_first=4, num_peers=4, by_majority=True)
    membership = cluster.peers[0].participant.membership
    votes = LossVotes(0, membership.views.membership, Unsigned(), after_s=1.0)  # type: ignore[union-attr]
    assert not votes.hear(pb.LossVote(voter=3, subject=3, round=1).SerializeToString(), 1, LEAD)
    assert votes.suspects == set()


def test_after_such_an_attack_an_operator_frees_the_run_through_any_peer() -> None:
    """Peer 3 hides from two and votes for its own loss. Whoever announces the order, and has votes meanwhile."""
    for asked in (0, 1, 2):
        cluster = Cluster("sparse-push", seed=3, num_first=4, num_peers=4, signed=True, by_majority=True)
        cluster.run(5)
        votes = tuple(vote(cluster, voter, 3, 5) for voter in (0, 1, 3))
        with pytest.raises(RemoteProtocolError):
            tell(cluster, Change(ChangeKind.LOST, 3, 0, 40, 1, votes=votes), receiver=2)
        cluster.kill(3)
        cluster.run(60)
        cluster.announce(asked, ChangeKind.LOST, 3)
        cluster.run(60)
        assert cluster.rounds() == dict.fromkeys((0, 1, 2), 60)


# -- the own loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upto", [0, 5])
@pytest.mark.parametrize("by_majority", [False, True])
def test_no_peer_takes_the_word_of_another_for_its_own_loss(upto: int, by_majority: bool) -> None:
    """Nor one that has done nothing yet, and would become a newcomer that all refuse."""
    cluster = started(by_majority=by_majority, upto=upto)
    known = cluster.peers[1].participant.membership
    votes = tuple(vote(cluster, voter, 1, upto) for voter in (0, 1, 2))
    for lie in ((), votes[:1], votes):
        with pytest.raises(SecurityError):
            check_own_loss(known, announced(cluster, Change(ChangeKind.LOST, 1, 0, 40, 1, votes=lie)))
    ordered = Change(ChangeKind.LOST, 1, 0, 40, 1, ordered=cluster.order(1))
    check_own_loss(known, announced(cluster, ordered))
    with pytest.raises(SecurityError):
        check_own_loss(known, membership_codec.encode(ordered))
    with pytest.raises(SecurityError, match="about another peer"):
        check_own_loss(known, announced(cluster, replace(ordered, ordered=cluster.order(1 + cluster.numbering.stride))))


def test_votes_from_before_a_peer_was_back_do_not_prove_its_loss() -> None:
    """A majority could not reach it for a while. It came back, and somebody has kept their votes."""
    cluster = started(by_majority=True)
    votes = tuple(vote(cluster, voter, 1, 5) for voter in (0, 2, 3))
    frame = announced(cluster, Change(ChangeKind.LOST, 1, 0, 40, 1, votes=votes))
    known = cluster.peers[1].participant.membership
    check_own_loss(known, frame)
    cluster.run(90)
    with pytest.raises(SecurityError, match="gone on with the others since"):
        check_own_loss(known, frame)


def test_where_nothing_is_signed_nothing_proves_the_own_loss() -> None:
    cluster = Cluster("sparse-push", num_first=4, num_peers=4, by_majority=True)
    cluster.run(3)
    known = cluster.peers[1].participant.membership
    votes = tuple(pb.LossVote(voter=voter, subject=1, round=3).SerializeToString() for voter in (0, 2, 3))
    for change in (
        Change(ChangeKind.LOST, 1, 0, 40, 1, votes=votes),
        Change(ChangeKind.LOST, 1, 0, 40, 1, ordered=pb.LossOrder(name="peer-1").SerializeToString()),
    ):
        with pytest.raises(SecurityError, match="nobody has signed it"):
            check_own_loss(known, membership_codec.encode(change))


# -- the release before ------------------------------------------------------------------------------------------------


def test_the_word_of_a_member_counts_until_all_run_this_release_and_then_no_more() -> None:
    """Releases before 0.3 announce losses without an order. What was believed of it is believed in every replay."""
    cluster = started(upto=2)
    victims = {receiver: cluster.peers[receiver].participant.membership for receiver in (1, 2, 4)}
    for receiver, known in victims.items():
        known.rules = replace(known.rules, word_suffices=lambda: True)
        tell(cluster, Change(ChangeKind.LOST, 3, 0, 40, 1), receiver)
    victim = cluster.peers[3].participant.membership
    cluster.kill(3)
    for receiver in victims:
        cluster.restart(receiver)
        known = cluster.peers[receiver].participant.membership
        assert known.is_lost(3)
        assert not known.rules.word_suffices()
        with pytest.raises(RemoteProtocolError, match="without the order of an operator"):
            tell(cluster, Change(ChangeKind.LOST, 2 if receiver != 2 else 1, 0, 60, 1), receiver)
        with pytest.raises(SecurityError):
            check_own_loss(victim, known.proofs_of_loss()[3])


def test_no_peer_of_this_release_announces_a_loss_by_its_word() -> None:
    cluster = started()
    known = cluster.peers[0].participant.membership
    known.rules = replace(known.rules, word_suffices=lambda: True)
    with pytest.raises(ConfigError, match=r"run `sotto remove` where operator\.pem and operator\.key are"):
        plan_change(known, ChangeKind.LOST, 3)


def test_one_rule_counts_the_votes_for_who_declares_and_for_who_is_told() -> None:
    """For every set of voters of three to six members: what one may announce is refused by none."""
    for num_peers in (3, 4, 5, 6):
        cluster = Cluster("sparse-push", num_first=num_peers, num_peers=num_peers, by_majority=True)
        for chosen in range(1, 1 << num_peers):
            voters = [peer for peer in range(num_peers) if chosen >> peer & 1]
            votes = tuple(pb.LossVote(voter=voter, subject=2, round=0).SerializeToString() for voter in voters)
            membership = cluster.peers[0].participant.membership
            quorum = Quorum(membership.views.membership, 2, [LossVote(voter, 2, 0) for voter in voters])  # type: ignore[union-attr]
            change = Change(ChangeKind.LOST, 2, 0, 60, 0, votes=votes)
            try:
                membership.grounds.check(change)
                is_believed = True
            except SecurityError:
                is_believed = False
            assert is_believed == quorum.has_decided == (2 * len({*voters} - {2}) > num_peers)
