"""One test for each claim of the papers that is about learning, not about mass."""

from __future__ import annotations

import numpy as np
import pytest

from peer.gossip.error_feedback import final_rounds_for
from peer.gossip.options import ServerOptions
from tests.gossip.drive import gossip, peers, ring, schedule_of, spread, total, train


def test_theorem_1_naive_quantization_stalls_above_its_floor_and_moniqua_does_not():
    """Moniqua, Theorem 1: on f = ½‖x − Δ/2‖² with a grid of step Δ, E‖∇f‖² ≥ φ²Δ² / (8 (1 + φ²)) per coordinate."""
    n, d, step = 4, 400, 0.5
    w = ring(n)
    floor = (1 / 3) ** 2 * step**2 / (8 * (1 + (1 / 3) ** 2))

    def squared_gradient(name, compressor, **more):
        algorithms = peers(name, schedule_of(w), np.zeros(d), compressor=compressor, **more)
        train(algorithms, lambda i, z: z - step / 2, 400, lambda t: 0.3 / (1 + t / 10))
        late = []
        for t in range(400, 500):
            gossip(algorithms, t, [a.model() - step / 2 for a in algorithms], 0.3 / (1 + t / 10))
            late.append(np.mean([np.mean((a.model() - step / 2) ** 2) for a in algorithms]))
        return float(np.mean(late))

    naive = squared_gradient("naive-quantized", ("grid", {"step": step}))
    # The modulo code at 4 bits with θ = 1: errors up to δB = 0.067, far coarser than what it reaches.
    moniqua = squared_gradient("moniqua", ("modulo", {"bits": 4}), theta=(1.0,))
    assert naive > floor
    assert moniqua < floor / 20


def softmax_problem(rng, n=6, samples=40, d=8):
    """Return gradient(i, z), the gradient of everybody's loss, and the size of a model. Peer i has label i alone."""
    centres = rng.normal(size=(n, d))
    features = [centres[i] + 0.8 * rng.normal(size=(samples, d)) for i in range(n)]

    def gradient(i, z):
        weights = z.reshape(d, n)
        logits = features[i] @ weights
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[:, i] -= 1.0
        return (features[i].T @ p / samples + 0.05 * weights).ravel()

    return gradient, lambda z: sum(gradient(i, z) for i in range(n)) / n, d * n


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("d2", {}),
        ("moniqua-d2", {"compressor": ("modulo", {"bits": 8}), "theta": (4.0,), "verified": True}),
    ],
)
def test_d2_with_one_label_a_peer_converges_where_d_psgd_does_not(name, more):
    gradient, mean_gradient, size = softmax_problem(np.random.default_rng(0))
    results = {}
    for algorithm, settings in (("d-psgd", {}), (name, more)):
        algorithms = peers(algorithm, schedule_of(ring(6)), np.zeros(size), averaging_rate=0.5, **settings)
        train(algorithms, gradient, 2500, 0.5)
        results[algorithm] = max(float(np.linalg.norm(mean_gradient(a.model()))) for a in algorithms)
    assert results["d-psgd"] > 0.02
    assert results[name] < 1e-3 * results["d-psgd"] if name == "d2" else results[name] < 0.02 * results["d-psgd"]


def test_error_feedback_converges_where_the_same_compressor_alone_does_not():
    """Top-k without memory never sends small coordinates; with δ (DeepSqueeze) or replicas (CHOCO) all arrive."""
    rng = np.random.default_rng(1)
    start = rng.normal(size=(5, 40)) * np.geomspace(1.0, 0.01, 40)
    distances = {}
    for name in ("naive-quantized", "deep-squeeze", "choco-sgd"):
        algorithms = peers(
            name, schedule_of(ring(5)), start, compressor=("top_k", {"fraction": 0.25}), averaging_rate=0.1
        )
        for t in range(600):
            gossip(algorithms, t)
        distances[name] = float(np.mean([np.linalg.norm(a.model() - start.mean(axis=0)) for a in algorithms]))
    assert distances["choco-sgd"] < 1e-6
    assert distances["deep-squeeze"] < 0.5 * distances["naive-quantized"]


def test_scsp_ends_in_consensus_where_sparse_push_does_not():
    """Skew-Compensated Sparse-Push: full precision toward the end."""
    rng = np.random.default_rng(2)
    n, d = 6, 50
    targets = rng.normal(size=(n, d))
    directed = 0.5 * np.eye(n) + 0.5 * np.roll(np.eye(n), 1, axis=0)
    spreads = {}
    for name in ("sparse-push", "scsp"):
        algorithms = peers(
            name,
            schedule_of(directed),
            np.zeros(d),
            compressor=("top_k", {"fraction": 0.05}),
            averaging_rate=0.05,
            rounds=300,
            final_rounds=40,
        )
        for t in range(300):
            rate = 0.05 if algorithms[0].wants_gradient(t) else 0.0
            gossip(
                algorithms, t, [a.model() - targets[i] if rate else np.zeros(d) for i, a in enumerate(algorithms)], rate
            )
        spreads[name] = spread(algorithms)
    assert spreads["scsp"] < 0.02 * spreads["sparse-push"]


@pytest.mark.parametrize("contraction", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.0000001, 10.0, 1e6])
def test_final_rounds_are_the_fewest_that_reach_the_tolerance(contraction, ratio):
    k = final_rounds_for(ratio * 1e-3, contraction, 1e-3)
    assert contraction**k * ratio <= 1.0
    assert k == 0 or contraction ** (k - 1) * ratio > 1.0


def test_final_rounds_rule_holds_on_a_graph():
    """Plain averaging on the ring reaches the tolerance within the rounds that the rule asked for."""
    rng = np.random.default_rng(3)
    w = ring(8)
    algorithms = peers("sgp", schedule_of(w), rng.normal(size=(8, 30)))
    before = spread(algorithms)
    rho = float(np.sort(np.abs(np.linalg.eigvalsh(w)))[-2])
    k = final_rounds_for(before, rho, 1e-6)
    for t in range(k):
        gossip(algorithms, t)
    assert spread(algorithms) <= 1e-6 * np.sqrt(8)
    assert 20 < k < 200


def test_all_peers_hold_the_same_bits_after_allreduce_and_parameter_server():
    rng = np.random.default_rng(4)
    for name in ("allreduce", "parameter-server"):
        algorithms = peers(name, schedule_of(ring(5)), rng.normal(size=30).astype(np.float32), compressor="none")
        for t in range(5):
            gossip(algorithms, t, [rng.normal(size=30).astype(np.float32) for _ in algorithms], 0.1)
        assert len({a.x.tobytes() for a in algorithms}) == 1


def test_the_quantized_model_stays_on_its_grid_and_trains():
    """Empirical study, section 5.4: x ← Q(x − γ mean Q(g)), Q of 6 bits over ± 1."""
    target = np.linspace(-0.8, 0.8, 64)
    algorithms = peers(
        "parameter-server",
        schedule_of(ring(4)),
        np.zeros(64),
        server=ServerOptions(peer=2, model_bits=6, gradient_range=2.0),
    )
    train(algorithms, lambda i, z: z - target, 300, 0.2)
    for a in algorithms:
        assert np.array_equal(a.x * 32, np.round(a.x * 32))
        assert np.abs(a.x - target).mean() < 2 / 32
        assert a.x.tobytes() == algorithms[0].x.tobytes()


def test_combine_then_adapt_takes_the_gradient_at_the_old_model():
    """D-PSGD: what is sent does not depend on the gradient, so that both can overlap."""
    algorithms = peers("d-psgd", schedule_of(ring(3)), np.ones(4))
    exchange = algorithms[0].begin(0, np.full(4, 100.0), 0.1)
    sent = exchange.sends[1].layers[0].values
    assert np.array_equal(sent, np.ones(4))


def test_local_peers_send_nothing():
    algorithms = peers("local", schedule_of(ring(3)), np.ones(4))
    assert not algorithms[0].begin(0, np.ones(4), 0.1).sends
    assert algorithms[0].advance({}) is None
    assert np.allclose(algorithms[0].model(), 0.9)


def test_averaged_model_of_choco_follows_sgd_on_the_mean_objective():
    rng = np.random.default_rng(6)
    targets = rng.normal(size=(5, 20))
    algorithms = peers("choco-sgd", schedule_of(ring(5)), np.zeros(20), compressor=("sign", {}), averaging_rate=0.2)
    train(algorithms, lambda i, z: z - targets[i], 400, 0.02)
    assert np.abs(total(algorithms) / 5 - targets.mean(axis=0)).max() < 0.02


@pytest.mark.parametrize(
    ("name", "compressor", "more"),
    [
        ("choco-sgd", ("top_k", {"fraction": 0.1}), {"averaging_rate": 0.3}),
        ("quant-sgp", ("top_k", {"fraction": 0.1, "value_bits": 4}), {"averaging_rate": 0.3}),
        ("dcd-psgd", ("qsgd", {"bits": 8}), {}),
        ("deep-squeeze", ("qsgd", {"bits": 6, "unbiased": False}), {"averaging_rate": 0.3}),
        ("sparse-push", ("qsgd", {"bits": 6, "unbiased": False}), {"averaging_rate": 0.3}),
    ],
)
def test_what_is_kept_in_bfloat16_costs_its_rounding_and_no_convergence(name, compressor, more):
    """On quadratics whose minima differ; the mean of all peers, and how far they are apart."""
    rng = np.random.default_rng(0)
    minima = rng.normal(3.0, 1.0, size=(4, 100)).astype(np.float32)
    best, size = minima.mean(axis=0), float(np.linalg.norm(minima.mean(axis=0)))

    def found(in_bfloat16):
        start = np.zeros(100, np.float32)
        algorithms = peers(
            name, schedule_of(ring(4)), start, sizes=[60, 40], compressor=compressor, in_bfloat16=in_bfloat16, **more
        )
        train(algorithms, lambda i, z: z - minima[i], 250, lambda t: 0.1 * (1 - t / 250))
        return float(np.linalg.norm(total(algorithms) / 4 - best)), spread(algorithms)

    (error, apart), (rounded_error, rounded_apart) = found(False), found(True)
    assert error < 0.01 * size
    assert rounded_error < error + 2.0**-7 * size
    assert rounded_apart < apart + 2.0**-7 * size
