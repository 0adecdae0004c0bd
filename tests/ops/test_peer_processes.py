"""Processes that are forked for peers: each is what it would be if it had been started anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from peer.errors import SottoError
from peer.ops.peer_processes import ForkServer, PeerProcess, start_process

LONG = ("simulate", "--no-save", "--no-live", "--set", "run.rounds=1000000")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with closing(ForkServer()) as running:
        yield running


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_working(log: Path) -> bool:
    return log.exists() and "simulating" in log.read_text()


@pytest.mark.parametrize("arguments", [["version"], ["version", "--nonsense"], ["export", "no-such-folder"]])
def test_it_prints_and_ends_as_a_process_of_its_own_does(
    server: ForkServer, tmp_path: Path, arguments: list[str]
) -> None:
    forked = server.start(arguments, tmp_path / "forked.txt")
    anew = start_process([sys.executable, "-m", "peer", *arguments], tmp_path / "anew.txt")
    assert forked.wait(120) == anew.wait(120) == forked.poll() == forked.returncode
    assert (tmp_path / "forked.txt").read_text() == (tmp_path / "anew.txt").read_text() != ""
    assert (tmp_path / "forked.txt").stat().st_mode & 0o077 == 0


def test_it_has_a_session_a_name_and_a_parent_to_watch(server: ForkServer, tmp_path: Path) -> None:
    process = server.start(LONG, tmp_path / "log.txt")
    try:
        folder = Path(f"/proc/{process.pid}")
        wait_until(lambda: (folder / "cmdline").read_bytes().startswith(b"sotto\0simulate\0"))
        assert (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0") == [b"sotto", *map(str.encode, LONG)]
        assert (folder / "comm").read_text() == "sotto\n"
        assert os.getsid(process.pid) == process.pid
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        assert int(status["PPid"]) == server.pid
        ignored = {number for number in signal.Signals if int(status["SigIgn"], 16) >> number - 1 & 1}
        assert not ignored & {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
        wait_until(lambda: is_working(tmp_path / "log.txt"))
        # `ls` passes over a file that is closed while it looks.
        opened = subprocess.run(["ls", "-l", folder / "fd"], stdout=subprocess.PIPE, text=True, check=False).stdout
        assert "log.txt" in opened
        assert "socket:" not in opened, "the server's socket is not its own"
        assert process.poll() is None
    finally:
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    assert not is_running(process.pid)


def test_the_server_has_one_thread_however_often_it_has_forked(server: ForkServer, tmp_path: Path) -> None:
    processes = [server.start(["version"], tmp_path / f"{number}.txt") for number in range(5)]
    assert [process.wait(120) for process in processes] == [0] * 5
    assert len({process.pid for process in processes}) == 5
    assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) == 1


def test_signals_reach_the_process_they_are_for(server: ForkServer, tmp_path: Path) -> None:
    one, other = (server.start(LONG, tmp_path / f"{number}.txt") for number in range(2))
    for number in range(2):
        wait_until(partial(is_working, tmp_path / f"{number}.txt"))
    one.send_signal(signal.SIGTERM)
    assert one.wait(120) == 130
    assert other.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.05)
    one.send_signal(signal.SIGTERM)  # It has ended: nothing happens.
    other.send_signal(signal.SIGKILL)
    assert other.wait(120) == -signal.SIGKILL


def test_closing_ends_the_server_even_while_it_imports() -> None:
    server = ForkServer()
    server.close()
    assert not is_running(server.pid)


def test_with_a_server_that_is_killed_all_it_forked_ends(tmp_path: Path) -> None:
    with closing(ForkServer()) as server:
        processes: list[PeerProcess] = [server.start(LONG, tmp_path / f"{number}.txt") for number in range(2)]
        pids = [process.pid for process in processes]
        assert server.failure() is None
        os.kill(server.pid, signal.SIGKILL)
        assert [process.wait(60) for process in processes] == [-signal.SIGKILL] * 2
        wait_until(lambda: not any(is_running(pid) for pid in pids))
        assert "was killed by SIGKILL" in str(server.failure())
        late = server.start(["version"], tmp_path / "late.txt")
        with pytest.raises(SottoError, match="was killed by SIGKILL"):
            print(late.pid)


def test_a_server_that_cannot_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grpc.py").write_text("raise ImportError('no grpc here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with closing(ForkServer()) as server:
        process = server.start(["version"], tmp_path / "log.txt")
        assert process.wait(120) == -signal.SIGKILL
        assert str(server.failure()).endswith("ended with code 1: ImportError: no grpc here")
