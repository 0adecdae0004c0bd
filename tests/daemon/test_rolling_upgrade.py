"""Peers of a live cluster are replaced by those of the release before, and back: real processes, TLS, state folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from peer.ops.local_cluster import free_ports
from peer.state.checkpoints import find_checkpoints, load_checkpoint
from peer.state.metrics import MetricsStore
from tools.releases import PREDECESSOR, Device, Devices, Release, this_release, unpacked

ROUNDS = 80
COMMON = (
    f"run.rounds={ROUNDS}",
    "training.task_options.hidden=8",
    "training.batch_size=4",
    "training.precision=float32",
    "training.warmup_rounds=5",
    "evaluation.every_rounds=10",
    "state.checkpoint_every_rounds=7",
    "transport.backoff_max_s=0.3",
    "transport.linger_s=60",
    "peer.min_step_s=0.05",
)
WITH_ROUNDS = {
    "quant-sgp": ("compressor.kind=top_k", "compressor.fraction=0.05"),
    "low-rank": ("graph.kind=complete", "algorithm.rank=2"),
}


@pytest.fixture(scope="module")
def predecessor(tmp_path_factory: pytest.TempPathFactory) -> Release:
    release = unpacked(PREDECESSOR, tmp_path_factory.mktemp("predecessor"))
    assert release.sotto("version").strip() == f"sotto {release.version}"
    return release


def cluster(folder: Path, predecessor: Release, algorithm: str, *settings: str, rounds: int = ROUNDS) -> Devices:
    """Return four devices whose kits the predecessor wrote."""
    options = [*COMMON, f"algorithm.name={algorithm}", *settings, f"run.rounds={rounds}"]
    hosts = [f"127.0.0.1:{port}" for port in free_ports(4)]
    predecessor.sotto(
        *("init", "cluster", str(folder)),
        *(part for host in hosts for part in ("--host", host)),
        *(part for option in options for part in ("--set", option)),
    )
    return Devices(folder)


def models(devices: Devices) -> list[bytes]:
    """Return the bits of x and u of every peer at the end."""
    found = []
    for device in devices.all:
        checkpoint = load_checkpoint(find_checkpoints(device.kit / "state")[-1])
        assert checkpoint.round == ROUNDS
        u = checkpoint.arrays.get("algorithm/u")
        found.append(checkpoint.arrays["algorithm/x"].tobytes() + (b"" if u is None else u.tobytes()))
    return found


def undisturbed(folder: Path, predecessor: Release, algorithm: str, *settings: str) -> list[bytes]:
    """Return the models of a run of the predecessor alone."""
    with cluster(folder, predecessor, algorithm, *settings) as devices:
        devices.start(predecessor)
        assert devices.finish() == [0] * 4
        return models(devices)


def replace_all(devices: Devices, release: Release, end: Callable[[Device], int]) -> None:
    """Replace the peers one by one; between two of them, every peer completes further rounds."""
    for device in devices.all:
        reached = devices.furthest()
        end(device)
        device.start(release)
        devices.until_beyond(reached + 1)


def check_no_offence(devices: Devices) -> None:
    for device in devices.all:
        assert "broke the protocol" not in device.log, device.name
        assert "Traceback" not in device.log, device.name


@pytest.mark.slow
@pytest.mark.parametrize("end", [Device.stop, Device.kill], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("algorithm", sorted(WITH_ROUNDS))
def test_peers_are_upgraded_one_by_one_and_back_without_a_lost_round(
    algorithm: str, end: Callable[[Device], int], predecessor: Release, tmp_path: Path
) -> None:
    settings = WITH_ROUNDS[algorithm]
    with cluster(tmp_path / "kits", predecessor, algorithm, *settings) as devices:
        devices.start(predecessor)
        devices.until_beyond(2)
        replace_all(devices, this_release(), end)
        replace_all(devices, predecessor, end)
        assert devices.finish() == [0] * 4
    check_no_offence(devices)
    for device in devices.all:
        rows = MetricsStore(device.kit / "state" / "metrics.sqlite", read_only=True).rounds()
        assert [row.round for row in rows] == list(range(ROUNDS)), device.name
    assert models(devices) == undisturbed(tmp_path / "undisturbed", predecessor, algorithm, *settings)
