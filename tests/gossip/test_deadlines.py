from __future__ import annotations

import random

import pytest

from peer.gossip.late_neighbors import ENOUGH, SLACK_S, WINDOW, Deadlines


def learned(*lateness: float, limit_s: float = 2.0) -> Deadlines:
    deadlines = Deadlines(limit_s=limit_s, adaptive=True)
    for each in lateness:
        deadlines.heard(1, each)
    return deadlines


def test_of_a_neighbor_that_was_hardly_heard_the_limit_is_waited_for() -> None:
    assert learned(*[0.01] * (ENOUGH - 1)).after_s(1) == 2.0
    assert learned(*[0.01] * ENOUGH).after_s(2) == 2.0


def test_a_punctual_neighbor_is_waited_for_a_moment() -> None:
    assert learned(*[0.0] * 20).after_s(1) == SLACK_S
    assert learned(*[-3.0] * 20).after_s(1) == SLACK_S


def test_each_link_has_its_own() -> None:
    deadlines = learned(*[0.0] * 20)
    for _ in range(20):
        deadlines.heard(2, 0.4)
    assert deadlines.after_s(1) == SLACK_S
    assert deadlines.after_s(2) == pytest.approx(0.4 + SLACK_S)
    assert deadlines.lateness_s(2) == 0.4
    assert deadlines.lateness_s(3) is None


def test_what_scatters_is_given_room() -> None:
    rng = random.Random(1)
    lateness = [rng.gauss(0.5, 0.05) for _ in range(WINDOW)]
    after_s = learned(*lateness).after_s(1)
    assert max(lateness) < after_s < 1.2


def test_one_outlier_changes_nothing_much_where_a_mean_would_jump() -> None:
    calm = [0.1, 0.12, 0.11, 0.1, 0.13, 0.12, 0.11, 0.1, 0.12]
    assert learned(*calm, 60.0).after_s(1) < 1.5 * learned(*calm).after_s(1)


def test_a_link_that_became_slower_is_waited_for_again() -> None:
    deadlines = learned(*[0.01] * WINDOW)
    assert deadlines.after_s(1) < 0.1
    for _ in range(WINDOW):
        deadlines.heard(1, 0.7)
    assert 0.7 < deadlines.after_s(1) < 0.8


def test_the_limit_is_the_most() -> None:
    assert learned(*[30.0] * 20).after_s(1) == 2.0


def test_fixed_deadlines_learn_nothing_but_are_still_told_how_late_it_was() -> None:
    deadlines = Deadlines(limit_s=2.0, adaptive=False)
    for _ in range(20):
        deadlines.heard(1, 0.1)
    assert deadlines.after_s(1) == 2.0
    assert deadlines.lateness_s(1) == 0.1
