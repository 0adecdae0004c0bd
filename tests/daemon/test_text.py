"""Peers that train on texts compute the bits of the simulator, and of themselves after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.config.options import load
from peer.ops.peer_processes import ForkServer
from tests.daemon.running_cluster import killed_and_simulated

JOB = (
    "run.rounds=12",
    "training.task=text",
    "training.task_options={width=16, blocks=1, context=16}",
    "training.batch_size=3",
    "training.local_steps=2",
    "evaluation.every_rounds=6",
    "data.directory=texts",
    "state.checkpoint_every_rounds=5",
    "transport.backoff_max_s=0.5",
    "transport.linger_s=10",
    # So that the kill comes in the middle of the run.
    "peer.min_step_s=0.3",
)


@pytest.mark.slow
def test_a_killed_peer_and_the_simulator_agree_bit_for_bit(tmp_path: Path, fork_server: ForkServer) -> None:
    for name in ("code", "news"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for number in range(9):
            (tmp_path / "texts" / name / f"{number}.txt").write_text(f"{number} {name} " * 20)
    # With AdamW, clipping and a subfolder for each peer.
    config = load(environment={}, overrides=JOB, new_job=2)
    real, simulated = killed_and_simulated(config, tmp_path, fork_server)
    assert real == [z.tobytes() for z in simulated.models]
    assert [simulated.summary.criteria[name] for name in ("test loss", "code", "news")] == ["lower"] * 3
    assert simulated.summary.averaged_metrics.keys() == {"test loss", "perplexity", "code", "news"}
