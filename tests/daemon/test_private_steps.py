"""Peers whose local steps are private: real ones and simulated ones compute the same bits, also through kill -9."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from peer.config.options import load
from peer.ops.local_cluster import Cluster, up
from peer.ops.peer_processes import ForkServer
from peer.run import setup as run_setup
from peer.simulate.run import run
from peer.state.checkpoints import find_checkpoints, load_checkpoint
from peer.train.private_step import SECRET_FILE
from tests.ops.running_peers import peers_below

pytestmark = pytest.mark.usefixtures("warm_python")

pytest.importorskip("dp_accounting")

JOB = (
    "run.rounds=60",
    "algorithm.name=quant-sgp",
    "algorithm.drift_correction=auto",
    "compressor.fraction=0.1",
    "training.precision=float32",
    "training.warmup_rounds=5",
    "training.momentum=heavy-ball",
    "privacy.noise_multiplier=1.5",
    "evaluation.every_rounds=20",
)


def secrets_below(folder: Path) -> list[bytes]:
    files = sorted(folder.glob(f"peers/*/state/{SECRET_FILE}"))
    return [bytes.fromhex(json.loads(file.read_text())["secret"]) for file in files]


def models_below(folder: Path) -> list[bytes]:
    arrays = [load_checkpoint(find_checkpoints(state)[-1]).arrays for state in sorted(folder.glob("peers/*/state"))]
    return [(each["algorithm/x"] / np.float32(each["algorithm/u"][0])).tobytes() for each in arrays]


def simulated(monkeypatch: pytest.MonkeyPatch, base: Path, known: Sequence[bytes], *changes: str) -> list[bytes]:
    """Return the models of simulated peers that have these secrets."""
    monkeypatch.setattr(run_setup, "simulated_secret", lambda seed, peer: known[peer])
    config = load(environment={}, overrides=[*JOB, *changes])
    return [z.tobytes() for z in run(config, base, num_peers=len(known), baseline=False).models]


def test_real_and_simulated_peers_with_the_same_secrets_agree_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    config = load(environment={}, overrides=JOB)
    cluster = Cluster(config, tmp_path, num_peers=3, directory=tmp_path, fork_server=fork_server)
    summary = up(cluster, baseline=False)
    known = secrets_below(tmp_path)
    assert len(set(known)) == 3
    assert models_below(tmp_path) == simulated(monkeypatch, tmp_path, known)
    assert summary.epsilon is not None
    assert summary.epsilon > 0
    everything = b"".join(
        path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != SECRET_FILE
    )
    for secret in known:
        assert secret not in everything
        assert secret.hex().encode() not in everything
    databases = list(tmp_path.glob("peers/*/state/metrics.sqlite"))
    assert len(databases) == 3
    for database in databases:
        with sqlite3.connect(database) as connection:
            assert connection.execute("SELECT COUNT(*) FROM rounds WHERE loss IS NOT NULL").fetchone() == (0,)


def sotto_up(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "peer", "up", "--no-live", "--no-baseline", "--runs-dir", str(folder)]
    return subprocess.Popen([*command, *arguments], cwd=folder)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_peers_that_are_killed_go_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ("peer.slow_down=8", "state.checkpoint_every_rounds=5")
    settings = [part for setting in (*JOB, *changes) for part in ("--set", setting)]
    folder = tmp_path / "first"
    with sotto_up(tmp_path, "--peers", "2", "--name", "first", *settings) as process:
        wait_until(lambda: len({path.parent for path in folder.glob("peers/*/state/checkpoint-*")}) == 2)
        killed = peers_below(tmp_path)
        assert len(killed) == 2
        for peer in killed:
            os.kill(peer, signal.SIGKILL)
    assert process.returncode != 0
    known = secrets_below(folder)
    with sotto_up(tmp_path, "--resume", "first") as process:
        pass
    assert process.returncode == 0
    assert secrets_below(folder) == known
    assert models_below(folder) == simulated(monkeypatch, tmp_path, known)
