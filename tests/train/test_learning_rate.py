"""Learning-rate schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from pydantic import ValidationError

from peer.config.options import TrainingOptions
from peer.train.learning_rate import learning_rate, step_size_decay


def build(kind: str, *, peak: float, rounds: int, warmup_rounds: int = 0, **more: object) -> Callable[[int], float]:
    settings = {"schedule": kind, "learning_rate": peak, "warmup_rounds": warmup_rounds, **more}
    return partial(learning_rate, TrainingOptions(**settings), rounds)


def test_step_falls_at_the_milestones():
    step = build("step", peak=1.0, rounds=40, step_milestones=(0.25, 0.5))
    assert [step(t) for t in (0, 9, 10, 19, 20)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


@pytest.mark.parametrize(
    ("epochs", "milestones", "factor", "expected"),
    [
        # The low-precision paper, section 4.1: ResNets and VGG-11 on CIFAR-10, the same on Imagenette.
        (200, (0.5, 0.75), 0.1, {0: 1, 99: 1, 100: 0.1, 149: 0.1, 150: 0.01, 199: 0.01}),
        (200, (0.15, 0.3, 0.45, 0.6, 0.75, 0.9), 0.5, {29: 1, 30: 0.5, 60: 0.25, 179: 0.5**5, 180: 0.5**6}),
        (100, (0.5, 0.75), 0.1, {49: 1, 50: 0.1, 75: 0.01}),
        (100, (0.3, 0.6, 0.9), 0.5, {29: 1, 30: 0.5, 60: 0.25, 90: 0.125}),
    ],
)
def test_the_papers_schedules_fall_at_their_epochs(epochs, milestones, factor, expected):
    per_epoch = 195
    schedule = build("step", peak=1.0, rounds=epochs * per_epoch, step_milestones=milestones, step_factor=factor)
    for epoch, rate in expected.items():
        assert schedule(epoch * per_epoch) == pytest.approx(rate)
        assert schedule(epoch * per_epoch + per_epoch - 1) == pytest.approx(rate)


def test_cosine_ends_at_a_part_of_the_peak():
    schedule = build("cosine", peak=2.0, rounds=100, warmup_rounds=10, final_rate=0.1)
    assert schedule(0) == pytest.approx(0.2, rel=1e-3)
    assert schedule(50) == pytest.approx(1.1)
    assert schedule(100) == pytest.approx(0.2)
    assert min(schedule(t) for t in range(10, 100)) > 0.2


def test_cosine_falls_from_the_peak_and_never_to_nothing():
    cosine = build("cosine", peak=2.0, rounds=100)
    rates = [cosine(t) for t in range(100)]
    assert rates[0] == 2.0
    assert rates[50] == pytest.approx(1.0)
    assert all(a > b for a, b in itertools.pairwise(rates))
    assert 0 < rates[-1] < 1e-3
    assert cosine(100) == cosine(1000) == 0.0


def test_warm_up_is_a_straight_line_to_the_schedule():
    schedule = build("constant", peak=0.5, rounds=100, warmup_rounds=5)
    assert [schedule(t) for t in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])


def test_milestones_are_fractions_of_the_run():
    schedule = build("step", peak=1.0, rounds=200, step_milestones=(0.5, 0.75), step_factor=0.5)
    assert [schedule(t) for t in (99, 100, 149, 150)] == pytest.approx([1.0, 0.5, 0.5, 0.25])


def test_unknown_schedules_are_named():
    with pytest.raises(ValidationError, match="'constant', 'step' or 'cosine'"):
        build("linear", peak=1.0, rounds=10)


def test_decay_of_the_step_size_bounds_every_ratio():
    rates = [0.1, 0.3, 0.2, 0.05, 0.1]
    decays = step_size_decay(rates)
    assert decays == pytest.approx([1.0, 1.0, 1.5, 6.0, 6.0])
    for k, c in enumerate(decays):
        assert all(rates[i] <= c * later for i in range(k + 1) for later in rates[i : k + 1])
    with pytest.raises(ValueError, match="above 0"):
        step_size_decay([0.1, 0.0])
