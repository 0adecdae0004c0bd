"""The centralized baselines with Adam: it acts on the mean gradient, as in one process with the data of all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.config.options import load
from peer.run.setup import RunSetup
from peer.simulate.run import run
from peer.train.momentum import Momentum
from tests.gossip.drive import carry_for, gossip, peers, ring, schedule_of

CENTRALIZED = ["allreduce", "parameter-server"]
PEERS = 4


def adam(x, gradients, rates, *, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """Yield x after each step of Adam, float64; `gradients(t, x)` is the mean of all peers'."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, rate in enumerate(rates, 1):
        g = gradients(t - 1, x)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        x = x - rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
        yield x


@pytest.mark.parametrize("name", CENTRALIZED)
def test_adam_acts_on_the_mean_gradient(name):
    """In float64, in which a step has a dozen roundings."""
    rounds, rate = 30, 0.05
    x0 = np.random.default_rng(1).normal(size=60)
    algorithms = peers(name, schedule_of(ring(5)), x0, sizes=[11, 49], momentum=lambda: Momentum("adam"))
    drawn = np.random.default_rng(2).normal(size=(rounds, 5, 60))
    carry = carry_for(algorithms)
    for t, expected in enumerate(adam(x0, lambda t, x: drawn[t].mean(0), [rate] * rounds)):
        gossip(algorithms, t, list(drawn[t]), rate, carry)
        for each in algorithms:
            assert np.allclose(each.model(), expected, rtol=0, atol=12 * (t + 1) * 2.0**-52)


@pytest.mark.parametrize("name", CENTRALIZED)
def test_the_moments_survive_a_crash(name):
    rng = np.random.default_rng(1)
    x0 = rng.normal(size=60)
    drawn = rng.normal(size=(6, 5, 60))
    whole, first, second = (
        peers(name, schedule_of(ring(5)), x0, sizes=[11, 49], momentum=lambda: Momentum("adam")) for _ in range(3)
    )
    for t in range(6):
        gossip(whole, t, list(drawn[t]), 0.05, carry_for(whole))
        if t < 3:
            gossip(first, t, list(drawn[t]), 0.05, carry_for(first))
    for one, other in zip(first, second, strict=True):
        other.restore(one.state())
    for t in range(3, 6):
        gossip(second, t, list(drawn[t]), 0.05, carry_for(second))
    assert [each.x.tobytes() for each in second] == [each.x.tobytes() for each in whole]


def test_adam_begins_anew_where_members_change():
    """A newcomer has no moments, and all are to hold one model."""
    algorithms = peers("allreduce", schedule_of(ring(5)), np.zeros(60), sizes=[60], momentum=lambda: Momentum("adam"))
    gossip(algorithms, 0, [np.ones(60)] * 5, 0.05, carry_for(algorithms))
    assert "momentum.m" in algorithms[0].state()
    algorithms[0].start_anew()
    assert "momentum.m" not in algorithms[0].state()


def job(name):
    return load(
        environment={},
        overrides=(
            f"algorithm.name={name}", "run.rounds=40", "training.momentum=adam", "training.learning_rate=0.003",
            "training.precision=float32", "training.batch_size=8", "data.skew=1", "training.weight_decay=0.01",
            "compressor.kind=none", "evaluation.every_rounds=0",
            f"graph.kind={'complete' if name == 'allreduce' else 'star'}",
        ),
    )  # fmt: skip


@pytest.mark.parametrize("name", CENTRALIZED)
def test_a_task_comes_to_the_model_of_one_process_with_all_data(name):
    """Each of four devices has other classes. The process takes the batches of all four in each of its steps."""
    config = job(name)
    trainers = [RunSetup.open(config, Path(), PEERS).trainer(peer) for peer in range(PEERS)]
    start = trainers[0].initial_vector().astype(np.float64)

    def mean_gradient(t, x):
        z = x.astype(np.float32)
        of_all = [each.gradient(z, t, 0.0, 0.0).gradient.astype(np.float64) for each in trainers]
        return np.mean(of_all, axis=0) + 0.01 * x

    rates = [trainers[0].rate(t) for t in range(config.run.rounds)]
    *_, expected = adam(start, mean_gradient, rates)
    for found in run(config, Path(), num_peers=PEERS, baseline=False).models:
        assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected - start)


@pytest.mark.parametrize("name", [*CENTRALIZED, "low-rank", "compressed-allreduce", "sgp"])
@pytest.mark.parametrize("momentum", ["adam", "nesterov"])
def test_peers_of_earlier_releases_and_their_states_are_told_apart(name, momentum):
    """They took the mean of all peers' Adam."""
    config = load(environment={}, overrides=(f"algorithm.name={name}", f"training.momentum={momentum}"))
    is_another = name in CENTRALIZED and momentum == "adam"
    assert config.momentum_rule == ("adam of the mean gradient, as from 0.3" if is_another else momentum)
    local = load(environment={}, overrides=("algorithm.name=local", f"training.momentum={momentum}"))
    section = 4  # Of the training options.
    assert (config.run_digest().split(".")[section] != local.run_digest().split(".")[section]) == is_another
