"""Batches: every epoch holds every sample of the shard once, and nothing has a position to save."""

from __future__ import annotations

import numpy as np
import pytest

from peer.errors import DataError
from peer.random import SHARED, Purpose, stream
from peer.train.sampling import BatchDraw, BatchSchedule, ClassQuotas, augmentation_uniforms

SHARD = np.array([3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377], np.int64)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 11, 25])
def test_each_epoch_holds_each_sample_once(batch_size: int):
    schedule = BatchSchedule(SHARD, batch_size, seed=1, peer=2)
    epochs = 6
    draws = [schedule.batch(step) for step in range(-(-epochs * len(SHARD) // batch_size))]
    indices = np.concatenate([draw.indices for draw in draws])
    numbers = np.concatenate([draw.epochs for draw in draws])
    assert all(len(draw.indices) == batch_size for draw in draws)
    for epoch in range(epochs):
        assert sorted(indices[numbers == epoch]) == SHARD.tolist()


def test_epochs_come_in_different_orders():
    schedule = BatchSchedule(SHARD, len(SHARD), seed=1, peer=2)
    orders = {tuple(schedule.batch(step).indices) for step in range(5)}
    assert len(orders) == 5


def test_a_batch_depends_on_seed_peer_and_step_alone():
    asked_in_order = BatchSchedule(SHARD, 4, seed=1, peer=2)
    expected = [asked_in_order.batch(step).indices.tolist() for step in range(12)]
    asked_at_random = BatchSchedule(SHARD, 4, seed=1, peer=2)
    for step in (11, 0, 7, 3, 10):
        assert asked_at_random.batch(step).indices.tolist() == expected[step]
    for seed, peer in ((1, 3), (2, 2)):
        other = BatchSchedule(SHARD, 4, seed=seed, peer=peer)
        assert [other.batch(step).indices.tolist() for step in range(12)] != expected


def test_the_order_of_an_epoch_is_the_peers_stream_of_that_epoch():
    second_epoch = BatchSchedule(SHARD, 11, seed=9, peer=4).batch(1)
    assert second_epoch.indices.tolist() == SHARD[stream(9, 4, Purpose.BATCH, 1).permutation(11)].tolist()


def test_an_empty_shard_is_refused():
    with pytest.raises(DataError, match="peer 0 has no training samples"):
        BatchSchedule(np.empty(0, np.int64), 4, seed=0, peer=0)


# Balanced drawing

CLASSES = np.array([0] * 37 + [3] * 9 + [4] * 4 + [6])
LARGER = np.arange(100, 100 + len(CLASSES))


def balanced(alpha: float, batch_size: int = 8) -> BatchSchedule:
    return BatchSchedule(LARGER, batch_size, seed=1, peer=2, quotas=ClassQuotas(CLASSES, 8, balance=alpha))


def falling(number: int) -> float:
    return max(0.0, 1.0 - 0.3 * number)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_quotas_are_the_nearest_whole_numbers_that_fill_a_pass(alpha: float):
    counts = np.bincount(CLASSES, minlength=8)
    quotas = ClassQuotas(CLASSES, 8, balance=alpha).of_pass(3)
    weights = np.where(counts > 0, np.maximum(counts, 1) ** (1 - alpha), 0)
    assert quotas.sum() == len(CLASSES)
    assert np.abs(quotas - len(CLASSES) * weights / weights.sum()).max() < 1
    assert np.array_equal(quotas > 0, counts > 0)
    if alpha == 0:
        assert np.array_equal(quotas, counts)


def test_a_single_sample_among_many_is_drawn_in_every_pass():
    for alpha in np.linspace(0, 1, 11):
        quotas = ClassQuotas(np.array([0] * 9999 + [1]), 2, balance=float(alpha)).of_pass(0)
        assert quotas[1] >= 1
        assert quotas.sum() == 10_000


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("batch_size", [3, 8, 51, 120])
def test_each_pass_draws_each_class_as_often_as_its_quota(alpha: float, batch_size: int):
    schedule, m = balanced(alpha, batch_size), len(CLASSES)
    draws = np.concatenate([schedule.batch(step).indices for step in range(-(-5 * m // batch_size))])
    passes = np.concatenate([schedule.passes(step) for step in range(-(-5 * m // batch_size))])
    quotas = ClassQuotas(CLASSES, 8, balance=alpha).of_pass(0)
    for number in range(5):
        assert np.array_equal(np.bincount(CLASSES[draws[passes == number] - 100], minlength=8), quotas)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, falling])
def test_no_sample_is_drawn_again_before_all_others_of_its_class_were(alpha):
    schedule = balanced(alpha)
    class_of = dict(zip(LARGER.tolist(), CLASSES.tolist(), strict=True))
    times = dict.fromkeys(class_of, 0)
    for step in range(60):
        draw = schedule.batch(step)
        for sample, epoch in zip(draw.indices.tolist(), draw.epochs.tolist(), strict=True):
            assert epoch == times[sample]
            times[sample] += 1
            of_class = [times[other] for other, number in class_of.items() if number == class_of[sample]]
            assert max(of_class) - min(of_class) <= 1


def test_samples_of_a_class_come_in_another_order_each_time():
    schedule = balanced(1.0, batch_size=len(CLASSES))
    orders: dict[int, list[int]] = {}
    for step in range(4):
        draw = schedule.batch(step)
        for sample, epoch in zip(draw.indices.tolist(), draw.epochs.tolist(), strict=True):
            if CLASSES[sample - 100] == 3:
                orders.setdefault(epoch, []).append(sample)
    whole = [tuple(order) for order in orders.values() if len(order) == 9]
    assert len(whole) >= 4
    assert len(set(whole)) == len(whole)


@pytest.mark.parametrize("alpha", [0.5, falling])
def test_balanced_batches_depend_on_seed_peer_and_step_alone(alpha):
    asked_in_order = balanced(alpha)
    expected = [asked_in_order.batch(step) for step in range(40)]
    asked_at_random = balanced(alpha)
    for step in (39, 0, 21, 7, 38, 20):
        draw = asked_at_random.batch(step)
        assert draw.indices.tolist() == expected[step].indices.tolist()
        assert draw.epochs.tolist() == expected[step].epochs.tolist()
    quotas = ClassQuotas(CLASSES, 8, balance=alpha)
    for seed, peer in ((1, 3), (2, 2)):
        other = BatchSchedule(LARGER, 8, seed=seed, peer=peer, quotas=quotas)
        assert [other.batch(step).indices.tolist() for step in range(9)] != [d.indices.tolist() for d in expected[:9]]


def test_falling_balance_changes_the_quotas_from_pass_to_pass():
    quotas = ClassQuotas(CLASSES, 8, balance=falling)
    large = [int(quotas.of_pass(number)[0]) for number in range(5)]
    assert large == sorted(large)
    assert len(set(large)) == 5
    assert large[4] == 37
    assert np.array_equal(quotas.before_pass(3), sum(quotas.of_pass(number) for number in range(3)))
    assert np.array_equal(quotas.before_pass(1), quotas.of_pass(0))


# Augmentation


def test_augmentation_depends_on_seed_sample_and_epoch_alone():
    draw = BatchDraw(np.array([7, 2, 2, 9]), np.array([0, 0, 1, 1]))
    uniforms = augmentation_uniforms(5, draw, 10)
    assert uniforms.shape == (4, 4)
    assert uniforms.dtype == np.float32
    for row, (sample, epoch) in enumerate([(7, 0), (2, 0), (2, 1), (9, 1)]):
        assert np.array_equal(uniforms[row], stream(5, SHARED, Purpose.AUGMENT, epoch).uniforms(4, start=4 * sample))
    assert not np.array_equal(uniforms, augmentation_uniforms(6, draw, 10))


def test_augmentation_of_many_epochs_is_that_of_each_alone():
    epochs = np.arange(12) // 2
    few = BatchDraw(np.arange(12), epochs)
    many = BatchDraw(np.concatenate([few.indices, few.indices]), np.concatenate([epochs, epochs + 40]))
    assert len(np.unique(few.epochs)) < 8 < len(np.unique(many.epochs))
    assert np.array_equal(augmentation_uniforms(5, many, 12)[:12], augmentation_uniforms(5, few, 12))
