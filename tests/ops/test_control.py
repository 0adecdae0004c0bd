"""`sotto status` and `sotto stop` against peers that really run: what they say of every link, and that they end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import load
from peer.ops.local_cluster import Cluster
from peer.ops.peer_processes import ForkServer
from peer.report.run_data import load_run
from peer.report.run_page import render
from peer.state.metrics import LinkRoundRecord, MetricsStore
from tests.cli.runner import sotto


@pytest.fixture
def cluster(tmp_path: Path, fork_server: ForkServer) -> Iterator[Cluster]:
    config = load(
        environment={},
        overrides=[
            "run.rounds=100000",
            "evaluation.every_rounds=10",
            "evaluation.share_every=1",
            "training.warmup_rounds=5",
            "peer.min_step_s=0.02",
        ],
    )
    running = Cluster(config, tmp_path, num_peers=3, directory=tmp_path, fork_server=fork_server)
    running.start()
    yield running
    for process in running.processes:
        process.kill()
        process.wait()
    running.close()


def ask(directory: Path) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = json.loads(sotto("status", "--run", str(directory), "--json").stdout)
    return answers


def test_an_operator_asks_and_stops_a_running_cluster(cluster: Cluster, tmp_path: Path) -> None:
    deadline = time.monotonic() + 90
    while min(peer.round for peer in cluster.poll()) < 60:
        assert time.monotonic() < deadline, [cluster.last_words(peer) for peer in range(3)]
        time.sleep(0.1)

    answers = ask(tmp_path)
    assert [answer["name"] for answer in answers] == ["peer-0", "peer-1", "peer-2"]
    for answer in answers:
        assert answer["state"] == "running"
        assert answer["round"] >= 60
        assert answer["rounds"] == 100000
        assert 0.0 < answer["loss"] < 10.0
        assert 0.0 <= answer["accuracy"] <= 1.0
        # A directed ring of three: each has two neighbours and sends to one of them.
        assert (answer["neighbors"], answer["neighbors_up"]) == (2, 2)
        assert 0 < answer["payload_bytes"] < answer["frame_bytes"] < answer["protobuf_bytes"] < answer["socket_bytes"]
        receivers = [link for link in answer["links"].values() if link["receives"]]
        assert len(answer["links"]) == 2
        assert len(receivers) == 1
        assert_link_is_accounted_for(receivers[0], cluster.trainer.layout.size)
    assert "2/2" in sotto("status", "--run", str(tmp_path)).stdout
    one = json.loads(sotto("status", "-c", str(cluster.peer_files[1]), "--json").stdout)
    assert one["name"] == "peer-1"

    # The live view reads the same from the metrics, while the peers run.
    assert [(peer.neighbors_up, peer.neighbors) for peer in cluster.poll()] == [(2, 2)] * 3

    stopped = sotto("stop", "--run", str(tmp_path))
    assert stopped.exit_code == 0, stopped.output
    assert [process.wait(30) for process in cluster.processes] == [0, 0, 0]
    silent = sotto("status", "--run", str(tmp_path), "--json")
    assert silent.exit_code == 6
    assert [answer["state"] for answer in json.loads(silent.stdout)] == ["unreachable"] * 3

    # What the operator saw is in the metrics, for every link and round, and in the report.
    for peer, answer in enumerate(answers):
        assert_metrics_add_up(cluster.state_folders[peer] / "metrics.sqlite", answer, cluster.trainer.layout.size)
    page = render(load_run(tmp_path))
    for heading in ("with headers", "protobuf", "socket", "bits a parameter", "entropy bound"):
        assert heading in page


def assert_link_is_accounted_for(link: dict[str, Any], parameters: int) -> None:
    assert link["up"]
    assert link["problem"] is None
    assert link["frames"] >= 60
    assert link["values"] >= 60 * parameters
    assert 0 < link["payload_bytes"] < link["frame_bytes"] < link["protobuf_bytes"] < link["socket_bytes"]
    assert link["socket_bytes"] < link["packet_bytes"]
    assert link["bits_per_value"] == pytest.approx(8 * link["payload_bytes"] / link["values"])
    assert 0.0 < link["entropy_bits_per_value"] < 1.5 * link["bits_per_value"]


def assert_metrics_add_up(path: Path, answer: dict[str, Any], parameters: int) -> None:
    store = MetricsStore(path, read_only=True)
    try:
        rounds, rows, links = store.rounds(), store.written(LinkRoundRecord)[0], store.links()
    finally:
        store.close()
    assert len(links) == 2
    assert len(rows) == 2 * len(rounds)
    by_round: dict[int, list[Any]] = {}
    for row in rows:
        by_round.setdefault(row.round, []).append(row)
    for record in rounds:
        of_links = by_round[record.round]
        for name in ("values", "payload_bytes", "frame_bytes", "entropy_bits", "protobuf_bytes"):
            assert sum(getattr(row, name) for row in of_links) == getattr(record, name), name
        assert record.values == parameters
        assert all(row.socket_bytes is not None for row in of_links)
    # A round that the stop cut short was sent and is not in the rows of the rounds; no more than one can be.
    unfinished = sum(link.payload_bytes for link in links) - sum(record.payload_bytes for record in rounds)
    assert 0 <= unfinished <= 2 * max(record.payload_bytes for record in rounds)
    assert sum(link.socket_bytes or 0 for link in links) > answer["socket_bytes"]
    assert sum(row.socket_bytes or 0 for row in rows) <= sum(link.socket_bytes or 0 for link in links)
