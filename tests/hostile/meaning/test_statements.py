"""Statements that others did not make: forged, taken from elsewhere, repeated, put in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peer.config.options import EvaluationOptions
from peer.daemon.notes.divergence import Divergence
from peer.daemon.notes.evaluations import Evaluations, SampleCounts
from peer.daemon.notes.notes import DIVERGED, EVALUATION, Hearsay, encode_divergence, encode_evaluation
from peer.errors import RemoteProtocolError, SecurityError
from peer.gossip.membership import Change, ChangeKind
from peer.net.security.authority import CertificateAuthority
from peer.node import membership_codec
from peer.node.loss_votes import LOST as VOTE
from peer.node.loss_votes import LossVotes
from peer.node.statements import MEMBERS, Statements, sealed, unsealed
from peer.proto.sottovoce.v1.membership_pb2 import LossVote
from peer.proto.sottovoce.v1.statement_pb2 import Proof
from peer.state.metrics import EvaluationRecord
from tests.node import changing_members
from tests.node.changing_members import Cluster
from tests.peers import newcomer

LEAVE, LOST, JOIN = ChangeKind.LEAVE, ChangeKind.LOST, ChangeKind.JOIN


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster("sparse-push", seed=3, signed=True)
    cluster.run(2)
    return cluster


def said(cluster: Cluster, signer: int, change: Change, *, topic: str = MEMBERS) -> bytes:
    """Return the frame with which a peer says something, whoever the change names as its issuer."""
    statement = membership_codec.encode(change)[len(membership_codec.MAGIC) :]
    return membership_codec.MAGIC + cluster.statements(signer).sign(topic, statement)


def lost(cluster: Cluster, subject: int = 3, effective: int = 60) -> Change:
    """Return what peer 2 announces of a peer that an operator has ordered to be left behind."""
    return Change(LOST, subject, 2, effective, 1, ordered=cluster.order(subject))


def tell(cluster: Cluster, frame: bytes) -> None:
    """Let peer 0 tell peer 1."""
    seq = cluster.peers[1].links.incoming[0].last_seq + 1
    cluster.perform(1, cluster.peers[1].receive(0, seq, frame, 0.0))


@pytest.mark.parametrize(
    ("change", "signer", "text"),
    [
        (Change(LOST, 3, 2, 60, 1), 0, "certificate of 'peer-0'"),
        (Change(LEAVE, 3, 3, 60), 0, "certificate of 'peer-0'"),
        (Change(JOIN, 5, 4, 60), 0, "certificate of 'peer-0'"),
    ],
)
def test_nobody_speaks_in_the_name_of_another(cluster: Cluster, change: Change, signer: int, text: str) -> None:
    before = cluster.peers[1].participant.membership.changes
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        tell(cluster, said(cluster, signer, change))
    assert caught.value.peer == 0
    assert cluster.peers[1].participant.membership.changes == before


def test_what_is_not_signed_is_refused_unless_the_configuration_accepts_it(cluster: Cluster) -> None:
    change = lost(cluster)
    with pytest.raises(RemoteProtocolError, match="not signed"):
        tell(cluster, membership_codec.encode(change))
    accepting = cluster.statements(1, unsigned="accept")
    assert not accepting.check(MEMBERS, 2, membership_codec.encode(change)[2:])


@pytest.mark.parametrize("position", [5, 40, -3])
def test_changed_bytes_are_refused(cluster: Cluster, position: int) -> None:
    frame = bytearray(said(cluster, 2, lost(cluster)))
    frame[position] ^= 1
    with pytest.raises(RemoteProtocolError):
        tell(cluster, bytes(frame))


def _other_run(cluster: Cluster, change: Change) -> bytes:
    statements = cluster.statements(2)
    statements._run = "another"
    return membership_codec.MAGIC + statements.sign(MEMBERS, membership_codec.encode(change)[2:])


def _other_authority(cluster: Cluster, change: Change) -> bytes:
    ours, changing_members.AUTHORITY = changing_members.AUTHORITY, CertificateAuthority.create("run")
    try:
        return said(cluster, 2, change)
    finally:
        changing_members.AUTHORITY = ours


def _other_topic(cluster: Cluster, change: Change) -> bytes:
    return said(cluster, 2, change, topic="diverged")


def _other_counter(cluster: Cluster, change: Change) -> bytes:
    statement, proof = unsealed(said(cluster, 2, change)[2:])
    assert proof is not None
    proof.counter += 1
    return membership_codec.MAGIC + sealed(statement, proof)


def _two_proofs(cluster: Cluster, change: Change) -> bytes:
    frame = said(cluster, 2, change)
    _, proof = unsealed(frame[2:])
    assert proof is not None
    return sealed(frame, proof)


def _something_behind_the_proof(cluster: Cluster, change: Change) -> bytes:
    return said(cluster, 2, change) + b"\x20\x50"  # effective_round = 80


@pytest.mark.parametrize(
    "forged",
    [_other_run, _other_authority, _other_topic, _other_counter, _two_proofs, _something_behind_the_proof],
)
def test_a_signature_proves_what_was_said_in_this_run_and_nothing_else(
    cluster: Cluster, forged: Callable[[Cluster, Change], bytes]
) -> None:
    with pytest.raises(RemoteProtocolError):
        tell(cluster, forged(cluster, lost(cluster)))
    assert cluster.peers[1].participant.membership.changes == ()


def test_a_statement_that_comes_again_changes_nothing(cluster: Cluster) -> None:
    frame = said(cluster, 2, lost(cluster))
    tell(cluster, frame)
    known = cluster.peers[1].participant.membership.changes
    tell(cluster, frame)
    assert cluster.peers[1].participant.membership.changes == known
    assert [change.told for change in known if change.issuer == 2] == [frame]


def test_two_statements_with_one_counter_name_a_culprit(cluster: Cluster) -> None:
    statements = cluster.statements(2)
    frames = []
    for change in (lost(cluster), lost(cluster, 4, 61)):
        statements._counter._last = 7000
        frames.append(membership_codec.MAGIC + statements.sign(MEMBERS, membership_codec.encode(change)[2:]))
    tell(cluster, frames[0])
    with pytest.raises(RemoteProtocolError, match="show that peer 2 lies"):
        tell(cluster, frames[1])


def test_a_newcomer_speaks_for_itself_with_its_number() -> None:
    cluster = Cluster("sparse-push", num_first=4, num_peers=6, num_listed=4, signed=True)
    statements = cluster.statements(0)
    signed = cluster.statements(4).sign(MEMBERS, b"\x08\x03")
    assert statements.check(MEMBERS, 4, signed)
    for other in (0, 5):
        with pytest.raises(SecurityError, match="certificate of 'peer-4'"):
            statements.check(MEMBERS, other, signed)
    assert newcomer(4).name == "peer-4"


def test_a_proof_that_makes_no_sense_is_refused(cluster: Cluster) -> None:
    check = cluster.statements(1).check
    for proof in (Proof(), Proof(counter=1 << 63), Proof(counter=1), Proof(counter=1, certificate=bytes(9000))):
        with pytest.raises(SecurityError):
            check(MEMBERS, 2, sealed(b"\x08\x03", proof))
    with pytest.raises(SecurityError):
        check(MEMBERS, 2, b"\xff" * 20)


# -- notes -------------------------------------------------------------------------------------------------------------


class Listener:
    """What peer 0 knows of accuracies, and what it passes on."""

    def __init__(self, cluster: Cluster, statements: Statements | None = None) -> None:
        self.passed_on: list[bytes] = []
        self.evaluations = Evaluations(
            Hearsay(0, range(5), statements or cluster.statements(0), lambda peer: True, lambda: 0.0),
            EvaluationOptions(),
            100,
            samples=SampleCounts((10, 2), 40),
            broadcast=lambda topic, note, besides: self.passed_on.append(note),
            on_news=lambda record: None,
        )

    def rounds_of(self, peer: int) -> int | None:
        record = self.evaluations.newest.get((peer, "test"))
        return None if record is None else record.round


def _note(round_: int, correct: int = 9, peer: int = 3) -> bytes:
    return encode_evaluation(
        EvaluationRecord(peer=peer, round=round_, split="test", correct=(correct, 1), total=(10, 2))
    )


def test_a_signed_accuracy_is_believed_whoever_brings_it(cluster: Cluster) -> None:
    listener, statements = Listener(cluster), cluster.statements(3)
    signed = statements.sign("evaluation", _note(10))
    listener.evaluations.heard(1, signed)
    assert listener.rounds_of(3) == 10
    assert listener.passed_on == [signed]
    assert listener.evaluations.told_by(listener.evaluations.newest[3, "test"]) == 3
    assert listener.evaluations.notes() == [signed]


def test_an_accuracy_in_the_name_of_another_is_not_believed(cluster: Cluster) -> None:
    listener = Listener(cluster)
    listener.evaluations.heard(1, _note(10))
    assert listener.rounds_of(3) is None
    with pytest.raises(RemoteProtocolError, match="certificate of 'peer-1'"):
        listener.evaluations.heard(1, cluster.statements(1).sign("evaluation", _note(10)))
    with pytest.raises(RemoteProtocolError, match="signature"):
        listener.evaluations.heard(1, cluster.statements(3).sign("diverged", _note(10)))
    assert listener.rounds_of(3) is None
    # Of itself, over its own link, a peer is believed without: an earlier release signs nothing.
    listener.evaluations.heard(3, _note(10))
    assert listener.rounds_of(3) == 10


def test_old_accuracies_replayed_or_in_another_order_change_nothing(cluster: Cluster) -> None:
    listener, statements = Listener(cluster), cluster.statements(3)
    signed = [statements.sign("evaluation", _note(round_)) for round_ in (20, 30)]
    listener.evaluations.heard(1, signed[1])
    for note in (*signed, signed[0]):
        listener.evaluations.heard(2, note)
    assert listener.rounds_of(3) == 30
    assert listener.passed_on == [signed[1]]
    # A peer that went back says so with a higher counter.
    listener.evaluations.heard(2, statements.sign("evaluation", _note(10)))
    assert listener.rounds_of(3) == 10
    assert encode_divergence(3, 10, "it") != signed[0]


def test_divergences_that_are_forged_replayed_or_in_another_order_change_nothing(cluster: Cluster) -> None:
    passed_on: list[bytes] = []
    divergence = Divergence(
        Hearsay(0, range(5), cluster.statements(0), lambda peer: False, lambda: 0.0), 100,
        name="peer-{}".format, advice="", stop=lambda reason: None,
        broadcast=lambda topic, note, besides: passed_on.append(note),
    )  # fmt: skip
    theirs, notes = cluster.statements(3), [encode_divergence(3, round_, "it") for round_ in (20, 30)]
    signed = [theirs.sign(DIVERGED, note) for note in notes]
    for forged in (cluster.statements(2).sign(DIVERGED, notes[1]), theirs.sign(EVALUATION, notes[1])):
        with pytest.raises(RemoteProtocolError, match="in its name"):
            divergence.heard(1, forged)
    for note in (signed[1], signed[0], signed[1]):
        divergence.heard(1, note)
    assert passed_on == [signed[1]]
    assert divergence.claims()[3].round == 30


class Counting:
    """Counts the signatures that somebody looks at."""

    def __init__(self, statements: Statements) -> None:
        self.checks, self._statements = 0, statements
        self.sign, self.check_order = statements.sign, statements.check_order

    def check(self, topic: str, issuer: int, said: bytes) -> bool:
        self.checks += 1
        return self._statements.check(topic, issuer, said)


def test_of_a_flood_of_fresh_signatures_few_are_looked_at(cluster: Cluster) -> None:
    """Its author signs each anew: of its last round, to and fro, and that it diverged."""
    counting, theirs = Counting(cluster.statements(0)), cluster.statements(3)
    listener = Listener(cluster, counting)
    for number in range(200):
        listener.evaluations.heard(number % 4 + 1, theirs.sign(EVALUATION, _note(100, number % 10)))
    assert counting.checks == len(listener.passed_on) == 20
    divergence = Divergence(
        Hearsay(0, range(5), counting, lambda peer: False, lambda: 0.0), 100,
        name="peer-{}".format, advice="", broadcast=lambda topic, note, besides: None, stop=lambda reason: None,
    )  # fmt: skip
    counting.checks = 0
    for number in range(100):
        divergence.heard(3, theirs.sign(DIVERGED, encode_divergence(3, number, "it")))
    assert counting.checks == 3


def test_a_member_that_votes_in_each_round_is_looked_at_now_and_then(cluster: Cluster) -> None:
    counting, theirs = Counting(cluster.statements(0)), cluster.statements(2)
    membership = Cluster("sparse-push", seed=3, signed=True, by_majority=True).peers[0].participant.membership
    votes = membership.loss_votes(counting, after_s=10.0)

    def heard(round_: int) -> bool:
        vote = LossVote(voter=2, subject=3, round=round_).SerializeToString(deterministic=True)
        return votes.hear(theirs.sign(VOTE, vote), round_, 3)

    assert sum(heard(round_) for round_ in range(50)) == counting.checks == 8
    votes.look(50, 3, {}, 10.0)
    assert sum(heard(round_) for round_ in range(50, 70)) == 5


def test_who_brings_forgeries_uses_up_nothing_of_whom_they_name(cluster: Cluster) -> None:
    listener = Listener(cluster)
    for round_ in range(50):
        with pytest.raises(RemoteProtocolError, match="in its name"):
            listener.evaluations.heard(1, cluster.statements(1).sign(EVALUATION, _note(round_)))
    listener.evaluations.heard(2, cluster.statements(3).sign(EVALUATION, _note(10)))
    assert listener.rounds_of(3) == 10


def test_votes_that_are_forged_replayed_or_in_another_order_change_nothing(cluster: Cluster) -> None:
    def vote(voter: int, round_: int, signer: Statements, topic: str = VOTE) -> bytes:
        return signer.sign(topic, LossVote(voter=voter, subject=3, round=round_).SerializeToString(deterministic=True))

    votes: LossVotes = (
        Cluster("sparse-push", seed=3, signed=True, by_majority=True)
        .peers[0]
        .participant.membership.loss_votes(cluster.statements(0), after_s=10.0)
    )
    one, two, lead = cluster.statements(1), cluster.statements(2), 3
    for forged in (vote(2, 7, one), vote(2, 7, two, DIVERGED)):
        with pytest.raises(RemoteProtocolError, match="told of a vote"):
            votes.hear(forged, 7, lead)
    newest, earlier = vote(2, 9, two), vote(2, 8, two)
    assert votes.hear(newest, 9, lead)
    assert not votes.hear(earlier, 9, lead)
    assert not votes.hear(newest, 9, lead)
    assert votes.count(3) == (1, 5)
    # Once rounds go on, it is void, however often it is told.
    assert not votes.hear(newest, 9 + 2 * lead + 1, lead)
    votes.look(9 + 2 * lead + 1, lead, {}, 0.0)
    assert votes.count(3) == (0, 0)
