from __future__ import annotations

from peer.net.chunks import Cutter
from peer.net.counters import LinkCounters
from peer.net.envelope import decode
from peer.net.handler import MAX_BULLETIN_BYTES
from peer.net.inbox import Inbox, LinkLimits, new_pace
from peer.net.outbox import REVOKED_TOPIC, Outbox
from peer.net.receipts import Receipts
from peer.proto.sottovoce.v1 import exchange_pb2 as pb

LIMITS = LinkLimits(window_bytes=64 * 1024, chunk_bytes=16 * 1024, max_frame_bytes=1024**2)


class End:
    """One end of a connection without a stream."""

    def __init__(self, credit_bytes: int = 64 * 1024) -> None:
        self.counters = LinkCounters()
        self.inbox = Inbox(LIMITS, received=0, pace=new_pace(0.0))
        self.receipts = Receipts(received=0, window_bytes=LIMITS.window_bytes)
        cutter = Cutter(chunk_bytes=LIMITS.chunk_bytes, credit_bytes=credit_bytes)
        self.outbox = Outbox(cutter, self.receipts, self.inbox, self.counters)

    def next(self, now: float = 0.0) -> pb.Envelope | None:
        data = self.outbox.next_envelope(now)
        return None if data is None else decode(data)[0]


def test_what_is_ready_shares_an_envelope() -> None:
    end = End()
    assert end.next() is None
    end.outbox.push_frame(1, b"frame")
    end.outbox.push_note("evaluation", b"note")
    end.receipts.acknowledge(3, now=0.0)
    envelope = end.next()
    assert envelope is not None
    assert [chunk.data for chunk in envelope.chunks] == [b"frame"]
    assert (envelope.receipt, envelope.bulletins[0].data) == (3, b"note")
    assert (end.counters.frames_sent, end.counters.frame_bytes_sent) == (1, 5)
    assert end.next() is None


def test_a_receipt_alone_waits_and_a_heartbeat_takes_it_along() -> None:
    end = End()
    end.receipts.acknowledge(1, now=0.0)
    assert end.next(now=0.1) is None
    end.outbox.push_heartbeat()
    envelope = end.next(now=0.1)
    assert envelope is not None
    assert envelope.receipt == 1
    assert end.next(now=0.6) is None


def test_credit_is_granted_once_a_quarter_of_the_window_is_used_and_not_while_frames_are_held() -> None:
    sender, end = End(), End()
    sender.outbox.push_frame(1, bytes(15 * 1024))
    sender.outbox.push_frame(2, bytes(15 * 1024))
    for _ in range(2):
        data = sender.outbox.next_envelope(0.0)
        assert data is not None
        for seq, frame in end.inbox.open(data, now=0.0).frames:
            end.inbox.hold(seq, 3 * len(frame))
    assert end.next() is None
    end.inbox.taken(1)
    envelope = end.next()
    assert envelope is not None
    assert envelope.credit > 30 * 1024


def test_notes_fill_an_envelope_and_the_oldest_of_too_many_are_dropped() -> None:
    end = End()
    for number in range(300):
        end.outbox.push_note("evaluation", b"%d" % number)
    first = end.next()
    assert first is not None
    assert first.bulletins[0].data == b"44"
    end.outbox.push_note("large", bytes(MAX_BULLETIN_BYTES))
    end.outbox.push_note("small", b"x")
    sizes = []
    while (envelope := end.next()) is not None:
        sizes.append([note.topic for note in envelope.bulletins])
    assert sizes[-2:] == [["large"], ["small"]]


def test_a_revocation_list_never_gives_way_to_notes_and_only_the_newest_is_sent() -> None:
    end = End()
    end.outbox.push_revocations(b"older")
    for number in range(300):
        end.outbox.push_note("evaluation", b"%d" % number)
    end.outbox.push_revocations(b"newer")
    envelope = end.next()
    assert envelope is not None
    lists = [note.data for note in envelope.bulletins if note.topic == REVOKED_TOPIC]
    assert (envelope.bulletins[0].topic, lists) == (REVOKED_TOPIC, [b"newer"])
