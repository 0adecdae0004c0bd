"""Runs in which few peers take part in each round: mass, idle peers, and peers that come and go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.config import options as configuration
from peer.config.options import Config
from peer.errors import ConfigError
from peer.train.local_step import Trainer
from tools.participation_study import Availability, ParticipationSimulator, churn

COUNT = 20


def job(*overrides: str) -> Config:
    settings = [
        "training.task=clusters", "training.task_options.samples=400", "training.batch_size=5", "run.rounds=6",
        "training.momentum=none", "algorithm.name=sparse-push", "compressor.fraction=0.1",
    ]  # fmt: skip
    return configuration.load(overrides=[*settings, *overrides], environment={})


def simulator(
    config: Config, fraction: float = 0.25, availability: Availability | None = None, *, hand_over: bool = False
) -> ParticipationSimulator:
    return ParticipationSimulator(
        config, Path(), num_peers=COUNT, fraction=fraction, availability=availability, step_s=60.0, hand_over=hand_over
    )


@pytest.mark.parametrize("algorithm", ["sgp", "sparse-push"])
def test_mass_is_conserved_while_models_approach_each_other(algorithm: str) -> None:
    """Without local steps worth the name, from models that differ."""
    run = simulator(job(f"algorithm.name={algorithm}", "training.learning_rate=1e-30", "run.rounds=40"))
    rng = np.random.default_rng(0)
    for participant in run.participants:
        participant.algorithm.x[:] = rng.normal(size=participant.algorithm.x.size)
    before = sum(participant.algorithm.x.astype(np.float64) for participant in run.participants)
    spread = np.std(list(run.models()), axis=0).mean()
    assert run.run()
    after = sum(participant.algorithm.x.astype(np.float64) for participant in run.participants)
    np.testing.assert_allclose(after, before, atol=1e-4)
    assert sum(participant.algorithm.u for participant in run.participants) == pytest.approx(COUNT)
    assert np.std(list(run.models()), axis=0).mean() < 0.95 * spread


def test_a_peer_that_is_not_drawn_neither_trains_nor_sends() -> None:
    run = simulator(job("run.rounds=1"))
    start = run.participants[0].model().copy()
    run.run()
    assert run.times_drawn.sum() == 5
    for peer, model in enumerate(run.models()):
        assert np.array_equal(model, start) == (run.times_drawn[peer] == 0)
    assert run.now == 60.0
    assert run.frame_bytes > 0


def test_models_that_travel_keep_their_mass_and_leave_copies_behind() -> None:
    run = simulator(job("algorithm.name=sgp", "training.learning_rate=1e-30", "run.rounds=1"), hand_over=True)
    run.run()
    first = list(run.holders)
    rng = np.random.default_rng(0)
    for peer in first:
        run.participants[peer].algorithm.x[:] = rng.normal(size=run.participants[peer].algorithm.x.size)
    before = sum(run.participants[peer].algorithm.x.astype(np.float64) for peer in first)
    left = [model.copy() for model in run.models()]
    sent = run.frame_bytes
    run._begin_round(1)
    assert len(run.holders) == 5
    assert run.holders != first
    after = sum(run.participants[peer].algorithm.x.astype(np.float64) for peer in run.holders)
    np.testing.assert_array_equal(after, before)
    assert sum(run.participants[peer].algorithm.u for peer in run.holders) == 5.0
    np.testing.assert_allclose(run.averaged_model(), before / 5, rtol=1e-6)
    for peer, model in enumerate(run.models()):
        assert peer in run.holders or np.array_equal(model, left[peer])
    moved = sum(giver != taker for giver, taker in zip(first, run.holders, strict=True))
    size = run.trainer.layout.size
    assert moved * 4 * size * 0.8 < run.frame_bytes - sent < moved * 4 * size * 1.1


def test_models_that_travel_are_trained_in_every_round_and_fetched_by_those_that_are_there() -> None:
    away = Availability({0: [(0.0, 1e9)]})
    staying, travelling = (
        simulator(job("algorithm.name=sgp", "run.rounds=30", "training.learning_rate=0.3"), 0.1, away, hand_over=each)
        for each in (False, True)
    )
    for run in (staying, travelling):
        run.run()
    trainer = travelling.trainer
    assert isinstance(trainer, Trainer)
    averaged = [trainer.evaluate(run.averaged_model()).loss for run in (staying, travelling)]
    assert averaged[1] < averaged[0] - 0.2
    losses = [trainer.evaluate(model).loss for model in travelling.models()]
    assert travelling.fetch() == COUNT - 3
    fetched = [trainer.evaluate(model).loss for model in travelling.models()]
    assert fetched[0] == losses[0]
    assert max(fetched[1:]) < averaged[0]


def test_who_is_drawn_depends_on_the_seed_alone_and_all_get_their_turn() -> None:
    first, again, other = (simulator(job(f"run.seed={seed}", "run.rounds=60")) for seed in (0, 0, 1))
    for each in (first, again, other):
        each.run()
    assert all(np.array_equal(a, b) for a, b in zip(first.models(), again.models(), strict=True))
    assert not np.array_equal(first.times_drawn, other.times_drawn)
    assert first.times_drawn.sum() == 5 * 60
    assert first.times_drawn.min() > 0


def test_who_is_away_is_not_drawn() -> None:
    away = Availability({0: [(0.0, 1e9)], 1: [(100.0, 200.0), (300.0, 1e9)]})
    assert [away.is_there(1, now) for now in (0.0, 100.0, 199.0, 200.0, 299.0, 300.0)] == [
        True, False, False, True, True, False,
    ]  # fmt: skip
    run = simulator(job("run.rounds=10"), fraction=1.0, availability=away)
    run.run()
    # Rounds begin at 0, 60, …, 540 s; peer 1 is there at 0, 60 and 240 s.
    assert run.times_drawn.tolist() == [0, 3, *[10] * (COUNT - 2)]


def test_churn_has_the_rates_that_were_asked_for() -> None:
    hours = 50
    found = churn(200, hours * 3600.0, leaving_per_hour=0.1, mean_away_s=1800.0, seed=3)
    times = [end - start for each in found.away.values() for start, end in each]
    # Each peer is there for ten hours at a time, and away for half of one.
    assert len(times) == pytest.approx(200 * hours / 10.5, rel=0.1)
    assert np.mean(times) == pytest.approx(1800.0, rel=0.1)
    assert found == churn(200, hours * 3600.0, leaving_per_hour=0.1, mean_away_s=1800.0, seed=3)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot draw its members"):
        simulator(job("algorithm.name=quant-sgp"))
    with pytest.raises(ConfigError, match="cannot be handed over"):
        simulator(job(), hand_over=True)
    half = Availability({peer: [(100.0, 1e9)] for peer in range(COUNT - 1)})
    with pytest.raises(ConfigError, match="leaves fewer than are drawn after 120 s"):
        simulator(job("algorithm.name=sgp"), availability=half, hand_over=True).run()
    with pytest.raises(ConfigError, match="leaves nobody"):
        simulator(job(), availability=Availability({peer: [(0.0, 1e9)] for peer in range(COUNT)})).run()
