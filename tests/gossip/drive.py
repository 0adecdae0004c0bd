"""Builds peers of any algorithm in memory and takes them through rounds, bytes included where a test wants them."""

from __future__ import annotations

import numpy as np

from peer import compress, wire
from peer.compress.layout import Layout
from peer.gossip import build
from peer.gossip.base import NodeContext
from peer.gossip.mixing_matrix import MixingMatrix
from peer.gossip.options import FinalRounds, ModuloOptions
from peer.gossip.topology import Turns
from peer.random import PhiloxSource
from peer.simulate.replay import run_round
from peer.train.momentum import Momentum


def schedule_of(*matrices, period=1):
    return Turns([MixingMatrix.from_dense(np.array(w, float)) for w in matrices], period)


def ring(n):
    """Return the symmetric ring of n ≥ 3 peers with weights ⅓."""
    w = np.zeros((n, n))
    for i in range(n):
        w[i, [i, (i + 1) % n, (i - 1) % n]] = 1 / 3
    return w


def contexts(
    schedule,
    layout,
    *,
    compressor="none",
    seed=7,
    theta=(),
    theta_mode=None,
    verified=False,
    step_size_decay=(1.0,),
    final_rounds=0,
    **more,
):
    """Return one NodeContext for each peer; `compressor` is a kind or (kind, settings). θ is adapted where codes are
    verified, and constant otherwise, unless `theta_mode` says something else."""
    mode = theta_mode or ("verified" if verified else "constant")
    kind, settings = (compressor, {}) if isinstance(compressor, str) else compressor
    built = compress.build(kind, **settings)
    return [
        NodeContext(
            peer=i,
            schedule=schedule,
            layout=layout,
            draw_source=PhiloxSource(seed, i),
            compressor=built,
            seed=seed,
            modulo=ModuloOptions(theta=theta, theta_mode=mode, verified=verified, step_size_decay=step_size_decay),
            final=FinalRounds(count=final_rounds),
            **more,
        )
        for i in range(schedule.num_peers)
    ]


def peers(name, schedule, x0, *, sizes=None, **more):
    """Return the algorithm objects of all peers. `x0` is one vector, or one row for each peer."""
    x0 = np.asarray(x0)
    starts = np.tile(x0, (schedule.num_peers, 1)) if x0.ndim == 1 else x0
    layout = Layout.of_sizes(sizes or [starts.shape[1]])
    nodes = contexts(schedule, layout, **more)
    return [build(name, node, start) for node, start in zip(nodes, starts, strict=True)]


def carry_for(algorithms):
    """Return a function that encodes and decodes messages of these peers."""
    layout, dtype = algorithms[0].node.layout, algorithms[0].x.dtype
    return lambda message: wire.decode(wire.encode(message, layout), layout, dtype=dtype)


def gossip(algorithms, t, gradients=None, rate=0.0, carry=None):
    """Take the peers through round t."""
    zeros = [np.zeros_like(a.x) for a in algorithms]
    run_round(
        algorithms, t, zeros if gradients is None else gradients, [rate] * len(algorithms), carry or (lambda m: m)
    )


def total(algorithms):
    """Return Σ x in float64."""
    return sum(a.x.astype(np.float64) for a in algorithms)


def train(algorithms, gradient, rounds, rate, start=0):
    """Run rounds with exact gradients; `gradient(i, z)` is that of peer i. `rate` is γ, or a function of the round."""
    for t in range(start, start + rounds):
        step = rate(t) if callable(rate) else rate
        gossip(algorithms, t, [gradient(i, a.model()) for i, a in enumerate(algorithms)], step)


def spread(algorithms):
    """Return the consensus distance (1/n) Σ ‖z_i − z̄‖₂, z̄ = Σ x / Σ u."""
    mean = total(algorithms) / sum(a.u for a in algorithms)
    return float(np.mean([np.linalg.norm(a.model() - mean) for a in algorithms]))


def gradients_of(algorithms, t, spread=1.0):
    """Return gradients with a common part, the same for the same round. Above a spread of 1, peers differ more than
    they agree: skew."""
    rng = np.random.default_rng(100 + t)
    common = rng.normal(size=algorithms[0].x.size)
    return [(common + spread * rng.normal(size=common.size)).astype(a.x.dtype) for a in algorithms]


NESTEROV = {"kind": "nesterov", "weight_decay": 0.1}


def expect_momentum_on_the_mean(algorithms, atol, spread=1.0):
    """Take peers with NESTEROV through rounds, and compare x with what momentum makes of the mean gradient."""
    x, momentum = algorithms[0].x.copy(), Momentum(**NESTEROV)
    for t in range(10):
        gradients = gradients_of(algorithms, t, spread)
        gossip(algorithms, t, gradients, 0.1)
        x = x - 0.1 * momentum.direction(np.mean(gradients, axis=0), x)
    np.testing.assert_allclose(algorithms[0].x, x, atol=atol)
