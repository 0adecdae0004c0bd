"""Real peers of a test, from their start to the end, with a kill in the middle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from peer.config.options import Config
from peer.ops.local_cluster import Cluster
from peer.ops.peer_processes import ForkServer
from peer.simulate.run import Simulation, run


@contextlib.contextmanager
def clusters_in(folder: Path, fork_server: ForkServer) -> Iterator[Callable[..., Cluster]]:
    """Give what makes the cluster of a configuration in a folder, not started; it is gone afterwards, however it
    ends."""
    with contextlib.ExitStack() as after:

        def make(config: Config, num_peers: int = 4) -> Cluster:
            directory = folder / "run"
            directory.mkdir()
            cluster = Cluster(config, folder, num_peers=num_peers, directory=directory, fork_server=fork_server)
            after.callback(cluster.close)
            after.callback(_end, cluster)
            return cluster

        yield make


def wait_for(cluster: Cluster, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, _account(cluster)
        time.sleep(0.05)


def trained(cluster: Cluster, *, rounds: int, kill: int | None = None) -> list[bytes]:
    """Return the models after the run; `kill`: a peer that is killed in its middle and started again."""
    with contextlib.ExitStack() as after:
        after.callback(cluster.close)
        cluster.start()
        after.callback(_end, cluster)
        if kill is not None:
            wait_for(cluster, lambda: min(peer.round for peer in cluster.poll()) >= rounds // 2)
            cluster.processes[kill].kill()
            cluster.processes[kill].wait()
            cluster.start_peer(kill)
        wait_for(cluster, lambda: min(peer.round for peer in cluster.poll()) >= rounds and cluster.finished())
        return [(x / np.float32(u)).tobytes() for x, u in cluster.final_states()]


def killed_and_simulated(config: Config, folder: Path, fork_server: ForkServer) -> tuple[list[bytes], Simulation]:
    """Return the models of two real peers, of which one was killed in the middle, and the same run simulated."""
    (folder / "run").mkdir()
    cluster = Cluster(config, folder, num_peers=2, directory=folder / "run", fork_server=fork_server)
    real = trained(cluster, rounds=config.run.rounds, kill=1)
    return real, run(config, folder, num_peers=2, baseline=False)


def _account(cluster: Cluster) -> list[tuple[int | None, str]]:
    """Return how each process has ended, if it has, and its last words."""
    return [(process.poll(), cluster.last_words(peer)) for peer, process in enumerate(cluster.processes)]


def _end(cluster: Cluster) -> None:
    for process in cluster.processes:
        process.kill()
        process.wait()
