"""Curves in fixed memory."""

from __future__ import annotations

import numpy as np
import pytest

from peer.watch.history import GROUPS, History


def put(history: History, peer: int, rounds: range, value: float | None = None) -> None:
    numbers = np.array(list(rounds))
    values = numbers.astype(float) if value is None else np.full(len(numbers), value)
    history.put(np.full(len(numbers), peer), numbers, values)


def test_a_short_curve_has_every_round() -> None:
    history = History()
    put(history, 1, range(5))
    assert history.curve(1) == [(float(n), float(n)) for n in range(5)]
    assert history.curve(0) == []
    assert history.curve(7) == []


def test_a_long_curve_keeps_its_means_and_its_size() -> None:
    history = History()
    for start in range(0, 10_000, 70):
        put(history, 0, range(start, min(start + 70, 10_000)))
    curve = history.curve(0)
    assert GROUPS // 2 <= len(curve) <= GROUPS
    assert curve[-1][0] == 9999
    size = round(curve[1][0] - curve[0][0])
    # A group ends at its last round; its mean lies in its middle.
    for end, mean in curve[:-1]:
        assert mean == pytest.approx(end - (size - 1) / 2)


def test_a_peer_that_goes_back_repeats_its_rounds_once() -> None:
    history = History()
    put(history, 0, range(20), 1.0)
    put(history, 1, range(20), 5.0)
    put(history, 0, range(10, 13), 3.0)
    assert history.curve(0) == [(float(n), 1.0) for n in range(10)] + [(float(n), 3.0) for n in range(10, 13)]
    assert [value for _, value in history.curve(1)] == [5.0] * 20


def test_what_is_not_finite_is_left_out() -> None:
    history = History()
    history.put(np.zeros(3, dtype=np.int64), np.arange(3), np.array([1.0, np.nan, np.inf]))
    assert history.curve(0) == [(0.0, 1.0)]


def test_peers_are_compared_group_by_group() -> None:
    history = History()
    put(history, 0, range(3), 1.0)
    put(history, 2, range(2), 2.0)
    ends, means = history.means()
    assert ends == [0.0, 1.0, 2.0]
    assert np.isnan(means[:, 1]).all()
    assert means[0, [0, 2]].tolist() == [1.0, 2.0]
    assert np.isnan(means[2, 2])


def test_a_new_version_says_that_something_changed() -> None:
    history = History()
    put(history, 0, range(2))
    before = history.version
    put(history, 0, range(0))
    assert history.version == before
    put(history, 0, range(2, 3))
    assert history.version > before
