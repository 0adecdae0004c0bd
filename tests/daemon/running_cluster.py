"""Real peers of a test, from their start to the end, with a kill in the middle."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from peer.ops.local_cluster import Cluster


def trained(cluster: Cluster, *, rounds: int, kill: int | None = None) -> list[bytes]:
    """Return the models after the run; `kill`: a peer that is killed in its middle and started again."""
    with contextlib.ExitStack() as after:
        after.callback(cluster.close)
        cluster.start()
        after.callback(_end, cluster)
        if kill is not None:
            _wait_for(cluster, rounds // 2)
            cluster.processes[kill].kill()
            cluster.processes[kill].wait()
            cluster.start_peer(kill)
        _wait_for(cluster, rounds, ended=True)
        return [(x / np.float32(u)).tobytes() for x, u in cluster.final_states()]


def _wait_for(cluster: Cluster, rounds: int, *, ended: bool = False) -> None:
    """Wait until every peer has done so many rounds, and has ended if it is to."""
    deadline = time.monotonic() + 120
    while min(peer.round for peer in cluster.poll()) < rounds or (ended and not cluster.finished()):
        assert time.monotonic() < deadline, [cluster.last_words(i) for i in range(cluster.num_peers)]
        time.sleep(0.05)


def _end(cluster: Cluster) -> None:
    for process in cluster.processes:
        process.kill()
        process.wait()
