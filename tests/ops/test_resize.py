"""A run on this machine that goes on with more peers, then with fewer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from peer.config.options import PeerAddress, load
from peer.errors import ConfigError
from peer.gossip.incarnations import Numbering
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.ops import local_cluster
from peer.ops.resize import Lineup, line_up
from peer.records import Progress
from peer.state.checkpoints import Checkpoint, StateFolder, find_checkpoints, load_checkpoint
from peer.state.metrics import MetricsStore, Summary

pytestmark = pytest.mark.usefixtures("warm_python")

JOB = (
    "run.rounds=400",
    # Otherwise a fast processor is at the end before a peer that was just started takes part.
    "peer.min_step_s=0.02",
    "graph.kind=exponential",
    "training.precision=float32",
    "training.batch_size=2",
    "evaluation.every_rounds=100",
    "transport.backoff_max_s=0.3",
    "transport.linger_s=5",
)


def go_on(
    directory: Path, lineup: Lineup | None, until: Callable[[Progress], bool] = lambda progress: False
) -> Summary:
    """Run what `sotto up` runs, to the end or until a condition holds."""
    stop = threading.Event()

    def look(progress: Progress) -> None:
        if until(progress):
            stop.set()

    file = directory / "peers" / "peer-0" / "peer.toml"
    config = load(file if lineup is not None else None, environment={}, overrides=JOB if lineup is None else ())
    cluster = local_cluster.Cluster(config, file.parent, num_peers=2, directory=directory, lineup=lineup)
    return local_cluster.up(cluster, on_progress=look, stop=stop, baseline=False)


@pytest.mark.slow
def test_a_run_grows_and_shrinks(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    go_on(directory, None, lambda progress: min(peer.round for peer in progress.peers) >= 5)
    peers = directory / "peers"
    config = load(peers / "peer-0" / "peer.toml", environment={})
    before = (peers / "peer-1" / "peer.toml").read_bytes()

    grown = line_up(peers, config, 4)
    assert grown == Lineup((0, 1), (), (2, 3))
    summary = go_on(directory, grown, lambda progress: min(peer.round for peer in progress.peers) > 0)
    assert (summary.ended, summary.num_peers) == ("stopped", 4)
    assert (peers / "peer-1" / "peer.toml").read_bytes() == before

    shrunk = line_up(peers, config, 3)
    assert shrunk == Lineup((0, 1, 2), (3,), ())
    summary = go_on(directory, shrunk)
    assert (summary.ended, summary.num_peers, summary.members) == ("completed", 3, [0, 1, 2])
    assert len(summary.peer_accuracy) == 3
    assert (directory / "model.safetensors").exists()
    assert (peers / "peer-3" / "state" / "model.safetensors").exists()
    assert line_up(peers, config, None) == Lineup((0, 1, 2), (), ())
    weights = [
        float(load_checkpoint(find_checkpoints(peers / f"peer-{peer}" / "state")[-1]).arrays["algorithm/u"][0])
        for peer in range(3)
    ]
    assert sum(weights) == pytest.approx(2.0, abs=1e-9), "what the two began with"
    store = MetricsStore(directory / "metrics.sqlite", read_only=True)
    assert [record.round for record in store.consensus()][-1] == 400
    store.close()


def test_a_run_whose_members_cannot_change_keeps_its_number(tmp_path: Path) -> None:
    config = load(environment={}, overrides=["algorithm.name=ad-psgd"])
    for peer in range(2):
        (tmp_path / f"peer-{peer}").mkdir()
        (tmp_path / f"peer-{peer}" / "peer.toml").write_text("")
    assert line_up(tmp_path, config, None) == line_up(tmp_path, config, 2) == Lineup((0, 1), (), ())
    with pytest.raises(ConfigError, match=r"--peers: differs from the number of peers of this run, but with ad-psgd"):
        line_up(tmp_path, config, 3)


def test_a_device_that_came_back_under_another_number_goes_on(tmp_path: Path) -> None:
    config = load(environment={}).model_copy(update={"peers": tuple(PeerAddress(name=f"peer-{k}") for k in range(2))})
    lost = Change(ChangeKind.LOST, 1, 0, 10)
    again = Change(ChangeKind.JOIN, Numbering(2).number(1, 1), 0, 20)
    for peer in range(2):
        (tmp_path / f"peer-{peer}").mkdir()
        (tmp_path / f"peer-{peer}" / "peer.toml").write_text("")
    folder = StateFolder(tmp_path / "peer-0" / config.state.directory)
    for changes, expected in (((lost,), Lineup((0,), (), ())), ((lost, again), Lineup((0, 1), (), ()))):
        folder.checkpoints.save(Checkpoint(30, {"members": Membership((0, 1), changes).state()}, {}))
        assert line_up(tmp_path, config, None) == expected
    folder.close()
