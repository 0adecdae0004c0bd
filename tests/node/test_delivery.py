from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.node.delivery import InLink, OutLink


def test_frames_are_numbered_from_one_and_kept_until_acknowledged() -> None:
    link = OutLink()
    assert [link.push(frame) for frame in (b"a", b"bb", b"ccc")] == [1, 2, 3]
    assert (link.backlog, link.backlog_bytes, link.next_seq, link.acknowledged) == (3, 6, 4, 0)
    link.acknowledge(2)
    assert (link.backlog, link.backlog_bytes, link.next_seq, link.acknowledged) == (1, 3, 4, 2)
    assert link.unacknowledged(0) == [(3, b"ccc")]


def test_a_receipt_that_says_nothing_new_frees_nothing() -> None:
    link = OutLink()
    link.push(b"a")
    for upto, kept in ((0, 1), (1, 0), (1, 0)):
        link.acknowledge(upto)
        assert (link.acknowledged, link.backlog, link.backlog_bytes) == (upto, kept, kept)


def test_unacknowledged_frames_come_in_order_from_any_number() -> None:
    link = OutLink()
    for number in range(1, 8):
        link.push(b"%d" % number)
    link.acknowledge(2)
    assert link.unacknowledged(2) == [(number, b"%d" % number) for number in range(3, 8)]
    assert link.unacknowledged(5) == [(6, b"6"), (7, b"7")]
    assert link.unacknowledged(7) == []
    assert link.unacknowledged(99) == []


def test_a_receipt_for_what_was_never_sent_is_refused() -> None:
    link = OutLink()
    link.push(b"a")
    with pytest.raises(RemoteProtocolError, match="acknowledges frame 2, but we have sent 1"):
        link.acknowledge(2)
    assert link.backlog == 1


def test_a_receiver_that_forgot_what_it_had_is_refused() -> None:
    link = OutLink()
    link.push(b"a")
    link.push(b"b")
    link.acknowledge(2)
    with pytest.raises(RemoteProtocolError, match="it lost its state"):
        link.acknowledge(1)


def test_an_out_link_goes_on_where_its_state_was_saved() -> None:
    link = OutLink()
    for frame in (b"a", b"bb", b"ccc"):
        link.push(frame)
    link.acknowledge(1)
    again = OutLink()
    again.restore(link.next_seq, link.frames)
    assert [(each.next_seq, [*each.frames]) for each in (again, link)] == [(4, [b"bb", b"ccc"])] * 2
    assert again.backlog_bytes == 5
    assert again.push(b"d") == 4
    again.acknowledge(3)
    assert again.unacknowledged(0) == [(4, b"d")]


@pytest.mark.parametrize(("next_seq", "frames"), [(0, []), (2, [b"a", b"b"])])
def test_an_out_link_refuses_a_state_that_cannot_be(next_seq: int, frames: list[bytes]) -> None:
    with pytest.raises(LocalProtocolError):
        OutLink().restore(next_seq, frames)


def test_new_frames_are_accepted_in_order_and_duplicates_dropped() -> None:
    link = InLink()
    assert [link.accept(seq) for seq in (1, 2, 1, 2, 3)] == [True, True, False, False, True]
    assert (link.last_seq, link.duplicates) == (3, 2)


@pytest.mark.parametrize("seq", [0, -1, 3, 2**64])
def test_a_gap_is_refused_and_changes_nothing(seq: int) -> None:
    link = InLink()
    link.accept(1)
    with pytest.raises(RemoteProtocolError, match="where 2 is next"):
        link.accept(seq)
    assert (link.last_seq, link.duplicates) == (1, 0)


def test_durable_follows_what_came() -> None:
    link = InLink()
    link.accept(1)
    link.accept(2)
    link.mark_durable(1)
    assert link.durable_seq == 1
    for impossible in (0, 3):
        with pytest.raises(LocalProtocolError):
            link.mark_durable(impossible)


def test_an_in_link_goes_on_where_its_state_was_saved() -> None:
    link = InLink()
    link.accept(1)
    link.accept(2)
    link.accept(1)
    again = InLink()
    again.restore(link.last_seq)
    assert (again.last_seq, again.durable_seq) == (2, 2)
    with pytest.raises(LocalProtocolError):
        again.restore(-1)


@given(st.lists(st.sampled_from(["push", "deliver", "lose", "receipt", "crash receiver", "crash sender"]), max_size=80))
def test_whatever_happens_every_frame_arrives_exactly_once_and_in_order(happenings: list[str]) -> None:
    """Crashes bring back what was saved: the sender saves as it pushes, the receiver every other frame."""
    sender, receiver = OutLink(), InLink()
    wire: list[tuple[int, bytes]] = []
    applied: list[bytes] = []
    saved_in, saved_applied = receiver.last_seq, 0
    pushed = 0

    def reconnect() -> None:
        sender.acknowledge(receiver.durable_seq)
        wire[:] = sender.unacknowledged(receiver.durable_seq)

    def deliver() -> None:
        nonlocal saved_in, saved_applied
        seq, frame = wire.pop(0)
        if receiver.accept(seq):
            applied.append(frame)
            if seq % 2 == 0:
                receiver.mark_durable(seq)
                saved_in, saved_applied = receiver.last_seq, len(applied)

    for happening in happenings:
        if happening == "push":
            pushed += 1
            frame = b"%d" % pushed
            wire.append((sender.push(frame), frame))
        elif happening == "deliver" and wire:
            deliver()
        elif happening == "receipt":
            sender.acknowledge(max(sender.acknowledged, receiver.durable_seq))
        elif happening == "lose":
            reconnect()
        elif happening == "crash receiver":
            receiver = InLink()
            receiver.restore(saved_in)
            del applied[saved_applied:]
            reconnect()
        elif happening == "crash sender":
            kept, sender = sender, OutLink()
            sender.restore(kept.next_seq, kept.frames)
            reconnect()
    reconnect()
    while wire:
        deliver()
    assert applied == [b"%d" % number for number in range(1, pushed + 1)]
