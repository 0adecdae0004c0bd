"""Peers that train in bfloat16 compute the bits of the simulator, and of themselves after a kill."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from peer.config import load
from peer.ops.local_cluster import Cluster
from peer.simulate.run import run

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
def test_a_killed_peer_and_the_simulator_agree_bit_for_bit(tmp_path: Path) -> None:
    config = load(environment={}, overrides=JOB)
    (tmp_path / "run").mkdir()
    cluster = Cluster(config, tmp_path, num_peers=2, directory=tmp_path / "run")
    with contextlib.ExitStack() as after:
        after.callback(cluster.close)
        cluster.start()
        after.callback(end, cluster)
        wait_for(cluster, rounds=7)
        cluster.processes[1].kill()
        cluster.processes[1].wait()
        cluster.start_peer(1)
        wait_for(cluster, rounds=14)
        real = [(x / np.float32(u)).tobytes() for x, u in cluster.final_states()]
    simulated = run(config, tmp_path, num_peers=2, baseline=False)
    assert real == [z.tobytes() for z in simulated.models]
    assert simulated.summary.precision == "bfloat16"


def wait_for(cluster: Cluster, *, rounds: int) -> None:
    """Wait until every peer has done so many rounds, and has ended if these were all."""
    deadline = time.monotonic() + 120
    while min(peer.round for peer in cluster.poll()) < rounds or (rounds == 14 and not cluster.finished()):
        assert time.monotonic() < deadline, [cluster.last_words(i) for i in range(cluster.num_peers)]
        time.sleep(0.05)


def end(cluster: Cluster) -> None:
    for process in cluster.processes:
        process.kill()
        process.wait()
