"""What a peer's exit code says: only what a signal has stopped is to be started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peer.config.options import load
from peer.errors import INTERRUPTED, SottoError
from peer.ops import control
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports

pytestmark = pytest.mark.usefixtures("warm_python")

DEPLOY = Path(__file__).parents[2] / "deploy"


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


class Alone:
    """A run of one peer, and its process."""

    def __init__(self, folder: Path) -> None:
        config = load(environment={}, overrides=["run.rounds=400", "evaluation.every_rounds=0", "peer.min_step_s=0.02"])
        (self.file,) = write_cluster(folder, config, [Host("127.0.0.1", free_ports(1)[0])])
        self.process: subprocess.Popen[str] | None = None

    def start(self, *settings: str) -> subprocess.Popen[str]:
        words = [word for each in settings for word in ("--set", each)]
        command = [sys.executable, "-m", "peer", "run", "--config", str(self.file), *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        return self.process

    def ask(self, what: str) -> dict[str, object] | None:
        try:
            return control.call(load(self.file, environment={}), self.file.parent, None, what)
        except SottoError:
            return None

    def trains(self) -> bool:
        return (self.ask("status") or {"round": 0})["round"] != 0


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    alone = Alone(tmp_path / "kits")
    yield alone
    if alone.process is not None:
        alone.process.kill()
        alone.process.communicate()


@pytest.mark.slow
def test_a_signal_a_stop_and_the_last_round_can_be_told_apart(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        process = alone.start()
        wait_until(alone.trains)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == INTERRUPTED, said
        assert "the same command resumes it" in said
    monkeypatch.setenv("SOTTO_PARENT", str(os.getpid()))
    process = alone.start()
    wait_until(lambda: alone.ask("stop") is not None)
    said = process.communicate(timeout=60)[1]
    assert "stopped after round" in said
    assert "the same command" not in said, "it was started by another one"
    monkeypatch.delenv("SOTTO_PARENT")
    process = alone.start()
    wait_until(lambda: alone.ask("stop") is not None)
    assert "the same command resumes it" in process.communicate(timeout=60)[1]
    assert process.returncode == 0
    for _ in range(2):  # What is done ends as before when it is started again, as after a reboot.
        process = alone.start("peer.min_step_s=0")
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_interrupts_a_peer_that_waits(alone: Alone, number: signal.Signals) -> None:
    """No event loop runs then; and in a container, whose first process it is, a signal without a handler is lost."""
    process = alone.start("peer.listen=192.0.2.1:7750")
    assert process.stderr is not None
    while "waits until that has passed" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    assert process.wait(20) == INTERRUPTED


def test_units_and_containers_agree_with_the_exit_codes() -> None:
    unit = dict(
        line.split("=", 1) for line in (DEPLOY / "sotto@.service").read_text().splitlines() if line[:1].isalpha()
    )
    assert unit["SuccessExitStatus"] == str(INTERRUPTED), "systemctl stop would leave a failed unit"
    assert unit["Restart"] == "on-failure"
    compose = (DEPLOY.parent / "docker-compose.yml").read_text()
    assert "  restart: on-failure\n" in compose.partition("x-peer:")[2].partition("services:")[0]
