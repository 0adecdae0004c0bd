"""Peers of a live cluster are replaced by those of the release before, and back: real processes, TLS, state folders."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from peer import __version__
from peer.config.options import load
from peer.daemon.process import open_peer
from peer.ops.local_cluster import free_ports
from peer.protocol import NEWEST, OLDEST
from peer.state.checkpoints import find_checkpoints, load_checkpoint
from peer.state.metrics import MetricsStore
from tools.releases import PREDECESSOR, Device, Devices, Release, this_release, unpacked

ROUNDS = 160
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
# Once all members run this release, what members were told alike is in their states, and the predecessor refuses them.
USES_WHAT_IS_NEW = "low-rank"


@pytest.fixture(scope="module")
def predecessor(tmp_path_factory: pytest.TempPathFactory, warm_python: None) -> Iterator[Release]:
    release = unpacked(PREDECESSOR, tmp_path_factory.mktemp("predecessor"))
    assert release.sotto("version").strip() == f"sotto {release.version}"
    with closing(release.fork_server()) as server:
        yield replace(release, server=server)


@pytest.fixture(scope="module")
def ours(warm_python: None) -> Iterator[Release]:
    release = this_release()
    with closing(release.fork_server()) as server:
        yield replace(release, server=server)


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


@pytest.fixture(scope="module")
def undisturbed(predecessor: Release, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[bytes]]:
    """Return the models of a run of the predecessor alone with an algorithm; it is run once."""

    @cache
    def run(algorithm: str) -> list[bytes]:
        folder = tmp_path_factory.mktemp("undisturbed") / "kits"
        with cluster(folder, predecessor, algorithm, *WITH_ROUNDS[algorithm]) as devices:
            devices.start(predecessor)
            assert devices.finish() == [0] * 4
            return models(devices)

    return run


def replace_by(devices: Devices, release: Release, count: int = 4) -> None:
    """Replace the first peers one by one, of which every other one is killed; between two of them, every peer completes
    further rounds."""
    for number, device in enumerate(devices.all[:count]):
        reached = devices.furthest()
        end = Device.kill if number % 2 else Device.stop
        end(device)
        device.start(release)
        devices.until_beyond(reached + 1)


def releases(device: Device) -> dict[str, str | None]:
    """Return which release each member runs, as a peer says."""
    status = device.status()
    return {} if status is None else status["releases"]


def check_no_offence(devices: Devices) -> None:
    for device in devices.all:
        assert "broke the protocol" not in device.log, device.name
        assert "Traceback" not in device.log, device.name


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(WITH_ROUNDS))
def test_peers_are_upgraded_one_by_one_and_back_without_a_lost_round(
    algorithm: str,
    predecessor: Release,
    ours: Release,
    undisturbed: Callable[[str], list[bytes]],
    tmp_path: Path,
) -> None:
    settings = WITH_ROUNDS[algorithm]
    with cluster(tmp_path / "kits", predecessor, algorithm, *settings) as devices:
        devices.start(predecessor)
        devices.until_beyond(2)
        if algorithm == USES_WHAT_IS_NEW:
            replace_by(devices, ours, 3)
            replace_by(devices, predecessor, 3)
            replace_by(devices, ours)
        else:
            replace_by(devices, ours)
            replace_by(devices, predecessor)
        assert devices.finish() == [0] * 4
    check_no_offence(devices)
    for device in devices.all:
        rows = MetricsStore(device.kit / "state" / "metrics.sqlite", read_only=True).rounds()
        assert [row.round for row in rows] == list(range(ROUNDS)), device.name
    assert models(devices) == undisturbed(algorithm)


@pytest.mark.slow
def test_peers_without_rounds_are_upgraded_and_go_back(predecessor: Release, ours: Release, tmp_path: Path) -> None:
    """Which pairs meet is a matter of time, so no two runs have equal bits. No step is lost, no frame refused."""
    # The others train on while one is replaced.
    settings = ("graph.kind=complete", "state.ledger=true", "peer.min_step_s=0.3")
    with cluster(tmp_path / "kits", predecessor, "ad-psgd", *settings, rounds=100_000) as devices:
        devices.start(predecessor)
        devices.until_beyond(2)
        replace_by(devices, ours)
        replace_by(devices, predecessor)
        assert [device.stop() for device in devices.all] == [0] * 4
    check_no_offence(devices)
    for device in devices.all:
        rows = MetricsStore(device.kit / "state" / "metrics.sqlite", read_only=True).rounds()
        assert [row.round for row in rows] == list(range(len(rows))), device.name


@pytest.mark.slow
def test_what_members_run_is_known_and_decides_what_may_be_used(
    predecessor: Release, ours: Release, tmp_path: Path
) -> None:
    """In a directed ring, peer 0 is no neighbour of peer 2."""
    settings = ("graph.kind=directed-ring", "compressor.kind=top_k")
    with cluster(tmp_path / "kits", predecessor, "quant-sgp", *settings, rounds=100_000) as devices:
        names = [device.name for device in devices.all]
        first, *others = devices.all
        for device in devices.all:
            device.start(predecessor if device is others[1] else ours)
        devices.until_beyond(1)
        devices.until(lambda: releases(first)[names[3]] is not None, "peer 0 hears of its neighbours")
        devices.until(lambda: releases(first)[names[2]] is not None, "peer 0 hears of peer 2 by its note")
        assert releases(first) == dict(
            zip(names, (__version__, __version__, predecessor.version, __version__), strict=True)
        )
        assert (first.status() or {})["protocol"] == {"needed": OLDEST, "usable": NEWEST - 1}
        others[1].stop()
        others[1].start(ours)
        devices.until(lambda: set(releases(first).values()) == {__version__}, "peer 0 hears of peer 2")
        assert (first.status() or {})["protocol"] == {"needed": OLDEST, "usable": NEWEST}
        others[1].kill()
        others[1].start(predecessor)
        devices.until(
            lambda: (others[0].status() or {"protocol": {}})["protocol"].get("usable") == NEWEST - 1,
            "peer 2 went back",
        )
        for device in devices.all:
            device.kill()
    check_no_offence(devices)


@pytest.mark.slow
def test_once_something_new_is_used_the_predecessor_is_refused_and_harms_nothing(
    predecessor: Release, ours: Release, undisturbed: Callable[[str], list[bytes]], tmp_path: Path
) -> None:
    settings = WITH_ROUNDS["quant-sgp"]
    with cluster(tmp_path / "kits", predecessor, "quant-sgp", *settings) as devices:
        devices.start(ours)
        devices.until_beyond(9)
        for device in devices.all:
            device.stop()
        pinned, other, *rest = devices.all
        for with_checkpoint in (False, True):
            pin(pinned, with_checkpoint=with_checkpoint)
            before = state_of(pinned)
            pinned.start(predecessor)
            assert pinned.wait() == 5
            assert "uses what came with a later release" in pinned.log.splitlines()[-1]
            assert state_of(pinned) == before
        other.start(predecessor)
        for device in (pinned, *rest):
            device.start(ours)
        assert other.wait() == 6
        assert "speaks version 5 of the protocol" in other.log.splitlines()[-1]
        other.start(ours)
        assert devices.finish() == [0] * 4
    check_no_offence(devices)
    assert models(devices) == undisturbed("quant-sgp")


def pin(device: Device, *, with_checkpoint: bool) -> None:
    """Have a state need this release, as when its peer heard of what came with it."""
    daemon = open_peer(load(device.file, environment={}), device.kit)
    try:
        durable = daemon.loop.durable  # type: ignore[attr-defined]
        durable.disk_state.pin(NEWEST)
        assert durable.disk_state.protocol == NEWEST
        if with_checkpoint:
            durable.save({"seconds": 0.0}, anew=True)
    finally:
        daemon.close()


def state_of(device: Device) -> dict[str, str]:
    """Return the digests of the files that a peer goes back to."""
    files = (*device.kit.glob("state/checkpoint-*"), *device.kit.glob("state/journal-*"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


DIGEST = """
import sys
from pathlib import Path
from peer.config import load
print(load(Path(sys.argv[1]) if sys.argv[1] else None, overrides=sys.argv[2:], environment={}).run_digest())
"""


def digest_by(release: Release, file: str, *settings: str) -> str:
    """Return the run digest of a file, or of the defaults, with these settings, as a release computes it."""
    command = [*release.interpreter(), "-c", DIGEST, file, *settings]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("algorithm.name=low-rank", "algorithm.rank=3", "training.class_balance=0.5"),
        ("algorithm.name=choco-sgd", "graph.kind=ring", "algorithm.mixing=clipped", "rounds.lost_after_s=60"),
        ("training.task=loop", "compressor.coding=packed", "data.partition=own", "data.weight_by_samples=true"),
        ("rounds.late=skip", "compressor.budget_kbytes_per_s=3", "evaluation.every_rounds=7", "limits.day_mbytes=5"),
    ],
    ids=str,
)
def test_the_run_digest_is_that_of_the_predecessor(settings: tuple[str, ...], predecessor: Release) -> None:
    """An option that the predecessor does not have counts only where it is set."""
    assert load(None, overrides=settings, environment={}).run_digest() == digest_by(predecessor, "", *settings)


def test_a_kit_of_the_predecessor_means_the_same(predecessor: Release, tmp_path: Path) -> None:
    """The other way round nothing is promised: a kit lists every option, and the predecessor refuses what it lacks."""
    file = cluster(tmp_path / "kits", predecessor, "quant-sgp").all[0].file
    assert load(file, environment={}).run_digest() == digest_by(predecessor, str(file))
