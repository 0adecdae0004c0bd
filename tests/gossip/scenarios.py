"""Random scenarios in the layout of scenario files: any size, graph and numbers."""

from __future__ import annotations

import numpy as np


def doubly_stochastic(rng, n):
    """Return a symmetric doubly stochastic matrix of a connected graph (Metropolis weights) with self-loops."""
    adjacent = rng.random((n, n)) < 0.4
    adjacent |= adjacent.T
    for i in range(n):
        adjacent[i, (i + 1) % n] = adjacent[(i + 1) % n, i] = True
    np.fill_diagonal(adjacent, False)
    degree = adjacent.sum(axis=1)
    w = np.where(adjacent, 1.0 / (1 + np.maximum(degree[:, None], degree[None, :])), 0.0)
    return w + np.diag(1 - w.sum(axis=1))


def column_stochastic(rng, n):
    """Return a directed, strongly connected column-stochastic matrix whose rows do not sum to 1."""
    w = rng.random((n, n)) * (rng.random((n, n)) < 0.5)
    for i in range(n):
        w[i, i] += 0.3 + rng.random()
        w[(i + 1) % n, i] += 0.2 + rng.random()
    return w / w.sum(axis=0)


def scenario(algorithm, seed, *, nodes=None, layers=None, rounds=25, matrices=1, graph=None, **more):
    """Return a random scenario of one algorithm; `more` adds or replaces keys."""
    rng = np.random.default_rng(seed)
    n = nodes or int(rng.integers(2, 8))
    layers = layers or [int(size) for size in rng.integers(1, 12, size=int(rng.integers(1, 4)))]
    d = sum(int(np.prod(layer)) for layer in layers)
    push_sum = algorithm in ("sgp", "sparse-push", "scsp", "quant-sgp")
    make = graph or (column_stochastic if push_sum else doubly_stochastic)
    return {
        "algorithm": algorithm,
        "nodes": n,
        "dim": d,
        "layers": layers,
        "rounds": rounds,
        "lr": 0.05,
        "x0": rng.normal(size=d).tolist(),
        "objective": {
            "curvature": rng.uniform(0.5, 2.0, (n, d)).tolist(),
            "target": rng.normal(size=(n, d)).tolist(),
        },
        "mixing": [make(rng, n).tolist() for _ in range(matrices)],
        **more,
    }


def events(rng, nodes, count, mixes=None):
    """Return a random serial order of events in which every step follows a read of the same node."""
    result, holds = [], set()
    while len(result) < count:
        kind = rng.choice(["read", "step", "mix"])
        i = int(rng.integers(nodes))
        if kind == "read":
            holds.add(i)
            result.append(["read", i])
        elif kind == "step" and i in holds:
            holds.discard(i)
            result.append(["step", i])
        elif kind == "mix" and nodes > 1:
            j = int(rng.integers(nodes - 1))
            result.append(["mix", i, j + (j >= i)])
    return result
