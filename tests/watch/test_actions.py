"""What an operator does on the page, and with which certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import Config
from peer.errors import ConfigError, PeerUnreachable, RemoteError, SecurityError
from peer.node.loss_votes import ordered
from peer.ops import control
from peer.watch.actions import act, check_operator
from peer.watch.observer import Observer, open_observer
from tests.cli.runner import sotto


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """(peer, verb, arguments) of every call to three peers, of which peer-2 is silent."""
    monkeypatch.chdir(tmp_path)
    assert sotto("init", "cluster", "kits", "-n", "3").exit_code == 0
    calls: list[tuple[str, str, Any]] = []

    async def ask(config: Config, base: Path, peer: int, verb: str, arguments: Any = None) -> dict[str, Any]:
        name = config.peers[peer].name
        if name == "peer-2":
            raise PeerUnreachable("nobody listens")
        calls.append((name, verb, arguments))
        if verb == "remove" and name == "peer-0":
            raise RemoteError("it hears nothing of that peer")
        is_lost = any(each[:2] == ("peer-1", "remove") for each in calls)
        peers = {"peer-2": {"state": "lost" if is_lost else "member"}}
        return {"from": 20, "added": ["shed"], "removed": {}, "newcomers": [], "peers": peers}

    monkeypatch.setattr(control, "ask", ask)
    return calls


def kits() -> Observer:
    observer = open_observer(Path("kits"))
    for member in observer.members[:2]:
        member.answer = {}
    return observer


def do(action: object, peer: object) -> str:
    return asyncio.run(act(kits(), action, peer))


def test_each_action_is_that_of_the_command_line(asked: list[tuple[str, str, Any]]) -> None:
    assert do("stop", "peer-1") == "peer-1 stops after this round"
    assert do("leave", "peer-1") == "peer-1 leaves before round 20"
    assert do("reload", "peer-0") == "peer-0 has read its list of peers again: added shed"
    assert asked == [("peer-1", "stop", None), ("peer-1", "leave", None), ("peer-0", "reload", None)]


def test_a_lost_peer_is_announced_by_one_that_hears_it(asked: list[tuple[str, str, Any]]) -> None:
    assert do("remove", "peer-2") == "peer-2 is excluded from round 20 on"
    ((_, _, arguments),) = [each for each in asked if each[:2] == ("peer-1", "remove")]
    assert arguments["name"] == "peer-2"
    # With the operator's certificate at hand, every member can see who has decided it.
    assert ordered(bytes.fromhex(arguments["order"])) == ("peer-2", 0)


def test_all_that_answer_are_stopped(asked: list[tuple[str, str, Any]]) -> None:
    assert do("stop all", None) == "2 peers stop after this round"
    assert [name for name, *_ in asked] == ["peer-0", "peer-1"]


@pytest.mark.parametrize(
    ("action", "peer"),
    [("rollback", "peer-0"), (None, "peer-0"), (["stop"], "peer-0"), ("stop", "nobody"), ("stop", None), ("stop", 0)],
)
def test_anything_else_is_refused_before_anybody_is_asked(
    asked: list[tuple[str, str, Any]], action: object, peer: object
) -> None:
    with pytest.raises(ConfigError):
        do(action, peer)
    assert asked == []


def test_a_peer_that_does_not_answer_is_an_error(asked: list[tuple[str, str, Any]]) -> None:
    with pytest.raises(PeerUnreachable):
        do("stop", "peer-2")


def test_operate_needs_the_certificate_of_the_operator(asked: list[tuple[str, str, Any]]) -> None:
    check_operator(kits())
    check_operator(open_observer(Path("kits/peer-1")))
    Path("kits/operator.key").unlink()
    with pytest.raises(SecurityError, match=r"operator\.key"):
        check_operator(kits())
    assert sotto("watch", "kits", "--operate").exit_code == 3


def test_a_simulation_has_nobody_to_operate(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="simulation"):
        check_operator(open_observer(tmp_path))
