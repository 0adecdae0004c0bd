"""Batches: every epoch holds every sample of the shard once, and nothing has a position to save."""

from __future__ import annotations

import numpy as np
import pytest

from peer.errors import DataError
from peer.random import SHARED, Purpose, stream
from peer.train.sampling import BatchDraw, BatchSchedule, augmentation_uniforms

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


def test_augmentation_depends_on_seed_sample_and_epoch_alone():
    draw = BatchDraw(np.array([7, 2, 2, 9]), np.array([0, 0, 1, 1]))
    uniforms = augmentation_uniforms(5, draw, 10)
    assert uniforms.shape == (4, 4)
    assert uniforms.dtype == np.float32
    for row, (sample, epoch) in enumerate([(7, 0), (2, 0), (2, 1), (9, 1)]):
        assert np.array_equal(uniforms[row], stream(5, SHARED, Purpose.AUGMENT, epoch).uniforms(4, start=4 * sample))
    assert not np.array_equal(uniforms, augmentation_uniforms(6, draw, 10))
