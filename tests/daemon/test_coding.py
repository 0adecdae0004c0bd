"""Whole models between real peers: in full width where the kernel measures that a link is faster than the coder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from peer.config.options import load
from peer.ops.local_cluster import Cluster
from peer.ops.peer_processes import ForkServer
from peer.state.disk import Disk
from peer.state.journal import FULL_WIDTH, Begun, read_journal

PEERS, ROUNDS, PARAMETERS = 2, 12, 1_100_000


@pytest.mark.parametrize("coding", ["auto", "entropy"])
def test_whole_models_pass_in_full_width_over_a_fast_link_also_after_a_kill(
    coding: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    config = load(
        environment={},
        overrides=[
            "algorithm.name=sgp",
            "graph.kind=directed-ring",
            "evaluation.every_rounds=0",
            "training.task=synthetic",
            f"training.task_options.parameters={PARAMETERS}",
            "training.task_options.samples=64",
            "state.checkpoint_every_rounds=0",
            "transport.backoff_max_s=0.5",
            "transport.linger_s=10",
            f"run.rounds={ROUNDS}",
            f"compressor.coding={coding}",
        ],
    )
    cluster = Cluster(config, tmp_path, num_peers=PEERS, directory=tmp_path, fork_server=fork_server)
    cluster.start()
    try:
        # It repeats its rounds before it can know of any link.
        wait_for_round(cluster, 6)
        cluster.processes[1].kill()
        cluster.processes[1].wait()
        cluster.start_peer(1)
        wait_for_round(cluster, ROUNDS)
        deadline = time.monotonic() + 90
        while not cluster.finished():
            assert time.monotonic() < deadline, [cluster.last_words(peer) for peer in range(PEERS)]
            cluster.poll()
            time.sleep(0.05)
        assert cluster.failed() is None
        payloads = [[record.payload_bytes for record in store.rounds()] for store in cluster.stores()[1:]]
    finally:
        for process in cluster.processes:
            process.kill()
            process.wait()
        cluster.close()
    variants = {
        record.variant
        for folder in cluster.state_folders
        for record in read_journal(Disk(folder), "journal-00000000.log").records
        if isinstance(record, Begun)
    }
    assert variants == ({None, FULL_WIDTH} if coding == "auto" else {None})
    for sizes in payloads:
        # Until the others' releases are known, and the kernel has measured something, they are coded.
        assert sizes[0] < 0.95 * 4 * PARAMETERS
        assert (max(sizes) > 0.95 * 4 * PARAMETERS) == (coding == "auto")


def wait_for_round(cluster: Cluster, round_: int) -> None:
    deadline = time.monotonic() + 90
    while min(peer.round for peer in cluster.poll()) < round_:
        assert time.monotonic() < deadline, [cluster.last_words(peer) for peer in range(PEERS)]
        time.sleep(0.02)
