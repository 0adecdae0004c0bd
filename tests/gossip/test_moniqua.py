"""Moniqua: verified codes and exact repair, θ, and no state beyond the model."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.compress.payload import MoreBits, Residues, Rounding
from peer.errors import ConfigError, DivergenceError, RemoteProtocolError
from peer.gossip import theta
from peer.gossip.mixing_matrix import MixingMatrix
from peer.gossip.session import Session
from peer.train.learning_rate import step_size_decay
from peer.wire.message import MessageKind, RepairWish
from tests.gossip.drive import carry_for, gossip, peers, ring, schedule_of, spread, total, train
from tests.gossip.scenarios import doubly_stochastic

ROUNDINGS = [("nearest", 1), ("nearest", 4), ("stochastic", 2), ("stochastic", 8), ("dither", 1), ("dither", 8)]


def _moniqua(name, x0, w, *, bits=8, rounding="dither", first_theta=1.0, **more):
    compressor = ("modulo", {"bits": bits, "rounding": rounding})
    return peers(name, schedule_of(w), x0, compressor=compressor, theta=(first_theta,), **more)


@pytest.mark.parametrize(("rounding", "bits"), ROUNDINGS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_verified_with_far_too_small_theta_conserves_mass_and_converges(rounding, bits, dtype):
    """θ is 10,000 times too small at first. The unverified run with θ large enough ends at the same mean."""
    rng = np.random.default_rng(bits)
    n, d = 5, 60
    w, targets = ring(n), rng.normal(size=(n, d)).astype(dtype)
    start = rng.normal(size=(n, d)).astype(dtype)
    settings_ = {"bits": bits, "rounding": rounding, "sizes": [7, 53], "averaging_rate": 0.2 if bits < 4 else 0.7}
    verified = _moniqua("moniqua", start, w, first_theta=5e-4, verified=True, **settings_)
    plain = _moniqua("moniqua", start, w, first_theta=8.0, **settings_)
    tolerance = 2e-5 if dtype == np.float32 else 1e-12
    carry = carry_for(verified)
    for t in range(150):
        rate = dtype(0.02)
        for algorithms, way in ((verified, carry), (plain, None)):
            before = total(algorithms)
            gradients = [a.model() - targets[i] for i, a in enumerate(algorithms)]
            gossip(algorithms, t, gradients, float(rate), way)
            step = float(rate) * sum(g.astype(np.float64) for g in gradients)
            assert np.abs(total(algorithms) - (before - step)).max() < tolerance
    repairs = sum(a.metrics().repairs for a in verified)
    assert repairs > 0
    assert np.abs(total(verified) - total(plain)).max() / n < 0.02
    assert spread(verified) < 0.5 * np.sqrt(d)
    assert all(a.x.dtype == dtype for a in verified)


@pytest.mark.parametrize(("rounding", "bits"), ROUNDINGS)
def test_what_was_repaired_is_to_the_last_bit_what_the_sender_subtracts(rounding, bits):
    """Two peers, rate 1, no gradient: both add ½ (x̂_j − x̂_i) of the very same numbers."""
    rng = np.random.default_rng(3)
    x0 = np.zeros((2, 200), np.float32)
    x0[1] = 100.0 * rng.normal(size=200)
    w = np.array([[0.5, 0.5], [0.5, 0.5]])
    algorithms = _moniqua(
        "moniqua", x0, w, bits=bits, rounding=rounding, first_theta=0.01, verified=True, theta_mode="constant"
    )
    seen = {}
    for a in algorithms:
        measure, own = a._measure, a._recover_own

        def keep_heard(sender, a=a, measure=measure):
            seen["heard", a.node.peer, sender] = a._scratch.tobytes()
            measure(sender)

        def keep_own(a=a, own=own):
            own()
            seen["own", a.node.peer] = a._scratch.tobytes()

        a._measure, a._recover_own = keep_heard, keep_own
    gossip(algorithms, 0)
    assert sum(a.metrics().repairs for a in algorithms) == 2
    assert seen["heard", 0, 1] == seen["own", 1]
    assert seen["heard", 1, 0] == seen["own", 0]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(2, 6),
    first_theta=st.floats(1e-3, 1e3),
    scale=st.floats(1e-3, 1e3),
    bits=st.integers(1, 12),
)
def test_verified_mode_averages_whatever_theta_and_distances_are(seed, n, first_theta, scale, bits):
    rng = np.random.default_rng(seed)
    start = scale * rng.normal(size=(n, 24))
    algorithms = _moniqua(
        "moniqua",
        start,
        doubly_stochastic(rng, n),
        bits=bits,
        first_theta=first_theta,
        verified=True,
        sizes=[9, 15],
        averaging_rate=theta.largest_stable_rate(bits, Rounding.DITHER),
    )
    for t in range(6):
        gossip(algorithms, t)
        assert np.abs(total(algorithms) - start.sum(axis=0)).max() < 1e-9 * max(scale, first_theta)


def test_unverified_training_through_a_violated_bound_goes_wrong_and_verified_does_not():
    rng = np.random.default_rng(0)
    start = 5.0 * rng.normal(size=(4, 50))
    wrong = _moniqua("moniqua", start, ring(4), first_theta=0.05)
    right = _moniqua("moniqua", start, ring(4), first_theta=0.05, verified=True)
    for t in range(80):
        gossip(wrong, t)
        gossip(right, t)
    assert spread(wrong) > 5.0
    assert spread(right) < 0.05


def test_theta_falls_with_the_distance_and_grows_at_once():
    rng = np.random.default_rng(1)
    start = rng.normal(size=(5, 80))
    algorithms = _moniqua("moniqua", start, ring(5), first_theta=50.0, verified=True, averaging_rate=0.9)
    thetas = []
    for t in range(200):
        gossip(algorithms, t)
        thetas.append(algorithms[0].metrics().theta)
    assert thetas[0] == 50.0
    falls = [t for t, (earlier, later) in enumerate(itertools.pairwise(thetas)) if later < earlier]
    assert falls
    assert all((t + 1) % theta.HOLD_ROUNDS == 0 for t in falls), "in between, codes of two rounds lie on one grid"
    most = theta.SHRINK**theta.HOLD_ROUNDS * 0.999
    assert all(later >= most * earlier for earlier, later in itertools.pairwise(thetas))
    assert thetas[-1] < 0.05
    assert sum(a.metrics().repairs for a in algorithms) == 0, (
        "a slow descent with twice the distance never needs repair"
    )
    # One peer is kicked away: a repair at once, and θ above the distance in the next round.
    kick = [np.zeros(80) for _ in algorithms]
    kick[2][:] = 30.0
    gossip(algorithms, 200, kick, 1.0)
    gossip(algorithms, 201)
    assert sum(a.metrics().repairs for a in algorithms) > 0
    gossip(algorithms, 202)
    assert algorithms[2].metrics().theta > 15.0


def test_few_repairs_are_needed_in_a_noisy_run():
    """Stochastic gradients of constant size: with θ twice the largest distance, repairs are rare."""
    rng = np.random.default_rng(2)
    targets = rng.normal(size=(8, 500))
    algorithms = _moniqua("moniqua", np.zeros(500), ring(8), bits=4, verified=True, averaging_rate=0.8)
    for t in range(300):
        gradients = [a.model() - targets[i] + rng.normal(size=500) for i, a in enumerate(algorithms)]
        gossip(algorithms, t, gradients, 0.02)
    repairs = sum(a.metrics().repairs for a in algorithms)
    assert repairs < 0.02 * 300 * 8 * 2


def test_an_answer_to_the_last_round_is_still_right_after_the_next_has_begun():
    """A neighbour may be a round behind: `begin` of round 1 must not invalidate what was sent in round 0."""
    rng = np.random.default_rng(4)
    start = 10.0 * rng.normal(size=(3, 40))
    ahead, behind, third = _moniqua("moniqua", start, ring(3), first_theta=0.1, verified=True, bits=6)
    first = {a.node.peer: a.begin(0, np.zeros(40), 0.0) for a in (ahead, behind, third)}

    def finish(algorithm, others):
        exchange = first[algorithm.node.peer]
        following = algorithm.advance({j: first[j].sends[algorithm.node.peer] for j in exchange.awaits})
        while following is not None:
            answers = {j: others[j].answer(request) for j, request in following.sends.items()}
            following = algorithm.advance(answers)

    everyone = {0: ahead, 1: behind, 2: third}
    finish(ahead, everyone)
    finish(third, everyone)
    source = start[0].copy()
    ahead.begin(1, rng.normal(size=40), 0.5)
    third.begin(1, rng.normal(size=40), 0.5)
    finish(behind, everyone)
    assert behind.metrics().repairs == 2
    # K of peer 0 decodes to its model of round 0 within δB.
    assert np.abs(behind.x - (start.mean(axis=0))).max() < 0.1
    assert np.array_equal(source, start[0])


def test_a_checkpoint_between_rounds_can_still_answer():
    """Crash after the round: with `transport_state` restored, the same repair comes out to the bit."""
    rng = np.random.default_rng(5)
    start = 10.0 * rng.normal(size=(2, 30))
    w = np.array([[0.5, 0.5], [0.5, 0.5]])
    algorithms = _moniqua("moniqua", start, w, first_theta=0.1, verified=True)
    gossip(algorithms, 0)
    request = dataclasses.replace(
        algorithms[1].begin(1, np.zeros(30), 0.0).sends[0],
        kind=MessageKind.REPAIR_REQUEST,
        round=0,
        layers=(),
        wanted=(RepairWish(0, 8, 4),),
    )
    wanted = algorithms[0].answer(request)
    fresh = _moniqua("moniqua", start, w, first_theta=0.1, verified=True)[0]
    fresh.restore(algorithms[0].state())
    fresh.restore_transport(algorithms[0].transport_state())
    answer = fresh.answer(request)
    assert isinstance(answer.layers[0], MoreBits)
    assert np.array_equal(answer.layers[0].codes, wanted.layers[0].codes)


def test_no_state_beyond_d_psgd():
    """Bytes of state between rounds, with what belongs to the transport apart."""
    rng = np.random.default_rng(6)
    d = 10_000
    start, w = rng.normal(size=(4, d)).astype(np.float32), ring(4)
    kinds = {
        "d-psgd": {},
        "moniqua": {"compressor": ("modulo", {"bits": 8}), "theta": (2.0,), "verified": True},
        "deep-squeeze": {"compressor": ("top_k", {"fraction": 0.1}), "averaging_rate": 0.1},
        "choco-sgd": {"compressor": ("top_k", {"fraction": 0.1}), "averaging_rate": 0.1},
        "d2": {"averaging_rate": 0.5},
        "moniqua-d2": {
            "compressor": ("modulo", {"bits": 8}),
            "theta": (2.0,),
            "verified": True,
            "averaging_rate": 0.5,
        },
    }
    state, buffer = {}, {}
    for name, more in kinds.items():
        algorithms = peers(name, schedule_of(w), start, **more)
        for t in range(3):
            gossip(algorithms, t, [rng.normal(size=d).astype(np.float32) for _ in range(4)], 0.01)
        state[name] = sum(v.nbytes for v in algorithms[0].state().values())
        buffer[name] = sum(v.nbytes for v in algorithms[0].transport_state().values())
    model = 4 * d
    assert state["moniqua"] - state["d-psgd"] < 100, "some numbers, no vector"
    assert state["moniqua-d2"] - state["d2"] < 100
    assert state["deep-squeeze"] - state["d-psgd"] == model
    assert state["choco-sgd"] - state["d-psgd"] >= 3 * model
    assert model <= buffer["moniqua"] < model + 100
    assert buffer["d-psgd"] == buffer["choco-sgd"] == 0
    unverified = peers("moniqua", schedule_of(w), start, compressor=("modulo", {"bits": 8}), theta=(50.0,))
    gossip(unverified, 0)
    assert not unverified[0].transport_state()


@pytest.mark.parametrize(
    "wanted",
    [
        (),
        (RepairWish(1, 8, 4),),
        (RepairWish(0, 3, 4),),
        (RepairWish(0, 8, 17),),
        (RepairWish(0, 60, 4),),
    ],
)
def test_impossible_wishes_are_refused(wanted):
    algorithms = _moniqua("moniqua", np.ones((3, 10)), ring(3), verified=True)
    exchange = algorithms[0].begin(0, np.zeros(10), 0.0)
    request = dataclasses.replace(
        exchange.sends[1], kind=MessageKind.REPAIR_REQUEST, sender=1, layers=(), wanted=wanted
    )
    with pytest.raises(RemoteProtocolError):
        algorithms[0].answer(request)


def test_a_repair_that_is_none_is_refused():
    rng = np.random.default_rng(7)
    algorithms = _moniqua(
        "moniqua", 10 * rng.normal(size=(2, 10)), np.full((2, 2), 0.5), first_theta=0.1, verified=True
    )
    first = [a.begin(0, np.zeros(10), 0.0) for a in algorithms]
    request = algorithms[0].advance({1: first[1].sends[0]})
    assert request is not None
    assert request.phase == 1
    answer = algorithms[1].answer(request.sends[1])
    for lie in (
        dataclasses.replace(answer, kind=MessageKind.GOSSIP),
        dataclasses.replace(answer, layer_ids=(1,)),
        dataclasses.replace(answer, layers=(dataclasses.replace(answer.layers[0], low=9),)),
        dataclasses.replace(answer, layers=first[1].sends[0].layers),
    ):
        with pytest.raises(RemoteProtocolError):
            algorithms[0].advance({1: lie})
    assert algorithms[0].advance({1: answer}) is not None or algorithms[0].metrics().repairs == 1


def test_a_hash_that_fits_nothing_is_refused_after_a_bounded_number_of_requests():
    algorithms = _moniqua("moniqua", np.ones((2, 10)), np.full((2, 2), 0.5), verified=True)
    first = [a.begin(0, np.zeros(10), 0.0) for a in algorithms]
    message = first[1].sends[0]
    assert isinstance(message.layers[0], Residues)
    lie = dataclasses.replace(message, layers=(dataclasses.replace(message.layers[0], check=1),))
    following = algorithms[0].advance({1: lie})
    for _ in range(3):
        assert following is not None
        following = algorithms[0].advance({1: algorithms[1].answer(following.sends[1])})
    assert following.sends[1].wanted == (RepairWish(0, 8 + 4 + 8 + 16, 0),)
    with pytest.raises(RemoteProtocolError, match="hash"):
        algorithms[0].advance({1: algorithms[1].answer(following.sends[1])})


def test_codes_of_other_settings_and_full_vectors_in_their_place_are_refused():
    verified = _moniqua("moniqua", np.ones((2, 10)), np.full((2, 2), 0.5), verified=True)
    for other in (
        _moniqua("moniqua", np.ones((2, 10)), np.full((2, 2), 0.5), verified=True, bits=4),
        _moniqua("moniqua", np.ones((2, 10)), np.full((2, 2), 0.5), verified=True, rounding="nearest"),
        _moniqua("moniqua", np.ones((2, 10)), np.full((2, 2), 0.5)),
        peers("deep-squeeze", schedule_of(np.full((2, 2), 0.5)), np.ones(10), compressor=("sign", {})),
    ):
        verified[0].begin(0, np.zeros(10), 0.0)
        message = other[1].begin(0, np.zeros(10), 0.0).sends[0]
        with pytest.raises(RemoteProtocolError):
            verified[0].advance({1: message})


def test_configurations_that_cannot_work_are_refused():
    directed = 0.5 * np.eye(4) + 0.5 * np.roll(np.eye(4), 1, axis=0)
    with pytest.raises(ConfigError, match="both directions"):
        _moniqua("moniqua", np.ones(5), directed, verified=True)
    _moniqua("moniqua", np.ones(5), directed)
    with pytest.raises(ConfigError, match="modulo compressor"):
        peers("moniqua", schedule_of(ring(3)), np.ones(5), theta=(1.0,))
    with pytest.raises(ConfigError, match="needs a value"):
        peers("moniqua", schedule_of(ring(3)), np.ones(5), compressor=("modulo", {"bits": 4}))
    with pytest.raises(ConfigError, match="way to choose"):
        _moniqua("moniqua", np.ones(5), ring(3), theta_mode="guess")
    with pytest.raises(ConfigError, match="hashes"):
        _moniqua("moniqua", np.ones(5), ring(3), theta_mode="verified")


def test_a_constant_theta_below_what_float32_resolves_stops_the_run():
    algorithms = _moniqua("moniqua", np.full((3, 5), 1000.0, np.float32), ring(3), first_theta=1e-6)
    with pytest.raises(DivergenceError, match="θ"):
        algorithms[0].begin(0, np.zeros(5, np.float32), 0.0)


def test_verified_theta_never_falls_below_what_float32_resolves():
    algorithms = _moniqua("moniqua", np.full((3, 5), 1000.0, np.float32), ring(3), first_theta=1e-6, verified=True)
    for t in range(100):
        gossip(algorithms, t)
    assert all(np.abs(a.x - 1000.0).max() < 0.01 for a in algorithms)


@pytest.mark.parametrize("name", ["moniqua", "moniqua-d2"])
@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_theta_of_the_theorems_is_never_violated(name, eta):
    """The bounds are loose: with the tracked G∞ no code is ever misread."""
    rng = np.random.default_rng(9)
    n, d = 5, 30
    w = 0.5 * ring(n) + 0.5 * np.eye(n)
    targets = rng.normal(size=(n, d))
    algorithms = _moniqua(name, np.zeros(d), w, averaging_rate=eta, theta_mode="theorem", bits=12)
    exact = peers("d-psgd" if name == "moniqua" else "d2", schedule_of(w), np.zeros(d), averaging_rate=eta)
    for t in range(60):
        for group in (algorithms, exact):
            gossip(group, t, [a.model() - targets[i] for i, a in enumerate(group)], 0.01)
    assert algorithms[0].metrics().theta > 0.1
    # A misread code is off by B > 2θ; here only rounding of at most δB a round separates the two.
    assert (
        max(np.abs(a.x - b.x).max() for a, b in zip(algorithms, exact, strict=True))
        < 0.2 * algorithms[0].metrics().theta
    )


@pytest.mark.parametrize("bounds_decay", [True, False])
def test_theta_of_theorem_2_bounds_distances_that_larger_steps_left(bounds_decay):
    """γ falls from 0.1 to 1e-5 at once, and so does γ G∞; the distances do not. With C_α = 1 codes are misread."""
    rng = np.random.default_rng(9)
    n, d = 5, 30
    w = 0.2 * ring(n) + 0.8 * np.eye(n)
    targets = rng.normal(size=(n, d))
    rates = [0.1] * 20 + [1e-5] * 5
    decay = step_size_decay(rates) if bounds_decay else (1.0,)
    algorithms = _moniqua("moniqua", np.zeros(d), w, theta_mode="theorem", step_size_decay=decay, bits=12)
    exact = peers("d-psgd", schedule_of(w), np.zeros(d))
    for t, rate in enumerate(rates):
        for group in (algorithms, exact):
            gossip(group, t, [a.model() - targets[i] for i, a in enumerate(group)], rate)
    apart = max(np.abs(a.x - b.x).max() for a, b in zip(algorithms, exact, strict=True))
    assert (apart < 0.05) == bounds_decay


@pytest.mark.parametrize(("rounding", "bits"), [("dither", 1), ("stochastic", 2), ("dither", 2), ("dither", 3)])
def test_adapted_theta_comes_to_rest_at_the_rates_that_are_allowed(rounding, bits):
    """Coarse codes add an error in proportion to θ; at too high a rate both would drive each other up."""
    rng = np.random.default_rng(12)
    limit = theta.largest_stable_rate(bits, Rounding[rounding.upper()])
    targets = rng.normal(size=(8, 300))
    algorithms = _moniqua(
        "moniqua",
        np.zeros(300),
        ring(8),
        bits=bits,
        rounding=rounding,
        first_theta=3.0,
        verified=True,
        averaging_rate=limit,
    )
    for t in range(250):
        gossip(algorithms, t, [a.x - targets[i] + rng.normal(size=300) for i, a in enumerate(algorithms)], 0.02)
    assert algorithms[0].metrics().theta < 5.0
    if limit < 1.0:
        with pytest.raises(ConfigError, match="without bound"):
            _moniqua("moniqua", np.zeros(5), ring(8), bits=bits, rounding=rounding, verified=True)
        with pytest.raises(ConfigError, match="without bound"):
            _moniqua(
                "moniqua-d2", np.zeros(5), ring(8), bits=bits, rounding=rounding, verified=True, averaging_rate=0.1
            )


@pytest.mark.parametrize(("bits", "rate"), [(1, 0.10), (2, 0.31)])
def test_adapted_theta_comes_to_rest_in_large_layers_at_the_default_rate(bits, rate):
    """Of many errors, the largest is larger: at 0.12 / s, θ of 2-bit codes doubles every 50 rounds here."""
    assert math.floor(100 * theta.resting_rate(bits, Rounding.DITHER)) / 100 == rate
    rng = np.random.default_rng(5)
    targets = rng.normal(size=(8, 20_000))
    algorithms = _moniqua(
        "moniqua", np.zeros(20_000), ring(8), bits=bits, first_theta=0.01, verified=True, averaging_rate=rate
    )
    seen = []
    for t in range(160):
        gradients = [a.x - targets[i] + rng.normal(size=20_000) for i, a in enumerate(algorithms)]
        gossip(algorithms, t, gradients, 0.001)
        seen.append(algorithms[0].metrics().theta)
    assert max(seen[80:120]) < 1.0
    assert max(seen[120:]) < 1.2 * max(seen[80:120])


def test_bounds_of_the_theorems_as_printed():
    """Ring of 8: 50 γ G∞; a slack of 0.005: 10⁴ γ G∞."""
    rho = theta.second_eigenvalue(MixingMatrix.from_dense(ring(8)))
    assert rho == pytest.approx(np.sort(np.abs(np.linalg.eigvalsh(ring(8))))[-2])
    assert theta.theorem_2(1.0, 1.0, 8, rho) == pytest.approx(50, rel=0.02)
    assert theta.theorem_3(1.0, 1.0, 8, rho, 0.005) == pytest.approx(1e4, rel=0.02)
    assert theta.theorem_2(0.1, 3.0, 8, rho, decay=2.0) == pytest.approx(0.6 * theta.theorem_2(1.0, 1.0, 8, rho))
    assert theta.theorem_4(0.5, 2.0, 10, 3.0) == 188.0
    assert theta.theorem_5(0.5, 2.0, 20.0) == 320.0
    assert theta.theorem_3(1.0, 1.0, 8, rho, 1.0) == theta.theorem_2(1.0, 1.0, 8, rho)


def test_d2_constant_bounds_the_impulse_response():
    assert theta.d2_constant(MixingMatrix.from_dense(ring(6)), 0.5) < 20
    with pytest.raises(ConfigError, match="eigenvalue"):
        theta.d2_constant(MixingMatrix.from_dense(ring(4)))
    assert theta.d2_constant(MixingMatrix.from_dense(np.full((3, 3), 1 / 3))) < 1e-6


def test_pairwise_mixing_time_is_enough():
    """After that many random exchanges a unit vector is within ½ of the average, in the mean over trials."""
    rng = np.random.default_rng(10)
    for w in (ring(6), np.full((5, 5), 0.2)):
        n, distances = len(w), []
        k = int(np.ceil(theta.pairwise_mixing_time(MixingMatrix.from_dense(w))))
        for _ in range(200):
            x = np.eye(n)[0]
            for _ in range(k):
                i = int(rng.integers(n))
                j = int(rng.choice([j for j in range(n) if j != i and w[i, j] > 0]))
                x[[i, j]] = (x[i] + x[j]) / 2
            distances.append(np.abs(x - 1 / n).sum())
        assert np.mean(distances) <= 0.5
    with pytest.raises(ConfigError, match="connected"):
        theta.pairwise_mixing_time(MixingMatrix.from_dense(np.eye(3)))


def test_trains_with_one_bit_and_a_slack_matrix():
    """Moniqua, Theorem 3: 1 bit a number, dithered or nearest, on a quadratic."""
    rng = np.random.default_rng(11)
    targets = rng.normal(size=(8, 100))
    for rounding in ("dither", "nearest"):
        algorithms = _moniqua(
            "moniqua", np.zeros(100), ring(8), bits=1, rounding=rounding, first_theta=5.0, averaging_rate=0.1
        )
        train(algorithms, lambda i, z: z - targets[i], 500, lambda t: 0.1 / (1 + t / 50))
        assert np.abs(total(algorithms) / 8 - targets.mean(axis=0)).max() < 1e-4
        assert spread(algorithms) < 0.5 * np.linalg.norm(targets - targets.mean(axis=0), axis=1).mean()


def test_small_layers_travel_whole():
    algorithms = _moniqua(
        "moniqua", np.ones((3, 12)), ring(3), sizes=[2, 10], whole_below=5, verified=True, first_theta=1.0
    )
    message = algorithms[0].begin(0, np.zeros(12), 0.0).sends[1]
    assert [type(layer).__name__ for layer in message.layers] == ["Dense", "Residues"]


@pytest.mark.parametrize("name", ["moniqua", "moniqua-d2"])
@pytest.mark.parametrize("seed", range(4))
def test_repairs_through_sessions_in_any_order_of_delivery_give_the_same_bits(name, seed):
    """Peers run ahead and fall behind by a round while repairs are under way; the order of messages changes nothing."""
    rng = np.random.default_rng(seed)
    start, rounds = np.random.default_rng(99).normal(size=(5, 40)).astype(np.float32), 12
    gradients = np.random.default_rng(98).normal(size=(rounds, 5, 40)).astype(np.float32)
    settings_ = {"bits": 4, "first_theta": 1e-3, "verified": True, "sizes": [10, 30], "averaging_rate": 0.5}
    lockstep = _moniqua(name, start, ring(5), **settings_)
    for t in range(rounds):
        gossip(lockstep, t, list(gradients[t]), 0.3)
    algorithms = _moniqua(name, start, ring(5), **settings_)
    sessions = [Session(a, in_neighbors=a.node.schedule.all_senders(i), max_lead=3) for i, a in enumerate(algorithms)]
    links = {(j, i): [] for j in range(5) for i in range(5)}
    carry = carry_for(algorithms)
    furthest = 0

    def perform(i, outcome):
        for receiver, message in outcome.sends:
            links[i, receiver].append(carry(message))

    while any(s.round < rounds or s.in_round for s in sessions):
        i = int(rng.integers(5))
        session = sessions[i]
        if not session.in_round and session.round < rounds:
            perform(i, session.begin(gradients[session.round][i], 0.3, 0.0))
        waiting = [link for link, messages in links.items() if messages]
        if waiting:
            sender, receiver = waiting[int(rng.integers(len(waiting)))]
            perform(receiver, sessions[receiver].receive(links[sender, receiver].pop(0), 0.0))
        furthest = max(furthest, max(s.round for s in sessions) - min(s.round for s in sessions))
    assert furthest >= 1
    assert sum(a.metrics().repairs for a in algorithms) > 0
    for a, b in zip(algorithms, lockstep, strict=True):
        assert a.x.tobytes() == b.x.tobytes()
        assert a.metrics().repairs == b.metrics().repairs
