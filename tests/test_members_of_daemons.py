"""Real peers as processes: one joins the run, one leaves it, one is lost, and the others end it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peer import control
from peer.config import load
from peer.errors import RemoteError
from peer.init import place_peers, write_cluster

OPTIONS = (
    "run.rounds=400",
    "algorithm.name=quant-sgp",
    "graph.kind=exponential",
    "training.precision=float32",
    "training.batch_size=4",
    "evaluation.every_rounds=0",
    "transport.backoff_max_s=0.3",
    "transport.linger_s=5",
    "peer.min_step_s=0.03",
)


class Devices:
    """One process for each kit."""

    def __init__(self, kits: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = min(probe.getsockname()[1], 65000)
        config = load(environment={}, overrides=OPTIONS)
        self.files = write_cluster(kits, config, place_peers(4, (), port), join_later=1)
        self.configs = [load(file, environment={}) for file in self.files]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, peer: int) -> None:
        with open(self.files[peer].parent / "log", "ab") as output:
            self.processes[peer] = subprocess.Popen(
                [sys.executable, "-m", "peer", "run", "--config", str(self.files[peer])], stdout=output, stderr=output
            )

    def ask(self, peer: int, verb: str, **arguments: Any) -> dict[str, Any]:
        return control.call(self.configs[peer], self.files[peer].parent, None, verb, arguments)

    def wait_for(self, peer: int, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the status of a peer says something."""
        status: dict[str, Any] = {}
        deadline = time.monotonic() + 240.0
        while time.monotonic() < deadline:
            try:
                status = self.ask(peer, "status")
                if condition(status):
                    return
            except RemoteError:
                assert self.processes[peer].poll() is None, self.log(peer)
            time.sleep(0.1)
        raise AssertionError((status, self.log(peer)))

    def log(self, peer: int) -> str:
        return (self.files[peer].parent / "log").read_text()[-3000:]


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[Devices]:
    devices = Devices(tmp_path / "kits")
    yield devices
    for process in devices.processes.values():
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_device_joins_one_leaves_and_one_is_lost(devices: Devices) -> None:
    for peer in range(4):
        devices.start(peer)
    devices.wait_for(3, lambda status: "peer-3" in status["members"] and not status["coming_changes"])
    answer = devices.ask(1, "leave")
    assert answer["from"] > answer["round"]
    assert devices.processes[1].wait(timeout=240) == 0, devices.log(1)
    assert (devices.files[1].parent / "state" / "model.safetensors").exists()
    devices.wait_for(0, lambda status: status["members"] == ["peer-0", "peer-2", "peer-3"])
    devices.processes[2].kill()
    devices.wait_for(0, lambda status: "peer-2" in status["waiting_for"])
    answer = devices.ask(0, "remove", name="peer-2")
    assert answer["name"] == "peer-2"
    devices.wait_for(0, lambda status: status["round"] > answer["from"] + 5)
    # What is left in the journal leads to the same place.
    devices.processes[3].kill()
    devices.processes[3].wait()
    devices.start(3)
    for peer in (0, 3):
        assert devices.processes[peer].wait(timeout=240) == 0, devices.log(peer)
