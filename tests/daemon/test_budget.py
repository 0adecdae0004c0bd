"""A bandwidth budget in real peers: what a killed peer sends again is what its neighbours already have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from peer.config.options import load
from peer.gossip.budget import EVERY
from peer.ops.local_cluster import Cluster
from peer.ops.peer_processes import ForkServer
from peer.state.checkpoints import find_checkpoints, load_checkpoint
from peer.state.disk import Disk
from peer.state.journal import Begun, read_journal

PEERS, ROUNDS = 3, 120


ROUND_KBYTES = 2.6
"""In one round: between the smallest and the whole variant. With less or more, every decision would be the same."""


@contextmanager
def running(folder: Path, fork_server: ForkServer, *more: str) -> Iterator[Cluster]:
    config = load(
        environment={},
        overrides=[
            "algorithm.name=quant-sgp",
            "graph.kind=directed-ring",
            "evaluation.every_rounds=0",
            "training.warmup_rounds=5",
            "state.checkpoint_every_rounds=50",
            "transport.backoff_max_s=0.5",
            "transport.linger_s=10",
            "peer.min_step_s=0.05",
            "compressor.fraction=0.3",
            *more,
        ],
    )
    cluster = Cluster(config, folder, num_peers=PEERS, directory=folder, fork_server=fork_server)
    cluster.start()
    try:
        yield cluster
    finally:
        for process in cluster.processes:
            process.kill()
            process.wait()
        cluster.close()


@contextmanager
def running_with_budget(folder: Path, fork_server: ForkServer) -> Iterator[Cluster]:
    """Yield a cluster whose budget suits the rounds of this machine, as they were a moment ago."""
    folder.mkdir()
    with running(folder / "measured", fork_server, "run.rounds=25") as measured:
        wait_for_round(measured, 25)
        times = [record.time_s for record in measured.stores()[1].rounds()]
    round_s = float(np.median(np.diff(times)))
    budget = f"compressor.budget_kbytes_per_s={ROUND_KBYTES / round_s:.3g}"
    with running(folder / "run", fork_server, f"run.rounds={ROUNDS}", budget) as cluster:
        yield cluster


def wait_for_round(cluster: Cluster, round_: int) -> None:
    deadline = time.monotonic() + 90
    while min(peer.round for peer in cluster.poll()) < round_:
        assert time.monotonic() < deadline, [cluster.last_words(peer) for peer in range(PEERS)]
        time.sleep(0.02)


def test_a_killed_peer_repeats_its_decisions(tmp_path: Path, fork_server: ForkServer) -> None:
    for attempt in range(4):
        with running_with_budget(tmp_path / str(attempt), fork_server) as cluster:
            if decides_in_a_run_with_kills(cluster):
                return
    pytest.fail("the machine was never as fast as a moment before: nothing was decided, so nothing was tested")


def decides_in_a_run_with_kills(cluster: Cluster) -> bool:
    """Kill a peer twice; return whether the budget made peers decide."""
    # Before the first checkpoint, and long after it: many rounds are repeated, on a clock that tells another story.
    for after in (30, 90):
        wait_for_round(cluster, after)
        cluster.processes[1].kill()
        cluster.processes[1].wait()
        time.sleep(0.5)
        cluster.start_peer(1)
    deadline = time.monotonic() + 90
    while not cluster.finished():
        assert time.monotonic() < deadline, [cluster.last_words(peer) for peer in range(PEERS)]
        cluster.poll()
        time.sleep(0.1)
    assert cluster.failed() is None
    cluster.poll()

    # The copies that peers hold of each other are the same to the last bit: no message was made anew in another way.
    states = [load_checkpoint(find_checkpoints(folder)[-1]) for folder in cluster.state_folders]
    assert [state.round for state in states] == [ROUNDS] * PEERS
    for holder in range(PEERS):
        sender = (holder - 1) % PEERS
        held = states[holder].arrays[f"algorithm/replica.{sender}"]
        np.testing.assert_array_equal(held, states[sender].arrays[f"algorithm/replica.{sender}"])
    # Every round is in the journals with the variant that it used: those of a group of rounds share theirs.
    for folder in cluster.state_folders:
        for path in folder.glob("journal-*"):
            begun = [r for r in read_journal(Disk(folder), path.name).records if isinstance(r, Begun)]
            assert all(a.variant == b.variant for a, b in pairwise(begun) if b.round % EVERY)
    return all(len({record.fraction for record in store.rounds()}) > 2 for store in cluster.stores()[1:])
