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
    found, vector = single_process(points(), options, rounds=20, seed=4, tell=lambda: told.append(1))
    assert len(told) == 20
    alone = Trainer(points(), options, rounds=20, seed=4, peer=0, train_indices=all_indices(points()))
    z = descend(alone, alone.initial_vector(), range(20))
    assert np.array_equal(vector, z)
    assert found.accuracy == alone.evaluate(z).accuracy
