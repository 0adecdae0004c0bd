"""A peer in as little memory as the documentation promises, held to it by a cgroup of the kernel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.config.options import load
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from tests.run.memory_of_peers import LARGE
from tests.run.test_memory import budget_of_scripts, measures, start, write_pair

PRIVATE_MIB = 192
"""docs/studies/start.md: what is enough for the private memory of a lone peer of 270,000 parameters. Pages of libraries
count only for the cgroup that read them first."""
TOO_LITTLE_MIB = 96
SCRIPT_MB = 96
"""What a peer takes in the process of a script, however small the model is."""
LATE_S = 1.5
"""The peer that is limited has to wait for the other, and begins its first round meanwhile."""
FIRST_ROUND = 6.0
"""Bytes a parameter that this round takes beside: docs/planning.md."""

ROOT = Path("/sys/fs/cgroup")
JOB = (
    "training.task=synthetic",
    "training.task_options.parameters=270000",
    "training.task_options.samples=256",
    "evaluation.every_rounds=0",
    "run.rounds=30",
)


def parent_group() -> Path | None:
    """Return the cgroup below which a new one can limit memory; None where there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return ROOT / "memory" / path.lstrip("/")
    enabled = ROOT / "cgroup.subtree_control"
    return ROOT if enabled.exists() and "memory" in enabled.read_text().split() else None


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of the test's own."""
    parent = parent_group()
    if parent is None or os.geteuid() != 0:
        pytest.skip("limits of memory need root and a memory cgroup")
    group = parent / f"sotto-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group
    group.rmdir()


def limit(group: Path, size: int) -> None:
    """Let the processes of a cgroup hold so many bytes, and none elsewhere."""
    file = next(file for name in ("memory.max", "memory.limit_in_bytes") if (file := group / name).exists())
    file.write_text(str(size))
    for name in ("memory.swap.max", "memory.swappiness"):
        if (group / name).exists():
            (group / name).write_text("0")


def run_lone_peer(folder: Path, group: Path, limit_mib: int) -> subprocess.CompletedProcess[str]:
    """Run a peer without neighbours to its last round, in a cgroup with a limit."""
    limit(group, limit_mib << 20)
    config = load(environment={}, overrides=JOB)
    (file,) = write_cluster(folder / "kits", config, [Host("127.0.0.1", port) for port in free_ports(1)])
    # The shell joins the cgroup, and what it then becomes is in it from its first page.
    command = 'echo $$ > "$1/cgroup.procs" && exec "$2" -m peer run --config "$3"'
    return subprocess.run(
        ["sh", "-c", command, "sh", str(group), sys.executable, str(file)], capture_output=True, text=True, check=False
    )


def test_a_lone_peer_trains_in_the_memory_that_is_documented(tmp_path: Path, group: Path) -> None:
    done = run_lone_peer(tmp_path, group, PRIVATE_MIB)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kits" / "peer-0" / "state" / "model.safetensors").exists()


def test_with_less_the_kernel_ends_it(tmp_path: Path, group: Path) -> None:
    """Without this, the limit above might not hold at all."""
    assert run_lone_peer(tmp_path, group, TOO_LITTLE_MIB).returncode == -signal.SIGKILL


@measures
def test_a_script_trains_in_its_budget(tmp_path: Path, group: Path) -> None:
    peers = [start([str(LARGE), file]) for file in write_pair(tmp_path, "quant-sgp", "unlimited")]
    (size, alone, _, pages), _ = [json.loads(peer.communicate()[0])[0] for peer in peers]
    for budget, code in ((budget_of_scripts()["quant-sgp"] + FIRST_ROUND, 0), (4.0, -signal.SIGKILL)):
        # The libraries take the rest, and their pages count only for the cgroup that read them first.
        limit(group, int(alone - pages + budget * size) + (SCRIPT_MB << 20 if code == 0 else 0))
        limited, other = [
            start([str(LARGE), file], late_s=index * LATE_S, group=None if index else group)
            for index, file in enumerate(write_pair(tmp_path, "quant-sgp", f"limited-{budget}"))
        ]
        problems = limited.communicate()[1]
        assert limited.returncode == code, problems
        if code:
            other.kill()
        other.communicate()
