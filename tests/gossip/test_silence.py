"""Who is left out: receivers that confirm nothing, for as long as they do not."""

from __future__ import annotations

from peer.gossip.silence import Silence


def test_a_receiver_that_confirms_nothing_for_too_long_is_left_out_until_it_does() -> None:
    silence = Silence(after_s=3.0)
    assert silence.silent({1: (0, 0), 2: (0, 0)}, 0.0) == frozenset()
    # Peer 1 confirms now and then, with more and more on its way; peer 2 does not.
    assert silence.silent({1: (1, 5), 2: (0, 5)}, 2.0) == frozenset()
    assert silence.silent({1: (1, 9), 2: (0, 9)}, 3.5) == {2}
    assert silence.silent({1: (2, 12), 2: (0, 12)}, 5.5) == {2}
    assert silence.silent({1: (2, 15), 2: (1, 15)}, 6.0) == frozenset()


def test_who_has_everything_is_not_silent_however_long_a_round_takes() -> None:
    silence = Silence(after_s=3.0)
    assert silence.silent({1: (4, 4)}, 0.0) == frozenset()
    assert silence.silent({1: (4, 4)}, 100.0) == frozenset()
    assert silence.silent({1: (4, 5)}, 101.0) == frozenset()
    assert silence.silent({1: (5, 6)}, 200.0) == frozenset()


def test_a_peer_that_starts_again_gives_everybody_the_whole_time() -> None:
    silence = Silence(after_s=3.0)
    assert silence.silent({1: (0, 50)}, 1000.0) == frozenset()
    assert silence.silent({1: (0, 51)}, 1003.5) == {1}
