"""Three devices and an operator, each in a network namespace of its own: one device leaves the run, one is cut off, one
finishes. Whatever the operator asks, the answer is true at that moment.

The operator has the kits, and nothing of what the devices write, until a state folder is copied back.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import load
from peer.links import network as links
from peer.links.profiles import find
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.peer_processes import peer_environment
from tests.links.namespaces import needs_links

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.timeout(900),
    needs_links,
]

OPERATOR = 3
ROUNDS = 500


class Site:
    """The devices, their network, and what the operator does."""

    def __init__(self, folder: Path, network: links.LinkNetwork) -> None:
        self.network, self.kits, self.devices = network, folder / "kits", folder / "devices"
        options = (
            f"run.rounds={ROUNDS}",
            "peer.min_step_s=0.05",
            "evaluation.every_rounds=20",
            "evaluation.share_every=1",
            "training.batch_size=4",
            "transport.give_up_after_s=600",
            "transport.backoff_max_s=0.5",
            # A device that is cut off closes nothing: the others notice after three heartbeats.
            "transport.heartbeat_s=3",
        )
        hosts = [Host(network.address(device), 7700) for device in range(3)]
        write_cluster(self.kits, load(environment={}, overrides=options), hosts)
        commands = [*network.command(OPERATOR), sys.executable, "-m", "tests.shaped.commands"]
        self.operator = subprocess.Popen(commands, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        watching = [*network.command(OPERATOR), sys.executable, "-m", "tests.shaped.watching", str(self.kits)]
        self.watcher = subprocess.Popen(watching, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes: list[subprocess.Popen[bytes]] = []
        for device in range(3):
            shutil.copytree(self.kits / f"peer-{device}", self.devices / f"peer-{device}")
            with open(self.devices / f"peer-{device}" / "log.txt", "wb") as log:
                file = str(self.devices / f"peer-{device}" / "peer.toml")
                command = [*network.command(device), sys.executable, "-m", "peer", "run", "--config", file]
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=peer_environment()))

    def sotto(self, *arguments: str) -> tuple[int, str]:
        """Return exit code and output of a command on the operator's machine."""
        assert self.operator.stdin is not None
        assert self.operator.stdout is not None
        self.operator.stdin.write(json.dumps(arguments) + "\n")
        self.operator.stdin.flush()
        answer = json.loads(self.operator.stdout.readline())
        assert answer["exit_code"] in (0, 5, 6), answer
        return answer["exit_code"], answer["stdout"] or answer["stderr"]

    def status(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the exit code of `sotto status`, and what it says of each peer."""
        code, output = self.sotto("status", "--run", str(self.kits), "--json")
        return code, json.loads(output)

    def watched(self) -> dict[str, Any]:
        """Return what the page of `sotto watch` shows: "peers" (states), "edges" (states by their ends), "round"."""
        assert self.watcher.stdin is not None
        assert self.watcher.stdout is not None
        self.watcher.stdin.write("\n")
        self.watcher.stdin.flush()
        answer: dict[str, Any] = json.loads(self.watcher.stdout.readline())
        return answer

    def states(self) -> list[str]:
        """Return the state of each peer, as `sotto status` has it."""
        return [answer["state"] for answer in self.status()[1]]

    def until(self, condition: Callable[[], bool], within_s: float = 240) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, [self.log(device) for device in range(3)]
            time.sleep(0.2)

    def log(self, device: int) -> str:
        return (self.devices / f"peer-{device}" / "log.txt").read_text()[-1500:]

    def cut_off(self, device: int) -> None:
        subprocess.run(["ip", "-n", self.network.namespace(device), "link", "set", links.INTERFACE, "down"], check=True)

    def copy_back(self, device: int) -> None:
        shutil.copytree(self.devices / f"peer-{device}" / "state", self.kits / f"peer-{device}" / "state")

    def close(self) -> None:
        for process in (self.operator, self.watcher, *self.processes):
            process.kill()
            process.wait()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with links.LinkNetwork([find("unshaped")] * 4) as network:
        opened = Site(tmp_path, network)
        try:
            yield opened
        finally:
            opened.close()


def test_an_operator_is_told_who_left_who_is_cut_off_and_who_finished(site: Site) -> None:
    kits, model = str(site.kits), str(site.kits / "model.safetensors")
    site.until(lambda: min(answer.get("round") or 0 for answer in site.status()[1]) > 20)
    site.until(lambda: site.watched()["peers"] == ["running"] * 3)
    site.until(lambda: site.watched()["edges"] == {"0-1": "up", "0-2": "up", "1-2": "up"})

    # One leaves: the others know, and it is no error that it does not answer.
    code, _ = site.sotto("admin", "leave", "--config", f"{kits}/peer-1/peer.toml")
    assert code == 0
    site.until(lambda: site.processes[1].poll() is not None)
    site.until(lambda: site.states() == ["running", "left", "running"])
    code, answers = site.status()
    assert code == 0
    assert answers[1]["told_by"] in ("peer-0", "peer-2")
    site.until(lambda: site.watched()["peers"] == ["running", "left", "running"])
    site.until(lambda: "down" not in site.watched()["edges"].values())
    code, output = site.sotto("report", kits)
    assert code == 0, output
    assert "peer-1 has left the run, says peer-" in " ".join(output.split())
    summary = json.loads((site.kits / "summary.json").read_text())
    assert summary["ended"] == "2 of 3 peers are running"
    assert summary["peer_states"] == {"peer-0": "running", "peer-1": "left", "peer-2": "running"}
    assert summary["members"] == [0, 2]

    # One is cut off: nobody says that it has left, so it is unreachable once its link is silent for the others, too,
    # and its figures up to now are here.
    site.cut_off(2)
    site.until(lambda: site.states()[2] != "connected")
    code, answers = site.status()
    assert (code, [answer["state"] for answer in answers]) == (6, ["running", "left", "unreachable"])
    site.until(lambda: site.watched()["peers"] == ["running", "left", "unreachable"])
    site.until(lambda: site.watched()["edges"]["0-2"] == "down")
    code, output = site.sotto("report", kits)
    words = " ".join(output.split())
    assert code == 0
    assert "1 of 3 peers are running; 1 of 3 peers cannot be reached" in words
    assert "peer-2 cannot be reached" in words
    recorded = json.loads(site.sotto("lab", "metrics", kits, "-o", f"{kits}/rounds.csv", "--json")[1])["rows"]
    assert recorded > 3 * 20
    assert "peer-2 cannot be reached" in (site.kits / "report.html").read_text()
    code, output = site.sotto("export", kits, "-o", model)
    assert code == 5
    assert "no checkpoint" in output

    # It is excluded as lost, and the last one finishes alone.
    site.until(lambda: "waiting_for" in site.status()[1][0] and site.status()[1][0]["waiting_for"] == ["peer-2"])
    assert site.sotto("remove", "peer-2", "--config", f"{kits}/peer-0/peer.toml")[0] == 0
    site.until(lambda: site.states()[2] == "lost")
    assert site.status()[0] == 0, site.status()
    site.until(lambda: site.watched()["peers"] == ["running", "left", "lost"])
    assert site.sotto("report", kits)[0] == 0
    site.until(lambda: site.processes[0].poll() is not None, within_s=400)
    assert site.processes[0].poll() == 0, site.log(0)

    # Nobody is left to ask. What was final is remembered; that the last one finished, its state folder says.
    assert site.status()[0] == 6
    site.copy_back(0)
    site.until(lambda: site.watched()["peers"] == ["finished", "left", "lost"])
    assert site.watched()["round"] == ROUNDS
    code, output = site.sotto("report", kits, "--offline")
    summary = json.loads((site.kits / "summary.json").read_text())
    assert summary["peer_states"] == {"peer-0": "finished", "peer-1": "left", "peer-2": "lost"}
    assert summary["ended"] == "completed"
    assert summary["completed_rounds"] == ROUNDS
    code, output = site.sotto("stop", "--config", f"{kits}/peer-0/peer.toml")
    assert (code, output) == (0, f"peer-0 has finished after {ROUNDS} rounds, says its state folder\n")
    code, output = site.sotto("export", kits, "-o", model)
    assert code == 0
    assert output.splitlines()[0] == (
        f"wrote {model}: the model of peer 0 after {ROUNDS} rounds,"
        " without peer-1, which had left, peer-2, which was lost"
    )
