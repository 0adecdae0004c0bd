"""A frame that is refused, or that meets a bug, costs its sender the connection; what an honest peer sends then counts.

Processes and sockets are real. What one peer sends, or what it makes of what it receives, goes wrong once
(`tests.daemon.mishap`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from peer.config.options import load
from peer.ops.local_cluster import Cluster
from peer.state.metrics import LinkRecord

pytestmark = pytest.mark.usefixtures("warm_python")

JOB = (
    "run.rounds=6",
    "evaluation.every_rounds=0",
    "training.warmup_rounds=1",
    "training.task_options={hidden=4}",
    "transport.backoff_max_s=0.2",
    "transport.linger_s=5",
    "rounds.late=wait",
)


def train(directory: Path, mishaps: dict[int, str], *settings: str) -> tuple[list[bytes], list[LinkRecord], str]:
    """Return the models of two peers, what they say of their links, and the log of peer 0. `mishaps`: what goes wrong
    in which peer."""

    def launcher(index: int) -> list[str]:
        return [sys.executable, "-m", "tests.daemon.mishap", mishaps[index]] if index in mishaps else []

    config = load(environment={}, overrides=(*JOB, *settings))
    cluster = Cluster(config, directory, num_peers=2, directory=directory, launcher=launcher)
    with contextlib.closing(cluster):
        cluster.start()
        try:
            deadline = time.monotonic() + 120
            while not cluster.finished():
                assert time.monotonic() < deadline, [cluster.last_words(index) for index in range(2)]
                time.sleep(0.05)
            assert cluster.failure() is None
        finally:
            cluster.stop()
        cluster.poll()
        models = [(x / np.float32(u)).tobytes() for x, u in cluster.final_states()]
        links = [link for store in cluster.stores() for link in store.links()]
        return models, links, (cluster.peer_files[0].parent / "log.txt").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The models of a run in which all goes well."""
    return train(tmp_path_factory.mktemp("undisturbed"), {})[0]


@pytest.mark.parametrize(
    ("mishaps", "says"),
    [
        ({1: "damage"}, "the frame's checksum does not match its bytes"),
        ({0: "bug"}, "this peer cannot handle what it sent (ZeroDivisionError)"),
    ],
    ids=["damaged", "bug"],
)
def test_a_peer_that_waits_for_everybody_still_takes_the_honest_frame_of_that_number(
    mishaps: dict[int, str], says: str, undisturbed: list[bytes], tmp_path: Path
) -> None:
    models, links, log = train(tmp_path, mishaps)
    assert models == undisturbed
    offences = {(link.peer, link.neighbor): (link.offences, link.last_offence) for link in links}
    assert offences == {(0, 1): (1, says), (1, 0): (0, None)}
    assert log.count(f"peer-1 broke the protocol: {says}") == 1
    assert [link.reconnects for link in links] == [1, 1]


def test_without_rounds_too_a_bug_in_a_receiver_ends_only_the_link(tmp_path: Path) -> None:
    _, links, _ = train(tmp_path, {0: "bug"}, "algorithm.name=ad-psgd")
    assert [(link.offences, link.last_offence) for link in links if link.peer == 0] == [
        (1, "this peer cannot handle what it sent (ZeroDivisionError)")
    ]
