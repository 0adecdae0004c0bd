"""What codes are told against: never what a receiver may lack, and the same on both ends after a crash."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from peer import wire
from peer.compress.layout import Layout
from peer.compress.payload import Residues, Rounding
from peer.wire import Message, MessageKind
from peer.wire.errors import MissingPrevious
from peer.wire.last_codes import LastCodes
from tests.wire.comparing import assert_same
from tools.frame_report import describe

LAYOUT = Layout.of_sizes([900, 300])


def codes(round_: int, sender: int = 7) -> Message:
    """Return a message whose codes move a little from round to round."""
    rng = np.random.default_rng(sender)
    base, step = rng.integers(0, 256, LAYOUT.size), rng.integers(-1, 2, LAYOUT.size)
    residues = ((base + round_ * step) % 256).astype(np.uint8)
    layers = tuple(Residues(0.5, 8, Rounding.DITHER, residues[part], 1) for part in LAYOUT.slices)
    return Message(MessageKind.GOSSIP, sender, round_, layers=layers)


def ends(tells_changes: bool = True) -> LastCodes:
    return LastCodes(LAYOUT, np.float32, tells_changes=tells_changes)


class Stream:
    """A sender and a receiver of one stream, with what was sent and has not been taken."""

    def __init__(self) -> None:
        self.sender, self.receiver = ends(), ends()
        self.frames: list[bytes] = []

    def send(self, round_: int, *, receivers: tuple[int, ...] = (1, 2)) -> bytes:
        message = codes(round_)
        frame = wire.encode(message, LAYOUT, previous=self.sender.told(message, 1))
        self.sender.tell(message, receivers)
        if 1 in receivers:
            self.frames.append(frame)
        return frame

    def take(self) -> Message:
        message = wire.decode(self.frames.pop(0), LAYOUT, dtype=np.float32, previous=self.receiver.of(7))
        self.receiver.hear(message)
        return message


def is_whole(frame: bytes) -> bool:
    return wire.decode(frame, LAYOUT).round >= 0


def test_all_rounds_but_the_first_take_a_fraction_of_the_bytes() -> None:
    stream = Stream()
    lengths = [len(stream.send(t)) for t in range(1, 30)]
    for t in range(1, 30):
        assert_same(stream.take(), codes(t))
        stream.receiver.forget_before(t + 1)
    assert max(lengths[1:]) < 0.3 * lengths[0]


def test_codes_of_another_theta_are_told_whole() -> None:
    sender = ends()
    sender.tell(codes(1), [1])
    first, second = codes(2).layers
    assert isinstance(first, Residues)
    moved = replace(codes(2), layers=(replace(first, theta=0.25), second))
    frame = wire.encode(moved, LAYOUT, previous=sender.told(moved, 1))
    report = describe(frame, LAYOUT, previous=codes(1))
    assert_same(report.message, moved)
    assert report.frame_bytes > LAYOUT.sizes[0]
    both = replace(codes(2), layers=(replace(first, theta=0.25), replace(second, theta=0.25)))
    assert is_whole(wire.encode(both, LAYOUT, previous=sender.told(both, 1)))


def test_the_sender_need_not_wait_for_what_is_on_its_way() -> None:
    """Frames are taken in order, so that many may be on their way, each told against the one before."""
    stream = Stream()
    for t in range(1, 6):
        stream.send(t)
    for t in range(1, 6):
        assert_same(stream.take(), codes(t))


def test_a_receiver_that_was_left_out_of_a_round_gets_the_next_message_whole() -> None:
    stream = Stream()
    stream.send(1)
    stream.send(2, receivers=(2,))
    assert stream.sender.told(codes(3), 2) is not None
    with pytest.raises(MissingPrevious):
        is_whole(wire.encode(codes(3), LAYOUT, previous=stream.sender.told(codes(3), 2)))
    assert is_whole(stream.send(3))
    stream.send(4)
    for t in (1, 3, 4):
        assert_same(stream.take(), codes(t))


def test_a_new_receiver_and_a_gap_of_rounds_get_a_whole_message() -> None:
    sender = ends()
    assert sender.told(codes(1), 1) is None
    sender.tell(codes(1), [1])
    assert sender.told(codes(2), 1) is not None
    assert sender.told(codes(2), 3) is None
    assert sender.told(codes(3), 1) is None


def test_a_peer_that_may_not_repeat_itself_sends_whole_and_reads_all() -> None:
    stream = Stream()
    quiet = ends(tells_changes=False)
    for t in range(1, 4):
        quiet.tell(codes(t), [1])
        assert quiet.told(codes(t + 1), 1) is None
        stream.send(t)
        assert_same(message := wire.decode(stream.frames[-1], LAYOUT, previous=quiet.of(7)), codes(t))
        quiet.hear(message)


def test_only_codes_of_rounds_are_told_against_others() -> None:
    sender = ends()
    sender.tell(codes(1), [1])
    sender.tell(Message(MessageKind.NOTHING, 7, 1), [1])
    assert sender.own is not None
    assert sender.told(Message(MessageKind.NOTHING, 7, 2), 1) is None


@pytest.mark.parametrize(("done", "waiting"), list(itertools.product((1, 4), (0, 1, 2))))
def test_both_ends_go_on_from_what_they_saved(done: int, waiting: int) -> None:
    """Between two rounds; the frames that wait for a later round are taken once more after the restart."""
    stream = Stream()
    for t in range(1, done + waiting + 1):
        stream.send(t)
    again = stream.frames[done:]
    for _ in range(done + waiting):
        stream.take()
    saved = {name: array.copy() for name, array in stream.receiver.state(done + 1).items()}
    stream.receiver, stream.frames = ends(), again
    stream.receiver.restore(saved)
    sent = stream.sender.state(done + waiting + 1)
    stream.sender = ends()
    stream.sender.restore(sent)
    following = stream.send(done + waiting + 1)
    with pytest.raises(MissingPrevious):
        is_whole(following)
    for t in range(done + 1, done + waiting + 2):
        assert_same(stream.take(), codes(t))


def test_what_is_kept_is_one_message_a_stream_and_the_own() -> None:
    receiver = ends()
    for t, sender in itertools.product(range(1, 9), (7, 8)):
        receiver.hear(codes(t, sender))
        receiver.forget_before(t)
    receiver.tell(codes(8, 0), [7, 8])
    assert receiver.nbytes == 3 * LAYOUT.size
    receiver.forget_before(9)
    assert sorted(receiver.state(9)) == ["7", "8", "own", "receivers"]


def test_what_a_neighbour_to_come_has_sent_is_kept_when_others_are_forgotten() -> None:
    """It may be ahead: its first message waits, and the second is told against that."""
    last = LastCodes(LAYOUT, np.float32, tells_changes=True)
    for message in (codes(3, sender=1), codes(3, sender=2), codes(5, sender=4)):
        last.hear(message)
    last.keep_only([1], 4)
    assert last.of(1) is not None
    assert last.of(2) is None
    assert last.of(4) is not None
