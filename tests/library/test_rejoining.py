"""Scripts in processes of their own, over sockets, whose peers are declared lost and take part again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import load
from peer.errors import RemoteError
from peer.ops.control import call
from tests.library.processes import finish, start, starts_of
from tests.library.scripts import write_kits

EVERY = 3
ROUNDS = 100_000
POLL_S = 0.3
"""Each question is a connection with a handshake, for both sides."""
SETTINGS = (
    f"run.rounds={ROUNDS}", "graph.kind=ring", "algorithm.name=quant-sgp", "rounds.lost_after_s=8",
    "transport.heartbeat_s=3", "transport.backoff_max_s=2", "guard.max_loss=1e8",
)  # fmt: skip
"""A process that is stopped keeps its connections; after three heartbeats the others notice."""


class Scripts:
    """The scripts of four peers."""

    def __init__(self, folder: Path, *settings: str, **options: Any) -> None:
        self.files = write_kits(folder, 4, *SETTINGS, *settings)
        self._configs = [load(file, environment={}) for file in self.files]
        self._options = options
        self.processes = [self._start(file) for file in self.files]

    def _start(self, file: Path) -> ForkServerProcess:
        return start("spoilt", file, every=EVERY, **self._options)

    def ask(self, peer: int, verb: str) -> Mapping[str, Any]:
        return call(self._configs[peer], self.files[peer].parent, None, verb)

    def until(self, peer: int, condition: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        """Return the status of a peer once it is so."""
        deadline, status = time.monotonic() + 120, {}
        while time.monotonic() < deadline:
            assert self.processes[peer].is_alive(), self.log(peer)
            try:
                status = self.ask(peer, "status")
                if condition(status):
                    return status
            except RemoteError:
                pass  # It starts, or takes part again.
            time.sleep(POLL_S)
        pytest.fail(f"not within 120 s: {status}\n{self.log(peer)[-3000:]}")

    def train(self, *peers: int) -> None:
        """Wait until each has come a few rounds further."""
        for peer in peers:
            round_ = self.until(peer, lambda status: True)["round"]
            self.until(peer, lambda status, goal=round_ + 3: status["round"] > goal)

    def lose(self, peer: int) -> None:
        """Wait until the others have declared a peer lost."""
        name = f"peer-{peer}"
        for other in range(4):
            if other != peer:
                self.until(other, lambda status: status["peers"][name]["state"] == "lost")

    def comes_back(self, peer: int, incarnation: int) -> None:
        """Wait until a peer trains as an incarnation, and all others know."""
        is_back = {"incarnation": incarnation, "state": "member"}
        for other in range(4):
            if other != peer:
                self.until(
                    other,
                    lambda status: is_back.items() <= {"incarnation": 0, **status["peers"][f"peer-{peer}"]}.items(),
                )
        self.until(peer, lambda status: status["round"] > status["rejoined_from"] + 3)

    def kill(self, peer: int) -> None:
        self.processes[peer].kill()
        self.processes[peer].join()

    def start(self, peer: int) -> None:
        self.processes[peer] = self._start(self.files[peer])

    def spoil(self, peer: int) -> None:
        (self.files[peer].parent / "spoil").touch()

    def hold(self, peer: int) -> None:
        """Let a script do nothing from its next step on, with a round begun, until `go_on`."""
        (self.files[peer].parent / "hold").touch()
        deadline = time.monotonic() + 120
        while "holds after step" not in self.log(peer):
            assert time.monotonic() < deadline, self.log(peer)[-3000:]
            time.sleep(0.1)

    def go_on(self, peer: int) -> None:
        (self.files[peer].parent / "hold").unlink()

    def ends(self, peer: int) -> None:
        """Wait until nobody answers for a peer."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                self.ask(peer, "status")
            except RemoteError:
                return
            time.sleep(POLL_S)
        pytest.fail(f"not within 120 s\n{self.log(peer)[-3000:]}")

    def log(self, peer: int) -> str:
        return (self.files[peer].parent / "log.txt").read_text()

    def rejoins(self, peer: int) -> list[tuple[int, float]]:
        """Return (round, largest parameter) of each time that a script was told of."""
        found = re.findall(r"rejoins at round (\d+) with (\S+)", self.log(peer))
        return [(int(round_), float(largest)) for round_, largest in found]

    def end(self, *, overlap: bool = False) -> None:
        """Stop all, and check that no script has spoilt what the others have."""
        for peer in range(4):
            self.ask(peer, "stop")
        outcomes = finish(self.files, self.processes)
        assert all(outcome.largest < 10 and outcome.stopped for outcome in outcomes), outcomes
        for peer, outcome in enumerate(outcomes):
            steps, left, round_ = map(
                int, re.findall(r"has (\d+) steps and (\d+) left after round (\d+)", self.log(peer))[-1]
            )
            assert (steps, round_) == (outcome.steps, outcome.round)
            # The rounds that it missed are not made up for: it has done the steps of the round under way at most, and
            # where exchanges overlap, those of the next one.
            assert 0 <= (ROUNDS - round_) * EVERY - left <= EVERY * (1 + overlap)


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Callable[..., Scripts]]:
    made: list[Scripts] = []

    def make(*settings: str, **options: Any) -> Scripts:
        made.append(Scripts(tmp_path, *settings, **options))
        return made[-1]

    yield make
    for scripts in made:
        for process in scripts.processes:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_a_script_that_was_stopped_until_it_was_lost_takes_part_again(
    four: Callable[..., Scripts], overlap: bool
) -> None:
    scripts = four(overlap=overlap)
    scripts.train(*range(4))
    process = scripts.processes[3].pid
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    scripts.lose(3)
    scripts.train(0, 1, 2)
    # Whatever it does with the model that it had is seen by nobody.
    scripts.spoil(3)
    os.kill(process, signal.SIGCONT)
    scripts.comes_back(3, 1)
    ((round_, largest),) = scripts.rejoins(3)
    assert round_ > 3
    assert 0 < largest < 10
    # Its second life is as durable as its first: the same steps, and no other model.
    scripts.kill(3)
    scripts.start(3)
    scripts.train(*range(4))
    incarnation = scripts.until(3, lambda status: True)["incarnation"]
    first, second = starts_of(scripts.files[3])
    assert first == 0 < second
    # It is lost while no process of it is there.
    scripts.kill(3)
    scripts.lose(3)
    scripts.start(3)
    scripts.comes_back(3, incarnation + 1)
    assert len(scripts.rejoins(3)) == incarnation + 1
    assert starts_of(scripts.files[3])[2] >= second
    scripts.end(overlap=overlap)


@pytest.mark.slow
def test_a_script_that_was_lost_while_it_trained_is_told_at_its_next_step(four: Callable[..., Scripts]) -> None:
    scripts = four()
    scripts.train(*range(4))
    scripts.hold(3)
    process = scripts.processes[3].pid
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    scripts.lose(3)
    os.kill(process, signal.SIGCONT)
    scripts.ends(3)
    scripts.spoil(3)
    scripts.go_on(3)
    scripts.comes_back(3, 1)
    ((_, largest),) = scripts.rejoins(3)
    assert 0 < largest < 10
    scripts.end()


@pytest.mark.slow
def test_a_script_whose_state_folder_was_wiped_takes_part_again(four: Callable[..., Scripts]) -> None:
    scripts = four("rounds.lost_after_s=25", "transport.give_up_after_s=100")
    scripts.train(*range(4))
    scripts.kill(3)
    shutil.rmtree(scripts.files[3].parent / "state")
    scripts.spoil(3)
    scripts.start(3)
    scripts.comes_back(3, 1)
    ((round_, largest),) = scripts.rejoins(3)
    assert round_ > 3
    assert 0 < largest < 10
    assert starts_of(scripts.files[3])[0] == 0
    scripts.end()


@pytest.mark.slow
def test_a_script_ends_with_a_sentence_where_nobody_takes_part_again(four: Callable[..., Scripts]) -> None:
    scripts = four("rounds.rejoin=false")
    scripts.train(*range(4))
    scripts.kill(3)
    scripts.lose(3)
    scripts.start(3)
    scripts.processes[3].join(60)
    assert scripts.processes[3].exitcode == 1
    assert "DeclaredLost: the other members have declared this peer lost" in scripts.log(3)
    assert scripts.log(3).rstrip().endswith("add the device again under another name")
    assert scripts.rejoins(3) == []
