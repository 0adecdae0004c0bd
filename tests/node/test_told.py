"""Digests of what members tell all others alike: the same for all that were told the same, whoever is killed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.errors import RemoteProtocolError, SecurityError
from peer.gossip import ALGORITHMS
from peer.gossip.membership import ChangeKind
from peer.node import membership_codec
from peer.node.membership_planning import plan_change
from peer.node.statements import MEMBERS
from peer.node.told import (
    KEPT_SEGMENTS,
    MAX_NOTE_BYTES,
    MOST_SEGMENTS,
    SEGMENT_ROUNDS,
    Comparison,
    ToldNote,
    ToldParts,
    check_equivocation,
    decode_told,
    digest,
    encode_told,
)
from peer.proto.sottovoce.v1 import note_pb2 as pb
from peer.protocol import EQUALITY
from tests.daemon.equivocation import TwoStories
from tests.node.changing_members import Cluster

LIAR = 3
TELLERS = ("allreduce", "low-rank", "compressed-allreduce")
Segments = dict[int, dict[int, bytes]]


def cluster(algorithm: str, **options: float) -> Cluster:
    found = Cluster(algorithm, graph="complete", num_first=4, num_peers=5, signed=True, **options)  # type: ignore[arg-type]
    for peer in found.peers.values():
        peer.disk_state.pin(EQUALITY)
    return found


def told(run: Cluster, peer: int) -> Segments:
    return {segment: dict(of) for segment, of in run.peers[peer].told.segments.items()}


def comparisons(run: Cluster, *peers: int) -> dict[int, Comparison]:
    return {peer: Comparison(peer, run.peers[peer].told, run.statements(peer)) for peer in peers}


def exchange(found: dict[int, Comparison], *others: int) -> dict[int, Comparison]:
    """Let all tell each other, and show what they see that others should see. `others`: further members."""
    members = {*found, *others}
    notes = [note for each in found.values() if (note := each.own_note(members)) is not None]
    while notes:
        for comparison in found.values():
            for note in map(decode_told, notes):
                if comparison.is_news(note):
                    comparison.take(note)
        notes = [note for peer, each in found.items() for note in each.look(members - {peer})]
    return found


@pytest.mark.parametrize("algorithm", TELLERS)
@pytest.mark.parametrize("seed", range(3))
def test_peers_that_are_killed_at_any_time_have_the_digests_of_those_that_are_not(algorithm: str, seed: int) -> None:
    calm, disturbed = cluster(algorithm), cluster(algorithm, seed=seed, restarts=0.05)
    for run in (calm, disturbed):
        run.run(25)
    assert told(calm, 0).keys() == {0, 1}
    assert told(calm, 0)[1].keys() == {0, 1, 2, 3}
    for peer in range(4):
        assert told(disturbed, peer) == told(calm, 0)
    found = exchange(comparisons(disturbed, *range(4)))
    assert all(each.confirmed.keys() == {0, 1, 2, 3} - {peer} for peer, each in found.items())
    assert not any(each.differs or each.proofs for each in found.values())


@pytest.mark.parametrize("algorithm", TELLERS)
@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_accused_where_frames_were_lost_with_their_sender(algorithm: str, seed: int) -> None:
    """Some have the last frames of a peer that others have not; the model that all take then is told alike, too."""
    run = cluster(algorithm, seed=seed, restarts=0.02)
    run.run(14 + seed)
    run.cut |= {(3, 0), (3, 2)} if seed % 2 else {(3, 1)}
    run.run(16 + seed)
    run.kill(3)
    run.declare_lost(3)
    run.run(45)
    assert run.spread() == 0.0
    newest = {segment: of for segment, of in told(run, 0).items() if segment >= 3}
    assert newest.keys() == {3}
    found = exchange(comparisons(run, 0, 1, 2))
    assert not any(each.differs or each.proofs for each in found.values())
    assert {upto for each in found.values() for upto in each.confirmed.values()} == {3}


def test_a_peer_that_joins_compares_from_its_first_whole_segment_on() -> None:
    run = cluster("low-rank")
    run.run(4)
    joins = run.announce(0, ChangeKind.JOIN, 4)
    run.run(45)
    first = -(-joins.effective // SEGMENT_ROUNDS)
    assert told(run, 4) == {segment: of for segment, of in told(run, 0).items() if segment >= first}
    assert 4 in told(run, 0)[first]
    found = exchange(comparisons(run, *range(5)))
    assert not any(each.differs for each in found.values())


def test_a_state_of_a_release_that_counted_nothing_counts_from_there_on() -> None:
    run = Cluster("allreduce", graph="complete", num_first=3, num_peers=3)
    run.run(15)
    run.peers[1].save({})
    run.restart(1)
    run.run(35)
    assert told(run, 0).keys() == {0, 1, 2}
    assert told(run, 1) == {2: told(run, 0)[2]}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_only_where_all_share_what_one_tells_anything_is_counted(name: str) -> None:
    assert (ALGORITHMS[name].spec.tells_all is not None) == (name in (*TELLERS, "parameter-server"))


def parts(*frames: bytes, owner: int = 1, rounds: int = 1000) -> ToldParts:
    found = ToldParts(rounds)
    for number, frame in enumerate(frames):
        found.hear(owner, number, 0, frame)
        found.close(number)
    return found


def test_a_digest_stands_for_every_byte_its_round_and_its_place() -> None:
    frames = [b"%d" % number for number in range(10)]
    same = parts(*frames).segments
    assert same == parts(*frames).segments
    for number in range(10):
        assert parts(*frames[:number], b"x", *frames[number + 1 :]).segments != same
    assert parts(*frames[1:], frames[0]).segments != same
    long = bytes(2 << 20)
    assert len({digest(long), digest(long[:-1] + b"1"), digest(b"1" + long[1:]), digest(long[1:])}) == 4


def test_the_last_rounds_of_a_run_are_a_segment_too() -> None:
    assert parts(*[b""] * 14, rounds=14).segments.keys() == {0, 1}
    assert parts(*[b""] * 14, rounds=15).segments.keys() == {0}


def test_what_is_kept_and_told_is_bounded() -> None:
    found = ToldParts(10**6)
    for number in range(SEGMENT_ROUNDS * (KEPT_SEGMENTS + 5)):
        for owner in range(40):
            found.hear(owner, number, 0, b"%d %d" % (owner, number))
        found.close(number)
    assert len(found.segments) == KEPT_SEGMENTS
    note = encode_told(3, found.segments)
    assert note is not None
    assert len(note) <= MAX_NOTE_BYTES
    read = decode_told(note)
    assert read.newest == KEPT_SEGMENTS + 4
    assert 8 < len(read.digests) <= MOST_SEGMENTS
    assert all(of == found.segments[segment] for segment, of in read.digests.items())
    again = ToldParts(10**6)
    again.restore(found.state(), 0)
    assert again.segments == found.segments


def test_two_notes_of_a_liar_prove_to_a_third_that_it_lies() -> None:
    run = cluster("allreduce")
    run.run(25)
    liar = run.peers[3]
    # As if it had told peer 1 something else in round 13, and signed that for it.
    story = {segment: dict(of) for segment, of in liar.told.segments.items()}
    story[1][3] = digest(b"what it told peer 1 alone")
    run.peers[1].told.segments = story
    found = comparisons(run, 0, 1, 2)
    signed = run.statements(3)
    for peer, comparison in found.items():
        statement = encode_told(3, story if peer == 1 else liar.told.segments)
        assert statement is not None
        comparison.take(decode_told(signed.sign("told", statement)))
        comparison.look({0, 1, 2, 3} - {peer})
        assert comparison.confirmed[3] == 1
    exchange(found, 3)
    for peer, comparison in found.items():
        assert comparison.proofs.keys() == {3}
        assert comparison.differs, f"peer {peer} goes no further"
        check_equivocation(run.statements(4), 3, comparison.proofs[3])
    # Without the liar, nothing is left that differs.
    for peer, comparison in found.items():
        comparison.look({0, 1, 2} - {peer})
        assert not comparison.differs


def test_a_note_that_is_ahead_is_compared_once_its_rounds_are_over_here() -> None:
    found = parts(*[b"a"] * 10)
    comparison = Comparison(0, found, Cluster("sgp").statements(0))
    comparison.take(ToldNote(1, {0: {1: found.segments[0][1]}, 1: {1: bytes([7] * 16)}}))
    comparison.look({1})
    assert comparison.confirmed == {1: 0}
    for number in range(10, 20):
        found.hear(1, number, 0, b"b")
        found.close(number)
    comparison.look({1})
    assert comparison.differs == {1: 1}


@pytest.mark.parametrize("algorithm", TELLERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_liar_is_proven_to_lie_and_nobody_else_and_the_others_hold_one_model_again(algorithm: str, seed: int) -> None:
    """While honest peers are killed at any time, and run ahead of each other."""
    run = cluster(algorithm, seed=seed, restarts=0.03, by_majority=seed % 2 == 0)
    restart, victim, lies_in = run.restart, seed % 3, 11 + seed
    run.restart = lambda peer: None if peer == LIAR else restart(peer)  # type: ignore[method-assign]
    lie = TwoStories(run.peers[LIAR], victim, range(lies_in, lies_in + 1))
    run.run(24)
    assert lie.told
    assert run.spread() > 0.0, "the models of honest peers are apart"
    found = comparisons(run, 0, 1, 2)
    note = found[(victim + 1) % 3]  # Whoever signs: what is signed is the liar's.
    statement = encode_told(LIAR, run.peers[LIAR].told.segments)
    assert note.proofs == {}
    assert statement is not None
    signed = run.peers[LIAR].participant.membership.statements.sign("told", statement)
    for peer, comparison in found.items():
        comparison.take(decode_told(lie.note(signed) if peer == victim else signed))
        comparison.look({0, 1, 2, 3} - {peer})
    exchange(found, LIAR)
    for peer, comparison in found.items():
        assert comparison.proofs.keys() == {LIAR}
        assert {LIAR} == {*comparison.differs.values()}
        check_equivocation(run.statements(4), LIAR, comparison.proofs[LIAR])
        assert peer not in comparison.differs
    issuer = run.peers[seed % 2].participant.membership
    change = plan_change(issuer, ChangeKind.LOST, LIAR, equivocation=found[seed % 2].proofs[LIAR])
    run.perform(seed % 2, run.peers[seed % 2].announce(change, 0.0))
    run.dead.add(LIAR)
    run.run(50)
    assert run.rounds() == dict.fromkeys(range(3), 50)
    assert run.spread() == 0.0
    assert all(peer.participant.session.lost == {LIAR} for number, peer in run.peers.items() if number < 3)


def test_a_loss_by_notes_that_prove_nothing_is_refused() -> None:
    run = cluster("low-rank")
    run.run(24)
    signed = run.statements(3)
    told_here = {segment: dict(of) for segment, of in run.peers[3].told.segments.items()}
    other = {**told_here, 1: {**told_here[1], 3: digest(b"x")}}
    honest, lie = (encode_told(3, each) for each in (told_here, other))
    about_others = encode_told(3, {**told_here, 1: {**told_here[1], 2: digest(b"x")}})
    assert honest is not None
    assert lie is not None
    assert about_others is not None
    as_another = encode_told(2, told_here)
    assert as_another is not None
    check = run.statements(0)
    proof = signed.sign("told", honest), signed.sign("told", lie)
    check_equivocation(check, 3, proof)
    forged = run.statements(1)
    for pair in (
        [signed.sign("told", honest)] * 2,
        [signed.sign("told", honest)],
        [signed.sign("told", honest), lie],
        [signed.sign("told", honest), forged.sign("told", lie)],
        [signed.sign("told", honest), signed.sign("lost", lie)],
        [signed.sign("told", honest), signed.sign("told", about_others)],
        [signed.sign("told", as_another), signed.sign("told", lie)],
        [b"", b""],
        [b"\xff", signed.sign("told", lie)],
    ):
        with pytest.raises(SecurityError):
            check_equivocation(check, 3, pair)
        membership = run.peers[0].participant.membership
        change = plan_change(membership, ChangeKind.LOST, 3, equivocation=proof)
        change = replace(change, issuer=1, equivocation=tuple(pair))
        frame = forged.sign(MEMBERS, membership_codec.encode(change)[2:])
        with pytest.raises(RemoteProtocolError, match="told of the loss of peer 3"):
            run.peers[0].participant.proven(1, membership_codec.MAGIC + frame)


@pytest.mark.parametrize(
    "note",
    [
        b"\xff",
        b"",
        pb.ToldNote(peer=1, owners=[1], digests=[bytes(15)]).SerializeToString(),
        pb.ToldNote(peer=1, owners=[2, 1], digests=[bytes(32)]).SerializeToString(),
        pb.ToldNote(peer=1, owners=[1, 1], digests=[bytes(32)]).SerializeToString(),
        pb.ToldNote(peer=1, owners=[1], digests=[bytes(16)] * (MOST_SEGMENTS + 1)).SerializeToString(),
        pb.ToldNote(peer=1, owners=[1]).SerializeToString(),
        pb.ToldNote(peer=1, first_segment=1 << 63, owners=[1], digests=[bytes(16)]).SerializeToString(),
    ],
)
def test_a_note_that_makes_no_sense_is_refused(note: bytes) -> None:
    with pytest.raises(SecurityError):
        decode_told(note)
