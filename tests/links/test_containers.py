"""What `sotto lab shape up` asks of tc for a container, also where this kernel cannot do it."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence

import pytest

from peer.errors import LinkError
from peer.links import tc
from peer.links.profiles import PROFILES, find

INSIDE = ["nsenter", "--target", "4711", "--net", "tc", "qdisc"]
NO_NETEM = "Error: Specified qdisc kind is unknown."
"""tc's exit code is 2 then; 1 says that it did not understand the command."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[list[str]]]:
    """Return a function that has every netem refused with a complaint (none if empty); it gives what tc is asked."""

    def answer_netem_with(complaint: str) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
            commands.append(list(command))
            refused = complaint if "netem" in command else ""
            return subprocess.CompletedProcess(command, 2 if refused else 0, "", refused)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return answer_netem_with


def test_what_was_there_goes_then_comes_the_rate_and_netem_below_it(asked: Callable[[str], list[list[str]]]) -> None:
    commands = asked("")
    assert tc.shape(4711, "eth0", find("lossy-wifi")) is None
    rate = ["rate", "20000000bit", "burst", "3028", "limit", "1250000"]
    assert commands == [
        [*INSIDE, "del", "dev", "eth0", "root"],
        [*INSIDE, "add", "dev", "eth0", "root", "handle", "1:", "tbf", *rate],
        [*INSIDE, "add", "dev", "eth0", "parent", "1:1", "netem", "delay", "3ms", "loss", "1.0%"],
    ]


@pytest.mark.parametrize("name", PROFILES)
def test_each_profile_asks_for_its_own_figures(asked: Callable[[str], list[list[str]]], name: str) -> None:
    commands = asked("")
    profile = find(name)
    tc.shape(4711, "eth0", profile)
    words = dict(itertools.pairwise(itertools.chain(*commands[1:])))
    assert words.get("rate") == (f"{profile.up_kbit * 1000:.0f}bit" if profile.up_kbit else None)
    assert words.get("delay") == (f"{profile.latency_ms}ms" if profile.latency_ms else None)
    if profile.loss:
        assert words["loss"] == f"{profile.loss * 100}%"


def test_a_kernel_without_netem_leaves_the_rate_and_is_reported(asked: Callable[[str], list[list[str]]]) -> None:
    commands = asked(NO_NETEM)
    remark = tc.shape(4711, "eth0", find("dsl"))
    assert remark is not None
    assert "no latency and no loss: this kernel has no netem" in remark
    assert sum("tbf" in command for command in commands) == 1


def test_any_other_refusal_is_an_error(asked: Callable[[str], list[list[str]]]) -> None:
    asked("RTNETLINK answers: Operation not permitted")
    with pytest.raises(LinkError, match="not permitted"):
        tc.shape(4711, "eth0", find("dsl"))


@pytest.fixture
def inside() -> Iterator[int]:
    """Return a process with a network of its own, as a container has it."""
    process = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.communicate()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and tc (iproute2)")
@pytest.mark.parametrize("name", PROFILES)
def test_the_real_tc_understands_every_profile(inside: int, name: str) -> None:
    profile = find(name)
    remark = tc.shape(inside, "lo", profile)
    assert remark is None or "qdisc kind is unknown" in remark
    shown = subprocess.run(
        ["nsenter", "--target", str(inside), "--net", "tc", "qdisc", "show", "dev", "lo"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ("tbf" in shown) == bool(profile.up_kbit)
    assert ("netem" in shown) == (remark is None and bool(profile.latency_ms or profile.loss))
    tc.release(inside, "lo")
