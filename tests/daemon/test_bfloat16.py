"""Peers that train in bfloat16 compute the bits of the simulator, and of themselves after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.config.options import load
from peer.ops.peer_processes import ForkServer
from tests.daemon.running_cluster import killed_and_simulated

JOB = (
    "run.rounds=14",
    "training.precision=bfloat16",
    # Convolutions and EvoNorm.
    "training.task=tests.train.small_tasks:images",
    "training.task_options={norm='evonorm'}",
    "training.batch_size=2",
    "training.warmup_rounds=2",
    "evaluation.every_rounds=7",
    "state.checkpoint_every_rounds=5",
    "transport.backoff_max_s=0.5",
    "transport.linger_s=10",
    # So that the kill comes in the middle of the run.
    "peer.min_step_s=0.3",
)


@pytest.mark.slow
def test_a_killed_peer_and_the_simulator_agree_bit_for_bit(tmp_path: Path, fork_server: ForkServer) -> None:
    config = load(environment={}, overrides=JOB)
    real, simulated = killed_and_simulated(config, tmp_path, fork_server)
    assert real == [z.tobytes() for z in simulated.models]
    assert simulated.summary.precision == "bfloat16"
