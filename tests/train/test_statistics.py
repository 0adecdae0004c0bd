"""Whose statistics a norm uses: a peer's own for its model, those of a stated pass for the averaged one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from peer.config.options import TrainingOptions, load
from peer.random import SHARED, Purpose, stream
from peer.simulate import run as simulator
from peer.train import statistics
from peer.train.local_step import Trainer
from tests.train.small_tasks import all_indices, descend, normed_points, points


def trainer(shard: slice = slice(None), **options) -> Trainer:
    task = normed_points()
    chosen = TrainingOptions(**{"batch_size": 8, "momentum": "none", "warmup_rounds": 0, **options})
    return Trainer(task, chosen, rounds=30, seed=5, peer=0, train_indices=all_indices(task)[shard])


def test_no_message_holds_statistics_and_every_checkpoint_does():
    one = trainer()
    assert all("running" not in name for name in one.layout.names)
    kept = {f"buffer.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert kept < set(one.state())


def test_the_pass_takes_the_mean_of_all_its_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "SAMPLES", 60)
    monkeypatch.setattr(statistics, "BATCH", 20)
    one = trainer()
    model, task = one.model, one.task
    statistics.collect_statistics_(model, task, task.train_data(), seed=5, device=torch.device("cpu"))
    order = torch.from_numpy(stream(5, SHARED, Purpose.STATISTICS).permutation(96))[:60]
    hidden = model[0](task.train_data().batch(order)[0]).detach().view(3, 20, 8)
    assert torch.allclose(model[1].running_mean, hidden.mean(dim=(0, 1)), atol=1e-5)
    assert torch.allclose(model[1].running_var, hidden.var(dim=1).mean(dim=0), atol=1e-5)
    assert model[1].momentum == 0.1


def test_the_average_is_judged_alike_by_peers_that_saw_different_data():
    first, second = trainer(slice(0, 30)), trainer(slice(30, 96))
    z = descend(first, first.initial_vector(), range(20))
    descend(second, z, range(20))
    assert first.evaluate(z).loss != second.evaluate(z).loss
    assert first.evaluate(z, averaged=True).loss == second.evaluate(z, averaged=True).loss


def test_the_pass_leaves_the_peers_own_statistics_and_the_generator_as_they_were():
    one = trainer()
    z = descend(one, one.initial_vector(), range(5))
    before, drawn = one.state(), torch.random.get_rng_state()
    one.evaluate(z, averaged=True)
    assert all(np.array_equal(value, before[name]) for name, value in one.state().items())
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_a_model_without_statistics_is_not_passed_over(monkeypatch: pytest.MonkeyPatch):
    task = points()
    one = Trainer(task, TrainingOptions(), rounds=9, seed=0, peer=0, train_indices=all_indices(task))
    monkeypatch.setattr(statistics, "collect_statistics_", None)
    assert one.evaluate(one.initial_vector(), averaged=True).total.sum() == len(task.test_data())


@pytest.mark.parametrize("stacked", [False, True])
def test_a_simulation_judges_each_peer_by_its_own_statistics(tmp_path: Path, stacked: bool):
    """With statistics that nobody collected (mean 0, variance 1) these models would be far worse."""
    settings = ["training.task=tests.train.small_tasks:normed_points", "run.rounds=80", "training.batch_size=8"]
    config = load(overrides=[*settings, "data.skew=0", "algorithm.name=sgp"], environment={})
    (tmp_path / "run").mkdir()
    result = simulator.run(
        config, tmp_path, num_peers=3, directory=tmp_path / "run", stacked=stacked, baseline=False
    ).summary
    assert result.averaged_accuracy is not None
    assert result.averaged_accuracy > 0.85
    assert result.worst_accuracy is not None
    assert result.worst_accuracy > 0.8
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved["1.num_batches_tracked"] == 1, "one batch of the 96 training samples"
