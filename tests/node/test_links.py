"""The streams between one peer and all others: numbers, receipts, and what a lost or a new peer does to them."""

from __future__ import annotations

import pytest

from peer.errors import StateBehind
from peer.gossip.effects import OutgoingFrame
from peer.node.links import Links


def frames(receiver: int, *contents: bytes) -> list[OutgoingFrame]:
    return [OutgoingFrame(receiver=receiver, frame=content, is_numbered=True) for content in contents]


def test_frames_get_numbers_that_follow_those_which_are_not_published_yet() -> None:
    links = Links(0, [1, 2])
    first = links.numbered([*frames(1, b"a", b"b"), *frames(2, b"c")])
    second = links.numbered(frames(2, b"d"))
    third = links.numbered(frames(1, b"e"))
    assert [each.seq for each in (*first, *second, *third)] == [1, 2, 1, 2, 3]
    assert links.publish([*first, *second, *third]) == [*first, *second, *third]
    assert [each.seq for each in links.numbered(frames(1, b"f"))] == [4]
    assert links.connected(1, 0) == [(1, b"a"), (2, b"b"), (3, b"e")]


def test_frames_outside_the_sequence_get_no_number_and_are_not_kept() -> None:
    links = Links(0, [1])
    request = OutgoingFrame(receiver=1, frame=b"request")
    assert links.numbered([request]) == [request]
    assert links.publish([request]) == [request]
    assert links.connected(1, 0) == []


def test_a_neighbour_is_ahead_until_what_it_has_was_made_once_more() -> None:
    links = Links(0, [1, 2])
    assert links.ahead() == []
    links.connected(1, 2)
    links.connected(2, 0)
    assert links.ahead() == [1]
    links.publish(links.numbered(frames(1, b"a")))
    assert links.ahead() == [1]
    links.publish(links.numbered(frames(1, b"b")))
    assert links.ahead() == []


def test_what_a_neighbour_has_already_is_not_sent_again_after_a_power_cut_here() -> None:
    links = Links(0, [1])
    # It knows of three frames that are made once more now; two of them it has for good.
    links.connected(1, 2)
    made = links.numbered(frames(1, b"a", b"b", b"c"))
    assert links.publish(made) == made[2:]
    assert links.receipts_of(1) == (2, 3)


def test_a_receipt_that_comes_after_a_peer_was_given_up_does_not_change_what_returns() -> None:
    links = Links(0, [1])
    links.publish(links.numbered(frames(1, b"a", b"b", b"c")))
    links.acknowledge(1, 1)
    assert links.give_up(1) == (1, [b"b", b"c"])
    links.acknowledge(1, 3)
    # A replay has the journaled number alone, and comes to the same.
    replayed = Links(0, [1])
    for content in (b"a", b"b", b"c"):
        replayed.push(1, content)
    assert replayed.give_up(1, 1) == (1, [b"b", b"c"])


def test_receipts_are_journaled_once() -> None:
    links = Links(0, [1])
    links.publish(links.numbered(frames(1, b"a", b"b")))
    links.acknowledge(1, 1)
    links.acknowledge(1, 1)
    assert links.take_new_receipts() == {1: 1}
    assert links.take_new_receipts() == {}


def test_receipts_are_for_what_was_durable_when_they_were_asked_for() -> None:
    links = Links(0, [1, 2])
    links.incoming[1].accept(1)
    received = links.received()
    links.incoming[1].accept(2)
    assert links.mark_durable(received) == {1: 1}
    assert links.mark_durable(received) == {}
    assert (links.durable_from(1), links.durable_from(2)) == (1, 0)


def test_a_neighbour_that_lost_its_state_is_told_so() -> None:
    links = Links(0, [1])
    links.publish(links.numbered(frames(1, b"a", b"b")))
    links.acknowledge(1, 2)
    with pytest.raises(StateBehind, match="up to 1, but had those up to 2 for good before"):
        links.connected(1, 1)


def test_streams_go_on_where_their_state_was_saved() -> None:
    links = Links(0, [1, 2])
    links.publish(links.numbered([*frames(1, b"a", b"bb"), *frames(2, b"c")]))
    links.acknowledge(1, 1)
    links.incoming[2].accept(1)
    values, arrays = links.to_checkpoint()
    assert values == {
        "received": {"1": 0, "2": 1},
        "out": {"1": {"next_seq": 3, "lengths": [2]}, "2": {"next_seq": 2, "lengths": [1]}},
    }
    again = Links(0, [1, 2, 3])
    again.restore(values, arrays)
    assert again.connected(1, 1) == [(2, b"bb")]
    assert again.durable_from(2) == 1
    assert [each.seq for each in again.numbered([*frames(1, b"d"), *frames(3, b"e")])] == [3, 1]


def test_a_checkpoint_of_the_first_release_is_read() -> None:
    links = Links(0, [1])
    links.restore({"incoming": {"1": 4}, "out": {"1": {"next_seq": 2, "lengths": []}}}, {})
    assert links.received() == {1: 4}
    assert (links.out[1].next_seq, [*links.out[1].frames]) == (2, [])


def test_a_peer_that_was_never_met_can_be_lost() -> None:
    """A newcomer may hear of that before it hears who the other is."""
    assert Links(0, [1]).give_up(7) == (0, [])
    assert Links(0, [1]).give_up(7, 0) == (0, [])
