"""One definition of an algorithm, three drivers: real processes and the simulator compute the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.config.options import load
from peer.ops.local_cluster import Cluster, up
from peer.ops.peer_processes import ForkServer
from peer.simulate.run import run
from peer.state.checkpoints import find_checkpoints, load_checkpoint
from peer.state.kept_file import AVERAGE_FILE
from peer.state.metrics import MetricsStore

COMMON = ("run.rounds=30", "evaluation.every_rounds=10", "training.warmup_rounds=5", "state.checkpoint_every_rounds=7")


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            ("algorithm.name=quant-sgp", "graph.kind=directed-ring", "algorithm.drift_correction=auto"),
            id="quant-sgp, directed ring, drift correction",
        ),
        pytest.param(
            ("algorithm.name=quant-sgp", "graph.kind=exponential", "algorithm.memory=bfloat16"),
            id="quant-sgp, copies in bfloat16",
        ),
        pytest.param(
            (
                "algorithm.name=sparse-push",
                'graph.kind=["four-node-a", "four-node-b", "four-node-c"]',
                "graph.period=6",
                "training.momentum=qg",
                "training.learning_rate=0.02",
                "training.class_balance=0.5",
                "training.class_balance_follows_rate=true",
            ),
            id="sparse-push, changing graph, quasi-global momentum, balanced drawing",
        ),
        pytest.param(
            (
                "algorithm.name=moniqua",
                "graph.kind=ring",
                "compressor.kind=modulo",
                "compressor.bits=4",
                "algorithm.theta_value=0.001",
                "training.momentum=none",
            ),
            id="moniqua, verified, first theta far too small",
        ),
        pytest.param(
            (
                "algorithm.name=choco-sgd",
                "graph.kind=complete",
                "algorithm.mixing=clipped",
                "algorithm.averaging_rate=0.3",
            ),
            id="choco-sgd, clipped differences",
        ),
        pytest.param(
            ("algorithm.name=d-psgd", "graph.kind=complete", "algorithm.mixing=trimmed-mean", "compressor.kind=none"),
            id="d-psgd, trimmed mean",
        ),
        pytest.param(("algorithm.name=low-rank", "graph.kind=complete", "algorithm.rank=2"), id="low-rank"),
        pytest.param(
            ("algorithm.name=compressed-allreduce", "graph.kind=complete", "training.local_steps=2"),
            id="compressed-allreduce",
        ),
    ],
)
def test_four_processes_and_the_simulator_agree_bit_for_bit(
    tmp_path: Path, fork_server: ForkServer, job: tuple[str, ...]
) -> None:
    config = load(environment={}, overrides=[*COMMON, *job])
    for folder in ("real", "simulated"):
        (tmp_path / folder).mkdir()
    real_run = tmp_path / "real"
    cluster = Cluster(config, tmp_path, num_peers=4, directory=real_run, fork_server=fork_server)
    summary = up(cluster, baseline=False)
    simulation = run(config, tmp_path, num_peers=4, directory=tmp_path / "simulated", baseline=False)

    for peer in range(4):
        state = real_run / "peers" / f"peer-{peer}" / "state"
        arrays = load_checkpoint(find_checkpoints(state)[-1]).arrays
        x, u = arrays["algorithm/x"], float(arrays["algorithm/u"][0])
        z = x / np.float32(u)
        assert z.tobytes() == simulation.models[peer].tobytes()
        # Not only where they ended: every round on the way there.
        real = MetricsStore(state / "metrics.sqlite", read_only=True).rounds()
        simulated = MetricsStore(tmp_path / "simulated" / "metrics.sqlite", read_only=True).rounds()
        figures = [
            [(r.round, r.loss, r.push_weight, r.neighbor_distance, r.repairs, r.theta) for r in rows]
            for rows in (real, [row for row in simulated if row.peer == peer])
        ]
        assert figures[0] == figures[1]
    formed = [real_run / "peers" / f"peer-{peer}" / "state" / AVERAGE_FILE for peer in range(4)]
    averages = [file.read_bytes() for file in (*formed, tmp_path / "simulated" / AVERAGE_FILE) if file.exists()]
    assert len(averages) == (5 if config.algorithm.mixing == "plain" else 0)
    assert len({*averages}) <= 1
    assert summary.payload_bytes == simulation.summary.payload_bytes
    if "algorithm.name=moniqua" in job:
        assert summary.repairs > 0
