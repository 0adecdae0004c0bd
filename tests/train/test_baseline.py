"""The single process that runs are measured against."""

from __future__ import annotations

import numpy as np

from peer.config.options import TrainingOptions
from peer.train.baseline import single_process
from peer.train.local_step import Trainer
from tests.train.small_tasks import all_indices, descend, points


def test_it_is_one_peer_that_holds_all_the_data():
    options = TrainingOptions(batch_size=8, warmup_rounds=3, momentum="qg-nesterov", local_steps=2)
    told: list[int] = []
    baseline = single_process(points(), options, rounds=20, seed=4, tell=lambda: told.append(1))
    assert len(told) == 20
    alone = Trainer(points(), options, rounds=20, seed=4, peer=0, train_indices=all_indices(points()))
    z = descend(alone, alone.initial_vector(), range(20))
    assert np.array_equal(baseline.z, z)
    assert baseline.evaluation.accuracy == alone.evaluate(z).accuracy
    assert len(baseline.losses) == 20
    assert baseline.losses[-1] < baseline.losses[0]


def test_a_larger_batch_can_be_asked_for():
    options = TrainingOptions(batch_size=8)
    small, large = (single_process(points(), options, rounds=5, seed=4, batch_size=size) for size in (None, 64))
    same = single_process(points(), options.model_copy(update={"batch_size": 64}), rounds=5, seed=4)
    assert np.array_equal(large.z, same.z)
    assert not np.array_equal(small.z, large.z)
