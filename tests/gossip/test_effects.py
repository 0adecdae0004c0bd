"""Effects of calls that follow from each other are performed as one."""

from __future__ import annotations

import pytest

from peer.errors import LocalProtocolError
from peer.gossip.effects import Effects, OutgoingFrame
from peer.gossip.membership import Change, ChangeKind

LEAVES, JOINS = Change(ChangeKind.LEAVE, 1, 1, 9), Change(ChangeKind.JOIN, 4, 0, 9)


def outgoing(content: bytes) -> OutgoingFrame:
    return OutgoingFrame(receiver=1, frame=content)


def test_frames_keep_their_order_and_the_later_call_sets_the_timer() -> None:
    effects = Effects(frames=[outgoing(b"a")], wake_at=3.0, news=[LEAVES], receipts={1: 4, 2: 1})
    effects.extend(
        Effects(frames=[outgoing(b"b")], wake_at=None, news=[JOINS], receipts={1: 5}, finished=7, skipped=(2,))
    )
    assert [each.frame for each in effects.frames] == [b"a", b"b"]
    assert effects.wake_at is None
    assert effects.news == [LEAVES, JOINS]
    assert effects.receipts == {1: 5, 2: 1}
    assert (effects.finished, effects.skipped) == (7, (2,))


def test_a_later_call_that_ends_no_round_leaves_the_one_that_ended() -> None:
    effects = Effects(finished=7, applied=((7, 1),))
    effects.extend(Effects(wake_at=1.0))
    assert (effects.finished, effects.applied, effects.wake_at) == (7, ((7, 1),), 1.0)


def test_two_rounds_cannot_end_before_the_driver_has_seen_the_first() -> None:
    effects = Effects(finished=7)
    with pytest.raises(LocalProtocolError, match="round 8 ended before round 7 was performed"):
        effects.extend(Effects(finished=8))
