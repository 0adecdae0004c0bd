"""Drift correction: peers whose gradients differ meet at the optimum of all, no weight is lost, and state is exact."""

from __future__ import annotations

import numpy as np
import pytest

from peer.gossip.drift import DriftCorrection, default_gain
from peer.gossip.topology import Turns
from tests.gossip.drive import carry_for, gossip, peers, schedule_of, spread, total, train
from tests.gossip.scenarios import column_stochastic

TOP_K = ("top_k", {"fraction": 0.3})
PEERS, SIZE = 6, 20


def directed_ring(n=PEERS):
    return (np.eye(n) + np.eye(n)[:, np.roll(np.arange(n), -1)]) / 2


def exponential_in_turn(n=8):
    return [(np.eye(n) + np.eye(n)[:, np.roll(np.arange(n), -(2**k))]) / 2 for k in range(3)]


def targets(n, seed=5):
    return np.random.default_rng(seed).normal(size=(n, SIZE))


def untrained(schedule, start=None, gain=0.01, eta=0.3, compressor=TOP_K):
    return peers(
        "quant-sgp",
        schedule,
        np.zeros((schedule.num_peers, SIZE)) if start is None else start,
        compressor=compressor,
        averaging_rate=eta,
        drift_gain=(lambda: gain) if gain else None,
    )


def trained(schedule, gain, *, rounds=3000, rate=0.05, eta=0.3, wanted=None, compressor=TOP_K, start=None):
    """Return peers that each pulled towards a row of `wanted` with the gradient of ½ ‖z − row‖²."""
    wanted = targets(schedule.num_peers) if wanted is None else wanted
    algorithms = untrained(schedule, start, gain, eta, compressor)
    train(algorithms, lambda i, z: z - wanted[i], rounds, rate)
    return algorithms


def corrections(algorithms):
    return np.array([a.state()["drift.correction"] for a in algorithms])


@pytest.mark.parametrize(
    "schedule", [schedule_of(directed_ring()), schedule_of(*exponential_in_turn())], ids=["ring", "in turn"]
)
def test_all_peers_reach_the_optimum_of_all_where_they_stayed_apart_without(schedule: Turns) -> None:
    optimum = targets(schedule.num_peers).mean(axis=0)
    apart = trained(schedule, 0.0)
    together = trained(schedule, 0.01)
    assert min(np.linalg.norm(a.model() - optimum) for a in apart) > 0.1
    # (1 − c)^3000 for the slowest mode c of about 0.01 leaves 1e-13.
    assert max(np.linalg.norm(a.model() - optimum) for a in together) < 1e-9
    # What each has learned is how its own gradient differs there from the mean of all, which is 0.
    np.testing.assert_allclose(corrections(together), optimum - targets(schedule.num_peers), atol=1e-9)


def test_nothing_of_the_sum_is_lost_and_corrections_sum_to_zero() -> None:
    algorithms = trained(schedule_of(directed_ring()), 0.01, rounds=50)
    assert np.abs(corrections(algorithms).sum(axis=0)).max() < 1e-12
    assert np.abs(corrections(algorithms)).max() > 0.1
    before = total(algorithms)
    gossip(algorithms, 50)
    assert np.abs(total(algorithms) - before).max() < 1e-12


def test_weights_that_differ_between_peers_need_no_correction() -> None:
    """On a graph whose rows do not sum to 1, u moves mass for many rounds although all models are the same."""
    w = column_stochastic(np.random.default_rng(3), PEERS)
    assert np.abs(w.sum(axis=1) - 1).max() > 0.1
    algorithms = trained(
        schedule_of(w),
        0.05,
        rounds=40,
        wanted=np.ones((PEERS, SIZE)),
        compressor="none",
        start=np.ones((PEERS, SIZE)),
    )
    assert max(abs(a.u - 1) for a in algorithms) > 0.05
    # The first difference brings the copies from 0 to the model, so that there is no round with other ones.
    assert np.abs(corrections(algorithms)).max() < 1e-12


def test_a_message_that_comes_late_ends_as_if_it_had_come_in_time() -> None:
    """A round without a neighbour's message moves weight and model by the same part; later it is a difference."""
    schedule, wanted = schedule_of(directed_ring()), targets(PEERS)
    algorithms = untrained(schedule)
    train(algorithms, lambda i, z: z - wanted[i], 1000, 0.05)
    settled = corrections(algorithms).copy()
    held = []
    for t in range(1000, 1030):
        exchanges = [a.begin(t, a.model() - wanted[i], 0.05) for i, a in enumerate(algorithms)]
        for i, a in enumerate(algorithms):
            inbox = {j: exchanges[j].sends[i] for j in exchanges[i].awaits}
            if i == 0:
                held += inbox.values()
                inbox = {}
            a.advance(inbox)
    assert algorithms[0].u < 0.2
    # It heard nobody: nothing of that is taken for a pull towards others.
    np.testing.assert_allclose(corrections(algorithms)[0], settled[0], atol=1e-12)
    for message in held:
        algorithms[0].absorb_late(message)
    assert sum(a.u for a in algorithms) == pytest.approx(PEERS, abs=1e-12)
    train(algorithms, lambda i, z: z - wanted[i], 2000, 0.05, start=1030)
    assert spread(algorithms) < 1e-6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_state_continues_at_the_same_bits(dtype: type) -> None:
    schedule, wanted = schedule_of(directed_ring()), targets(PEERS).astype(dtype)

    def made():
        return untrained(schedule, np.zeros((PEERS, SIZE), dtype))

    straight, stopped, resumed = made(), made(), made()
    train(straight, lambda i, z: z - wanted[i], 60, 0.05)
    train(stopped, lambda i, z: z - wanted[i], 25, 0.05)
    for old, new in zip(stopped, resumed, strict=True):
        new.restore({name: np.array(value, copy=True) for name, value in old.state().items()})
    train(resumed, lambda i, z: z - wanted[i], 35, 0.05, start=25)
    for one, other in zip(straight, resumed, strict=True):
        for name, value in one.state().items():
            assert value.tobytes() == other.state()[name].tobytes(), name


def test_encoded_messages_change_nothing() -> None:
    algorithms = trained(schedule_of(directed_ring()), 0.01, rounds=10)
    again = untrained(schedule_of(directed_ring()))
    wanted, carry = targets(PEERS), carry_for(again)
    for t in range(10):
        gossip(again, t, [a.model() - wanted[i] for i, a in enumerate(again)], 0.05, carry=carry)
    assert corrections(algorithms).tobytes() == corrections(again).tobytes()


def test_other_members_begin_anew() -> None:
    algorithms = trained(schedule_of(directed_ring()), 0.01, rounds=20)
    for each in algorithms:
        each.start_anew()
    assert not corrections(algorithms).any()


def test_rounds_without_a_local_step_neither_use_nor_change_it() -> None:
    algorithms = trained(schedule_of(directed_ring()), 0.01, rounds=200)
    before = corrections(algorithms).copy()
    for t in range(200, 600):
        gossip(algorithms, t)
    assert corrections(algorithms).tobytes() == before.tobytes()
    assert spread(algorithms) < 1e-9


def test_without_a_correction_there_is_no_state_and_a_state_without_one_starts_at_zero() -> None:
    plain = trained(schedule_of(directed_ring()), 0.0, rounds=5)
    assert not [name for name in plain[0].state() if name.startswith("drift")]
    corrected = trained(schedule_of(directed_ring()), 0.01, rounds=0)
    corrected[0].restore(plain[0].state())
    assert not corrected[0].state()["drift.correction"].any()


@pytest.mark.parametrize("eta", [0.05, 0.24])
@pytest.mark.parametrize("n", [3, 8, 32])
def test_the_default_gain_is_stable_on_a_directed_ring(n: int, eta: float) -> None:
    eigenvalues = 1 - np.linalg.eigvals(directed_ring(n))
    rho = np.sort(np.abs(1 - eigenvalues))[-2]
    gain = default_gain(eta, 1 - rho)
    assert 0 < gain < 1

    def largest(beta: float) -> float:
        """Return the largest |root| r of (r − 1)² + ηλ (1 + β) (r − 1) + βηλ over λ ≠ 0."""
        found = [
            np.roots([1, eta * value * (1 + beta) - 2, 1 - eta * value]) for value in eigenvalues if abs(value) > 1e-9
        ]
        return float(np.abs(found).max())

    assert largest(gain) < 1
    # There is something to be afraid of: at 48 times as much it diverges.
    assert n == 3 or largest(48 * gain) > 1


def test_a_graph_that_never_mixes_gets_no_gain() -> None:
    assert default_gain(0.1, 0.0) == 0.0


def test_the_correction_follows_the_learning_rate() -> None:
    """At γ / 10 the same s is a tenth of the step."""
    drift = DriftCorrection(np.zeros(2), gain=0.5)
    x = np.zeros(2)
    drift.step_(x, 0.1)
    drift.learn_(np.array([0.2, -0.2]))
    drift.step_(x, 0.01)
    np.testing.assert_allclose(x, [0.01, -0.01])
