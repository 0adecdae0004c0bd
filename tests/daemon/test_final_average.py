"""The average of all models that real peers form after the last round."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from peer.config.options import load
from peer.errors import PeerUnreachable
from peer.ops.export import export_model
from peer.ops.local_cluster import Cluster
from peer.ops.peer_processes import ForkServer
from peer.run.summary import average
from peer.state.disk import Disk
from peer.state.kept_file import AVERAGE_FILE, AVERAGE_SHARES, MODEL_FORM
from peer.train.model_file import open_tensors
from tests.daemon.running_cluster import clusters_in, wait_for

JOB = ("run.rounds=20", "evaluation.every_rounds=20", "transport.backoff_max_s=0.5", "transport.linger_s=2")


@pytest.fixture
def started(tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., Cluster]]:
    """Start clusters that are gone when the test is over, however it ends."""
    with clusters_in(tmp_path, fork_server) as make:

        def start(*settings: str, num_peers: int = 4) -> Cluster:
            cluster = make(load(environment={}, overrides=[*JOB, *settings]), num_peers)
            cluster.start()
            return cluster

        yield start


def state(cluster: Cluster, peer: int) -> Path:
    return cluster.directory / "peers" / f"peer-{peer}" / "state"


def vector(cluster: Cluster, path: Path) -> npt.NDArray[np.float32]:
    """Return the exchanged parameters in a file, in the order of their vector."""
    form = MODEL_FORM.read(Disk(state(cluster, 0)))
    assert form is not None
    with open_tensors(path) as file:
        return np.concatenate([file.get_tensor(name).numpy().ravel() for name in form.trained])


def files(cluster: Cluster) -> list[bytes]:
    return [(state(cluster, peer) / AVERAGE_FILE).read_bytes() for peer in range(cluster.num_peers)]


@pytest.mark.parametrize("settings", [("ring", "d-psgd"), ("exponential", "sgp"), ("complete", "quant-sgp")], ids=str)
def test_all_devices_end_with_the_same_file_which_is_what_one_computes_by_hand(
    started: Callable[..., Cluster], tmp_path: Path, settings: tuple[str, str]
) -> None:
    graph, algorithm = settings
    cluster = started(f"graph.kind={graph}", f"algorithm.name={algorithm}")
    wait_for(cluster, cluster.finished)
    assert len({*files(cluster)}) == 1
    by_hand = average(cluster.final_states())
    formed = state(cluster, 3) / AVERAGE_FILE
    assert np.array_equal(vector(cluster, formed), by_hand)
    # Whether a device's folder is exported, or that of the run.
    for source in (cluster.directory, state(cluster, 2).parent):
        exported = export_model(source, tmp_path / "model.safetensors", force=True)
        assert exported.peers == (0, 1, 2, 3)
        assert np.array_equal(vector(cluster, tmp_path / "model.safetensors"), by_hand)
    own = export_model(state(cluster, 2).parent, tmp_path / "model.safetensors", peer_index=2, force=True)
    assert own.peers == (2,)
    assert not np.array_equal(vector(cluster, tmp_path / "model.safetensors"), by_hand)
    # The states of other devices need not be here.
    for peer in (1, 2, 3):
        shutil.rmtree(state(cluster, peer))
    exported = export_model(cluster.directory, tmp_path / "model.safetensors", force=True)
    assert exported.peers == (0, 1, 2, 3)
    assert np.array_equal(vector(cluster, tmp_path / "model.safetensors"), by_hand)


def test_peers_without_rounds_form_it_too(started: Callable[..., Cluster]) -> None:
    cluster = started("algorithm.name=ad-psgd", "graph.kind=ring")
    wait_for(cluster, cluster.finished)
    assert len({*files(cluster)}) == 1
    assert np.array_equal(vector(cluster, state(cluster, 1) / AVERAGE_FILE), average(cluster.final_states()))


def test_a_peer_that_is_killed_meanwhile_goes_on_and_one_that_is_missing_is_named(
    started: Callable[..., Cluster],
) -> None:
    cluster = started("graph.kind=ring", "transport.give_up_after_s=2")
    wait_for(cluster, cluster.finished)
    wanted = files(cluster)
    for peer in range(4):
        for name in (AVERAGE_FILE, AVERAGE_SHARES.name):
            (state(cluster, peer) / name).unlink()
    for peer in (0, 1, 3):
        cluster.start_peer(peer)
    assert [cluster.processes[peer].wait() for peer in (0, 1, 3)] == [PeerUnreachable.exit_code] * 3
    assert all("peer-2 told no model" in cluster.last_words(peer) for peer in (0, 1, 3))
    assert not any((state(cluster, peer) / AVERAGE_FILE).exists() for peer in range(4))
    for peer in range(4):
        cluster.start_peer(peer)
    wait_for(cluster, (state(cluster, 2) / AVERAGE_SHARES.name).exists)
    cluster.processes[2].kill()
    cluster.processes[2].wait()
    cluster.start_peer(2)
    wait_for(cluster, cluster.finished)
    assert files(cluster) == wanted


@pytest.mark.parametrize("setting", ["run.average=false", "algorithm.mixing=trimmed-mean"])
def test_an_option_leaves_it_out(started: Callable[..., Cluster], setting: str) -> None:
    cluster = started("graph.kind=complete", "algorithm.name=d-psgd", "algorithm.attackers=1", setting)
    wait_for(cluster, cluster.finished)
    assert not any((state(cluster, peer) / AVERAGE_FILE).exists() for peer in range(4))
    assert "no average of the models is formed" in (cluster.directory / "peers/peer-0/log.txt").read_text()
