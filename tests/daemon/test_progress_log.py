"""What the log and `systemctl status` say of the progress of a peer."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import load
from peer.daemon.device.progress_log import ProgressLog
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports


class Peer:
    """A status that can be changed."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {
            "state": "running", "round": 0, "rounds": 1000, "loss": None, "accuracy": None,
            "neighbors": 2, "neighbors_up": 0, "waiting_for": [],
        }  # fmt: skip
        self.is_member = True
        self.progress = ProgressLog(lambda: self.status, lambda: self.is_member)

    def at(self, now: float, **status: Any) -> str:
        self.status |= status
        return self.progress.sentence(now)


def test_before_the_first_round_nothing_is_foretold() -> None:
    assert Peer().at(0.0) == "round 0 of 1000, 0 of 2 neighbours connected"


def test_the_sentence_has_loss_accuracy_speed_and_time_left() -> None:
    peer = Peer()
    peer.at(0.0)
    assert peer.at(10.0, round=20, loss=0.12345, accuracy=0.941, neighbors_up=2) == (
        "round 20 of 1000, loss 0.123, accuracy 94.1 %, 2 of 2 neighbours connected,"
        " 500 ms a round, about 8 min 10 s left"
    )


def test_the_speed_is_that_of_the_last_minutes() -> None:
    peer = Peer()
    for second in range(0, 1000, 2):
        peer.at(float(second), round=second // 2)
    # It took 2 s a round, and takes 0.1 s now: after five minutes nothing is left of the slow ones.
    for second in range(1000, 1400, 2):
        sentence = peer.at(float(second), round=500 + 10 * (second - 1000), rounds=100_000)
    assert "100 ms a round" in sentence


def test_who_is_waited_for_is_named_after_a_while() -> None:
    peer = Peer()
    peer.at(0.0)
    peer.at(2.0, round=4)
    assert "waiting" not in peer.at(4.0, waiting_for=["garage"])
    sentence = peer.at(94.0)
    assert sentence.endswith("waiting for garage, 1 min 30 s so far")
    assert "left" not in sentence
    assert peer.at(94.0, waiting_for=list("abcde")).endswith("waiting for a, b, c and 2 more, 1 min 30 s so far")
    assert "waiting" not in peer.at(96.0, round=5)


def test_the_own_steps_are_no_waiting_for_others() -> None:
    peer = Peer()
    peer.at(0.0)
    peer.at(2.0, round=1)
    assert "waiting" not in peer.at(30.0)
    assert "waiting" not in peer.at(32.0, waiting_for=["garage"])
    assert peer.at(38.0).endswith("waiting for garage, 6.0 s so far")


def test_the_wait_before_the_first_round_says_nothing_of_the_time_left() -> None:
    peer = Peer()
    for second in range(0, 602, 2):
        peer.at(float(second), waiting_for=["garage"])
    assert "left" not in peer.at(602.0, round=1, waiting_for=[])
    assert peer.at(612.0, round=2).endswith("10 s a round, about 2 h 46 min left")


def test_the_round_under_way_counts_once_it_takes_longer_than_the_others() -> None:
    peer = Peer()
    peer.at(0.0)
    peer.at(10.0, round=1)
    assert "10 s a round" in peer.at(19.0)
    assert "20 s a round" in peer.at(40.0)


def test_a_peer_of_pairs_waits_for_nobody() -> None:
    peer = Peer()
    del peer.status["waiting_for"]
    peer.at(0.0)
    assert "1.0 s a round" in peer.at(7.0, round=7)


def test_what_it_does_comes_first_unless_it_trains() -> None:
    peer = Peer()
    assert peer.at(0.0, state="stopping").startswith("stopping, round 0 of 1000")
    assert "left" not in peer.at(9.0, state="completed", round=1000)


def test_a_peer_that_was_put_back_begins_to_measure_anew() -> None:
    peer = Peer()
    peer.at(0.0, round=100)
    peer.at(10.0, round=200)
    assert "a round" not in peer.at(20.0, round=50)
    assert "2.0 s a round" in peer.at(30.0, round=55)


def test_rounds_that_a_newcomer_is_given_say_nothing_of_its_speed() -> None:
    peer = Peer()
    peer.is_member = False
    peer.at(0.0)
    assert "left" not in peer.at(2.0, round=500)
    peer.is_member = True
    assert "left" not in peer.at(4.0, round=500)
    assert "2.0 s a round, about 16 min 38 s left" in peer.at(6.0, round=501)


def test_the_log_gets_a_line_at_least_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer()
    lines = [0]
    with caplog.at_level(logging.INFO, logger="sotto"):
        for second in range(0, 7200, 2):
            peer.status["round"] = second
            peer.progress.look(float(second))
            if len(caplog.records) >= len(lines):
                lines.append(second)
    assert {later - earlier for earlier, later in itertools.pairwise(lines)} == {8}
    assert caplog.records[0].getMessage().startswith("round 8 of 1000")


def test_the_service_manager_is_told_at_every_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        peer = Peer()
        for now in (0.0, 2.0):
            peer.progress.look(now)
            assert manager.recv(4096).decode() == "STATUS=round 0 of 1000, 0 of 2 neighbours connected"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_a_daemon_tells_of_its_start_its_progress_and_its_end(tmp_path: Path) -> None:
    config = load(environment={}, overrides=["run.rounds=80", "peer.min_step_s=0.05", "evaluation.every_rounds=20"])
    (file,) = write_cluster(tmp_path / "kits", config, [Host("127.0.0.1", free_ports(1)[0])])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        command = [sys.executable, "-m", "peer", "run", "--config", str(file)]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            told = []
            while not told or not told[-1].startswith("STOPPING"):
                told.append(manager.recv(4096).decode())
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert told[0] == "READY=1"
    assert told[1].startswith("STATUS=round ")
    assert any("a round, about " in each for each in told), told
    assert told[-1] == "STOPPING=1\nSTATUS=completed, round 80 of 80"
