"""What one neighbour may send beside frames: nothing honest costs much, and whatever makes work is charged by piece."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from peer.daemon.notes import notes
from peer.errors import RemoteProtocolError
from peer.net.chunks import Cutter
from peer.net.counters import LinkCounters
from peer.net.envelope import Piece, encode
from peer.net.inbox import Inbox, LinkLimits, new_pace
from peer.net.outbox import Outbox
from peer.net.receipts import Receipts
from peer.net.security.certificates import der
from peer.node.loss_votes import LOST
from peer.node.statements import sealed
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.proto.sottovoce.v1.membership_pb2 import LossVote
from peer.proto.sottovoce.v1.note_pb2 import ReleaseNote
from peer.proto.sottovoce.v1.statement_pb2 import Proof
from peer.rate_limits import Allowance
from peer.state.metrics import EvaluationRecord
from tests.net.transport_peers import credentials

KB = 1024
LIMITS = LinkLimits(window_bytes=8192 * KB, chunk_bytes=1024 * KB, max_frame_bytes=64 * KB * KB)
RECEIVED = 1000


def opened(make: Callable[[int], bytes], pace: Allowance) -> int:
    """Return how many envelopes of one connection are opened at one moment before the neighbour is said to flood."""
    inbox = Inbox(LIMITS, received=RECEIVED, pace=pace)
    for number in range(20_000):
        try:
            inbox.open(make(number), now=0.0)
        except RemoteProtocolError:
            return number
    return 20_000


def flood(**fields: object) -> Callable[[int], bytes]:
    data = pb.Envelope(**fields).SerializeToString()  # type: ignore[arg-type]
    return lambda number: data


def crumb(number: int) -> bytes:
    return encode(pb.Envelope(), [Piece(RECEIVED + 1, number, 1 << 20, b"x")])


def crumbs_together(number: int) -> bytes:
    begin = 5000 * number
    return encode(pb.Envelope(), [Piece(RECEIVED + 1, begin + at, 1 << 20, b"x") for at in range(5000)])


def repeated_frame(number: int) -> bytes:
    return encode(pb.Envelope(), [Piece(1 + number % RECEIVED, 0, 0, b"x")])


def beside_a_frame(number: int) -> bytes:
    """Hide 50 requests behind a chunk of the sequence, which costs nothing."""
    requests = [Piece(0, 0, 0, b"a request of few bytes")] * 50
    return encode(pb.Envelope(), [Piece(RECEIVED + 1 + number, 0, 0, b"frame"), *requests])


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (flood(), 1000),
        (flood(bulletins=[pb.Bulletin(topic="x")] * 2000), 4),
        (flood(bulletins=[pb.Bulletin(topic="evaluation", data=b"x" * 60_000)]), 17),
        (flood(chunks=[pb.Chunk(sequence=0, data=b"a request of few bytes")] * 50), 20),
        (flood(receipt=1, credit=1), 1000),
        (crumb, 1000),
        (crumbs_together, 2),
        (repeated_frame, 1000),
        (beside_a_frame, 20),
    ],
    ids=[
        "envelopes", "empty-notes", "notes", "requests", "receipts", "crumbs", "crumbs-together", "repeated-frames",
        "requests-beside-a-frame",
    ],
)  # fmt: skip
def test_a_flood_is_over_before_it_costs_much(make: Callable[[int], bytes], most: int) -> None:
    assert 0 < opened(make, new_pace(0.0)) <= most


def test_a_new_connection_is_no_new_allowance() -> None:
    pace, notes_of_nothing = new_pace(0.0), flood(bulletins=[pb.Bulletin(topic="x")] * 2000)
    assert sum(opened(notes_of_nothing, pace) for _ in range(5)) <= 4


@pytest.mark.parametrize("chunk_kbytes", [1, 16, 64, 1024])
@pytest.mark.parametrize("their_window_kbytes", [64, 8192])
@pytest.mark.parametrize("frame_bytes", [1, 50, 3000, 16 * KB, 100 * KB, 5 * KB * KB])
def test_frames_cost_no_more_than_their_headers(chunk_kbytes: int, their_window_kbytes: int, frame_bytes: int) -> None:
    """Whatever the sizes: frames are cut so that the envelopes that carry them cost nothing."""
    limits = LinkLimits(window_bytes=their_window_kbytes * KB, chunk_bytes=1024 * KB, max_frame_bytes=64 * KB * KB)
    pace = Allowance(rate=0.0, burst=math.inf, now=0.0)
    spent: list[float] = []
    pace.spend = lambda units, now: spent.append(units) is None  # type: ignore[method-assign]
    inbox = Inbox(limits, received=0, pace=pace, their_chunk_bytes=chunk_kbytes * KB)
    cutter = Cutter(chunk_bytes=min(chunk_kbytes * KB, limits.chunk_bytes), credit_bytes=limits.window_bytes)
    own = Inbox(LIMITS, received=0, pace=new_pace(0.0))
    receipts = Receipts(received=0, window_bytes=LIMITS.window_bytes)
    outbox = Outbox(cutter, receipts, own, LinkCounters())
    numbers = itertools.count(1)
    total = max(4 * frame_bytes, 200_000)
    for _ in range(min(3000, total // frame_bytes)):
        # Frames of other sizes between them, so that envelopes end anywhere.
        outbox.push_frame(next(numbers), bytes(frame_bytes))
        outbox.push_frame(next(numbers), bytes(7))
    pieces = 0
    while (data := outbox.next_envelope(0.0)) is not None:
        pieces += len(inbox.open(data, now=0.0).frames) + 1
        if inbox.credit_is_due:
            cutter.add_credit(inbox.grant())
    assert next(numbers) - 1 + len(spent) == pieces
    assert sum(spent) <= pieces * 32 / KB


def _signed(statement: bytes) -> bytes:
    return sealed(
        statement, Proof(counter=1 << 41, certificate=der(credentials("ada").certificate), signature=bytes(72))
    )


def _start(num_classes: int) -> list[tuple[str, bytes]]:
    """Return what a neighbour says that a peer meets: all that it has heard of 64 devices."""
    said = []
    for peer in range(64):
        told = ReleaseNote(peer=peer, protocol_max=5, software="sottovoce 0.3.0.dev0", said_ms=1 << 41)
        said.append((notes.RELEASE, told.SerializeToString()))
        vote = notes.class_vote(peer, [60] * num_classes, tells_samples=True)
        said.append((notes.CLASSES, vote.SerializeToString()))
        for split in ("test", "holdout"):
            counts = (1000,) * num_classes
            record = EvaluationRecord(peer=peer, round=10_000, split=split, correct=counts, total=counts)
            said.append((notes.EVALUATION, notes.encode_evaluation(record)))
    return said


def _votes() -> list[tuple[str, bytes]]:
    """Return what a member of the larger part of a divided cluster of 64 has heard: 33 vote for the loss of 31."""
    votes = itertools.product(range(33), range(33, 64))
    return [(LOST, LossVote(voter=voter, subject=subject, round=9999).SerializeToString()) for voter, subject in votes]


@pytest.mark.parametrize(
    ("said", "at_once"),
    [(_start(10), 2), (_start(100), 1), (_votes(), 2)],
    ids=["start", "start-with-100-classes", "loss-votes"],
)
def test_the_largest_honest_bursts_are_less_than_half_of_what_is_allowed(
    said: list[tuple[str, bytes]], at_once: int
) -> None:
    """`at_once`: how often in a second everything is said: when two peers meet, each also passes on what it hears.
    Votes are told again and passed on once a second (`LossWatch.look`)."""
    pace = new_pace(0.0)
    inbox, counters = Inbox(LIMITS, received=0, pace=pace), LinkCounters()
    receipts = Receipts(received=0, window_bytes=LIMITS.window_bytes)
    outbox = Outbox(Cutter(chunk_bytes=KB, credit_bytes=KB), receipts, inbox, counters)
    for _ in range(at_once):
        for topic, statement in said:
            outbox.push_note(topic, _signed(statement))
        while (data := outbox.next_envelope(0.0)) is not None:
            inbox.open(data, now=0.0)
    assert pace.spend(pace.burst / 2, 0.0)
