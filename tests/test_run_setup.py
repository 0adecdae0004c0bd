"""From a configuration to the objects of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer import gossip
from peer.compress.layout import Layout
from peer.config import load
from peer.gossip.theta import theorem_2
from peer.run_setup import RunSetup


def test_theta_by_theorem_2_knows_how_far_the_learning_rate_fell() -> None:
    """γ falls to a tenth twice; C_α, 100 in the end, keeps θ where the first rounds need it."""
    chosen = {
        "algorithm.name": "moniqua",
        "algorithm.theta": "theorem",
        "compressor.kind": "modulo",
        "graph.kind": "ring",
    }
    falling = {"training.schedule": "step", "training.learning_rate": 0.5, "training.warmup_rounds": 0, "run.rounds": 8}
    config = load(environment={}, overrides=[f"{key}={value}" for key, value in {**chosen, **falling}.items()])
    setup = RunSetup.open(config, Path(), num_peers=5)
    layout = Layout.of_sizes([3])
    algorithm = gossip.build("moniqua", setup.node(0, layout), np.zeros(3, np.float32))
    rho = setup.schedule.second_eigenvalue
    for t, (rate, decay) in {0: (0.5, 1.0), 4: (0.05, 10.0), 7: (0.005, 100.0)}.items():
        algorithm.begin(t, np.full(3, -2.0, np.float32), rate)
        assert algorithm.metrics().theta == pytest.approx(theorem_2(rate, 2.0, 5, rho, decay=decay)), t


@pytest.mark.parametrize(
    ("algorithm", "asked", "expected"),
    [
        ("allreduce", "auto", False),
        ("parameter-server", "auto", False),
        ("quant-sgp", "auto", "auto"),
        ("allreduce", "true", True),
    ],
)
def test_logits_are_not_adjusted_where_all_gradients_are_averaged(
    algorithm: str, asked: str, expected: bool | str
) -> None:
    chosen = {"algorithm.name": algorithm, "training.label_adjustment": asked, "graph.kind": "complete"}
    config = load(environment={}, overrides=[f"{key}={value}" for key, value in chosen.items()])
    assert RunSetup.open(config, Path(), num_peers=4).training.label_adjustment == expected
