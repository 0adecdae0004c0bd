"""The neighbours as a peer sees them, over a transport without sockets."""

from __future__ import annotations

import pytest

from peer.daemon.neighbors import Neighbors
from peer.daemon.traffic import Traffic
from peer.errors import HandshakeRefused, LocalProtocolError
from tests.daemon.parts import FakeTransport, neighbors_over


def test_a_note_goes_to_those_that_are_connected_but_not_back() -> None:
    transport = FakeTransport(up={1, 3})
    neighbors_over(transport, (1, 2, 3)).broadcast("topic", b"note", 3)
    assert transport.notes == [(1, "topic", b"note")]


def test_whoever_said_goodbye_is_not_reachable_until_it_is_back() -> None:
    neighbors = neighbors_over(FakeTransport(up={1, 2}), (1, 2))
    neighbors.left[1] = "completed"
    assert neighbors.reachable() == {2}
    assert not neighbors.all_have_left
    neighbors.left[2] = "completed"
    assert neighbors.all_have_left
    neighbors.up(1, now=5.0)
    assert neighbors.reachable() == {1}
    assert neighbors.met == {1}


def test_silence_counts_from_the_last_word_or_from_the_beginning() -> None:
    transport = FakeTransport()
    neighbors = neighbors_over(transport, (1, 2))
    assert neighbors.silent_s(1, now=110.0, began_at=100.0) == 10.0
    neighbors.heard(2, now=105.0)
    assert neighbors.silent_s(2, now=110.0, began_at=100.0) == 5.0
    transport.up.add(1)
    assert neighbors.silent_s(1, now=120.0, began_at=100.0) == 0.0
    transport.up.clear()
    assert neighbors.silent_s(1, now=121.0, began_at=100.0) == 1.0
    assert neighbors.last_heard_at == 105.0


def test_one_that_is_no_neighbour_is_away_no_longer_than_it_is_waited_for() -> None:
    """Long after the process began, a loss lets it wait for members to which it never had a link."""
    neighbors = neighbors_over(FakeTransport(), (1, 2))
    assert neighbors.silences((1,), now=5000.0, began_at=100.0) == {1: 4900.0}
    assert neighbors.silences((1, 3), now=5000.0, began_at=100.0) == {1: 4900.0, 3: 0.0}
    assert neighbors.silences((3,), now=5001.0, began_at=100.0) == {3: 1.0}
    assert neighbors.silences((), now=5002.0, began_at=100.0) == {}
    assert neighbors.silences((3,), now=9000.0, began_at=100.0) == {3: 0.0}


def test_a_peer_that_everybody_refuses_gives_up_in_a_while() -> None:
    transport = FakeTransport(refusals={1: "another run", 2: "another run"})
    neighbors = neighbors_over(transport, (1, 2))
    neighbors.give_up_if_refused((1, 2), now=0.0)
    neighbors.give_up_if_refused((1, 2), now=14.0)
    with pytest.raises(HandshakeRefused, match="none of the neighbours that it waits for lets it in: another run"):
        neighbors.give_up_if_refused((1, 2), now=16.0)


def test_a_neighbour_that_ends_each_connection_before_a_frame_dismisses_this_peer() -> None:
    neighbors = neighbors_over(FakeTransport(), (1, 2))
    for now in (0.0, 8.0, 14.0):
        neighbors.up(1, now)
        neighbors.down(1, now)
        assert not neighbors.is_dismissed_by(1, now)
    assert neighbors.is_dismissed_by(1, now=16.0)
    assert not neighbors.is_dismissed_by(2, now=16.0)
    neighbors.up(1, now=17.0)
    neighbors.frame_came(1, now=17.0)
    neighbors.down(1, now=17.0)
    assert not neighbors.is_dismissed_by(1, now=40.0)


def test_an_end_of_what_never_began_is_no_dismissal() -> None:
    neighbors = neighbors_over(FakeTransport(), (1,))
    for now in (0.0, 8.0, 16.0, 24.0):
        neighbors.down(1, now)
    assert not neighbors.is_dismissed_by(1, now=32.0)


@pytest.mark.parametrize("why", ["one-does-not-refuse", "one-was-met", "it-waits-for-nobody"])
def test_one_that_may_still_be_let_in_waits(why: str) -> None:
    transport = FakeTransport(refusals={1: "another run"})
    neighbors = neighbors_over(transport, (1, 2))
    waiting = {"one-does-not-refuse": (1, 2), "one-was-met": (1,), "it-waits-for-nobody": ()}[why]
    if why == "one-was-met":
        neighbors.met.add(1)
    for now in (0.0, 10.0, 100.0):
        neighbors.give_up_if_refused(waiting, now)


def test_before_there_is_a_transport_nothing_can_be_sent() -> None:
    with pytest.raises(LocalProtocolError, match="no transport yet"):
        Neighbors(Traffic(0)).is_up(1)
