"""status and stop: whom they ask, what they show, and what a silent peer means. The daemon's side of the calls is
tested with the daemon."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from peer.config.options import Config, PeerAddress
from peer.errors import PeerUnreachable, RemoteError, RemoteProtocolError, SecurityError
from peer.node.loss_votes import ordered
from peer.ops import control
from peer.ops.local_cluster import free_ports
from peer.records import RoundRecord
from peer.state.checkpoints import Checkpoint, StateFolder
from peer.state.metrics import EvaluationRecord, MetricsStore
from tests.cli.runner import sotto
from tests.ops.answering import newcomer
from tests.report.sample_run import sample_summary


class Daemons:
    """Answers control calls, and remembers them."""

    def __init__(self) -> None:
        self.calls: list[tuple[int | None, str, str]] = []
        self.silent, self.refusing, self.lying = set[int](), set[int](), set[int]()
        self.links: dict[str, object] = {}

    async def ask(
        self, config: Config, base: Path, peer_index: int | None, verb: str, arguments: object = None
    ) -> dict[str, object]:
        self.calls.append((peer_index, verb, base.name))
        index = config.peer.index if peer_index is None else peer_index
        if index in self.silent:
            raise PeerUnreachable("cannot be reached at 127.0.0.1:7700", peer=index)
        if index in self.refusing:
            raise SecurityError("it does not allow it")
        if index in self.lying:
            raise RemoteProtocolError("answered with nonsense")
        status = {"round": 7, "rounds": 9, "state": "training", "neighbors": 2, "neighbors_up": 1}
        return status | ({"links": self.links} if verb == "status" else {})


@pytest.fixture
def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemons:
    monkeypatch.chdir(tmp_path)
    assert sotto("init", "cluster", "kits", "-n", "3").exit_code == 0
    answering = Daemons()
    monkeypatch.setattr(control, "ask", answering.ask)
    return answering


def test_one_peer_is_asked_by_its_own_file(daemons: Daemons) -> None:
    result = sotto("status", "-c", "kits/peer-1/peer.toml", "--json")
    assert result.exit_code == 0
    assert daemons.calls == [(None, "status", "peer-1")]
    assert json.loads(result.stdout)["name"] == "peer-1"
    assert json.loads(result.stdout)["round"] == 7


def test_all_peers_of_a_folder_are_asked_with_their_own_certificates(daemons: Daemons) -> None:
    result = sotto("status", "--run", "kits")
    assert daemons.calls == [(0, "status", "peer-0"), (1, "status", "peer-1"), (2, "status", "peer-2")]
    assert "7/9" in result.stdout
    assert "peer-2" in result.stdout


def test_all_peers_of_the_list_are_asked_with_the_certificate_at_hand(daemons: Daemons) -> None:
    answers = json.loads(sotto("status", "--all", "-c", "kits/peer-0/peer.toml", "--json").stdout)
    assert [call[0] for call in daemons.calls] == [0, 1, 2]
    assert {call[2] for call in daemons.calls} == {"peer-0"}
    assert [answer["name"] for answer in answers] == ["peer-0", "peer-1", "peer-2"]


@pytest.mark.parametrize("accuracy", [0.75, None])
def test_a_peer_that_has_finished_keeps_its_last_figures(accuracy: float | None, daemons: Daemons) -> None:
    daemons.silent, rounds = {1}, Config().run.rounds
    Path("kits/peer-1/state").mkdir()
    with closing(MetricsStore(Path("kits/peer-1/state/metrics.sqlite"))) as store:
        # The last round only averages.
        for number, loss in enumerate([0.5, 0.25, None], rounds - 3):
            store.put(RoundRecord(peer=1, round=number, time_s=1.0, loss=loss, payload_bytes=7))
        right, total = (0, 0) if accuracy is None else (75, 100)
        store.put(EvaluationRecord(peer=1, round=rounds, split="test", correct=(right,), total=(total,)))
        store.put(EvaluationRecord(peer=0, round=rounds, split="test", correct=(1,), total=(100,)))
    shown = sotto("status", "--run", "kits").stdout
    (row,) = [line for line in shown.splitlines() if line.split()[:1] == ["peer-1"]]
    assert row.split()[1:4] == [f"{rounds}/{rounds}", "0.250", "75.0" if accuracy else "–"]
    assert shown.count("peer-1") == 1, "its row says it all"
    answer = json.loads(sotto("status", "--run", "kits", "--json").stdout)[1]
    figures = (answer["loss"], answer["accuracy"], answer["payload_bytes"], answer["socket_bytes"])
    assert (answer["state"], *figures) == ("finished", 0.25, accuracy, 21, None)


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_a_silent_peer_is_listed_and_gives_exit_code_6(verb: str, daemons: Daemons) -> None:
    daemons.silent = {1}
    result = sotto(verb, "--run", "kits")
    assert result.exit_code == 6
    assert "cannot be reached" in " ".join(result.stdout.split())
    assert "peer-2" in result.stdout
    answers = json.loads(sotto(verb, "--run", "kits", "--json").stdout)
    assert [answer.get("state") for answer in answers] == ["training", "unreachable", "training"]


@pytest.mark.parametrize("ended", ["failed: peer-1 ended with code 2", "stopped"])
def test_peers_of_a_run_that_ended_are_stopped(ended: str, daemons: Daemons) -> None:
    assert sotto("init", "cluster", "runs/one/peers", "-n", "2").exit_code == 0
    daemons.silent = {0, 1}
    assert sotto("status", "runs/one").exit_code == 6, "nobody says that it has ended"
    summary = sample_summary(["peer-0", "peer-1"], 10)
    summary.ended = ended
    summary.save(Path("runs/one/summary.json"))
    result = sotto("status", "runs/one")
    assert (result.exit_code, "unreachable" in result.stdout) == (0, False)
    assert f"peer-1 is stopped: the run {ended.partition(':')[0]}" in result.stdout
    # One that answers has been started again.
    daemons.silent = {1}
    assert sotto("status", "runs/one").exit_code == 6


def test_a_silent_peer_that_a_neighbour_hears_is_connected_and_cannot_be_stopped_from_here(daemons: Daemons) -> None:
    daemons.silent, daemons.links = {2}, {"peer-2": {"up": True}}
    result = sotto("status", "--run", "kits")
    assert result.exit_code == 0
    assert "peer-2 is connected, says peer-0 (cannot be reached at" in " ".join(result.stdout.split())
    third = json.loads(sotto("status", "--run", "kits", "--json").stdout)[2]
    assert (third["state"], third["told_by"], "error" in third) == ("connected", "peer-0", False)
    daemons.links = {"peer-2": {"up": False}}
    assert sotto("status", "--run", "kits").exit_code == 6
    daemons.links = {"peer-2": {"up": True}}
    assert sotto("stop", "--run", "kits").exit_code == 6, "it goes on"


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_a_liar_that_is_first_keeps_nobody_from_being_asked(verb: str, daemons: Daemons) -> None:
    daemons.lying, daemons.refusing = {0}, {1}
    result = sotto(verb, "--run", "kits", "--json")
    assert result.exit_code == 6
    assert {call[0] for call in daemons.calls} == {0, 1, 2}
    answers = json.loads(result.stdout)
    assert [answer["state"] for answer in answers] == ["answers nonsense", "unreachable", "training"]
    assert answers[0]["error"] == "answered with nonsense"
    assert "does not allow it" in sotto(verb, "--run", "kits").stdout


def test_one_that_refuses_everybody_is_told_why(daemons: Daemons) -> None:
    daemons.refusing = {0, 1, 2}
    result = sotto("stop", "--run", "kits")
    assert (result.exit_code, "it does not allow it" in result.stderr) == (3, True)


def test_stop_tells_every_peer(daemons: Daemons) -> None:
    result = sotto("stop", "--run", "kits")
    assert result.exit_code == 0
    assert [call[1] for call in daemons.calls] == ["stop"] * 3
    assert result.stdout.splitlines()[0] == "peer-0: stops after this round"


def test_without_a_folder_the_newest_run_is_asked_and_the_only_running_one_stopped(daemons: Daemons) -> None:
    assert "start: sotto up SCRIPT --peers 3, or name a folder, such as kits\n" in sotto("status").stderr
    for name in ("digits", "mnist"):
        assert sotto("init", "cluster", f"runs/{name}/peers", "-n", "2").exit_code == 0
        os.utime(f"runs/{name}/peers", (0, len(name)))
    result = sotto("status", "--json")
    assert result.stderr == "runs/digits, the newest run here\n"
    assert [each["name"] for each in json.loads(result.stdout)] == ["peer-0", "peer-1"]
    assert "nor a run under way in ./runs" in sotto("stop").stderr
    with closing(StateFolder(Path("runs/mnist/peers/peer-1/state"))):
        result = sotto("stop")
        assert (result.exit_code, result.stderr) == (0, "runs/mnist, the only run under way here\n")
        assert len(result.stdout.splitlines()) == 2
        with closing(StateFolder(Path("runs/digits/peers/peer-0/state"))):
            assert "several runs are under way; name one of runs/digits, runs/mnist" in sotto("stop").stderr
    assert sotto("status", "runs/mnist").exit_code == 0
    assert "name the folder once" in sotto("status", "runs/mnist", "--run", "kits").stderr
    assert json.loads(sotto("status", "kits/peer-1", "--json").stdout)["name"] == "peer-1"


def test_ten_peers_are_in_the_order_of_their_numbers(daemons: Daemons) -> None:
    assert sotto("init", "cluster", "more", "-n", "12").exit_code == 0
    answers = json.loads(sotto("status", "--run", "more", "--json").stdout)
    assert [answer["index"] for answer in answers] == list(range(12))


@pytest.fixture
def behind_nat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kits of a peer that listens on a free port and of one that only dials out. Nobody runs."""
    monkeypatch.chdir(tmp_path)
    port = free_ports(1)[0]
    hosts = ("--host", f"127.0.0.1:{port}", "--host", "-")
    assert sotto("init", "cluster", "kits", "-n", "2", *hosts).exit_code == 0


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_a_peer_that_listens_nowhere_is_listed_as_unreachable(verb: str, behind_nat: None) -> None:
    result = sotto(verb, "--run", "kits", "--json")
    assert result.exit_code == 6
    answers = json.loads(result.stdout)
    assert [answer["state"] for answer in answers] == ["unreachable", "unreachable"]
    assert "accepts no connections, and does not run here: run the command on its device" in answers[1]["error"]


def test_removing_a_peer_with_nobody_there_says_so(behind_nat: None) -> None:
    result = sotto("remove", "peer-1", "-c", "kits/peer-0/peer.toml")
    assert result.exit_code == 6
    assert "nobody listens at 127.0.0.1" in result.stderr


def test_nobody_is_removed_without_the_operators_signature(behind_nat: None) -> None:
    """On a device that has its own certificate alone, whose word no other one believes."""
    Path("kits/operator.key").unlink()
    result = sotto("remove", "peer-1", "-c", "kits/peer-0/peer.toml")
    assert result.exit_code == 3
    assert "run this where operator.pem and operator.key are" in " ".join(result.stderr.split())


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(peer, verb) of every call to two peers, of which the first knows a newcomer that no file here lists."""
    monkeypatch.chdir(tmp_path)
    assert sotto("init", "cluster", "kits", "-n", "2").exit_code == 0
    calls: list[tuple[str, str]] = []
    newcomers = [newcomer(tmp_path / "kits", 2, "garage")]

    async def ask(
        config: Config, base: Path, peer: int | PeerAddress | None, verb: str, arguments: object = None
    ) -> dict[str, object]:
        entry = peer if isinstance(peer, PeerAddress) else config.peers[config.peer.index if peer is None else peer]
        calls.append((entry.name, verb))
        if verb == "remove" and entry.name != "garage":
            raise RemoteError("it hears nothing of that peer")
        peers = {"peer-1": {"state": "lost" if ("garage", "remove") in calls else "member"}}
        answer: dict[str, object] = {"round": 7, "rounds": 9, "from": 20, "newcomers": newcomers, "peers": peers}
        return answer | {"added": ["shed"], "removed": {"peer-1": 12}, "left_to_others": {"peer-9": "not heard"}}

    monkeypatch.setattr(control, "ask", ask)
    return calls


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_newcomers_are_asked_too_that_no_file_lists(verb: str, asked: list[tuple[str, str]]) -> None:
    answers = json.loads(sotto(verb, "--all", "-c", "kits/peer-0/peer.toml", "--json").stdout)
    assert asked == [("peer-0", verb), ("peer-1", verb), ("garage", verb)]
    assert [answer["name"] for answer in answers] == ["peer-0", "peer-1", "garage"]


def test_a_newcomer_may_be_the_only_one_that_can_tell_where_a_peer_was_lost(asked: list[tuple[str, str]]) -> None:
    result = sotto("remove", "peer-1", "-c", "kits/peer-0/peer.toml")
    assert result.exit_code == 0
    # All are asked first which incarnation they know, which the operator's order names, and last what they have heard.
    order = [("peer-0", "status"), ("garage", "status"), ("peer-0", "remove"), ("garage", "remove")]
    assert asked == [*order, ("peer-0", "status")]
    assert "excluded from round 20 on" in result.stdout


def test_one_that_only_says_that_it_removed_a_peer_is_passed_over(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peer-0 lies: it takes the order, names another incarnation, and announces nothing."""
    monkeypatch.setattr(control, "_HEARD_S", 0.5)
    honest, orders = Daemons(), list[tuple[object, int]]()

    async def ask(config: Config, base: Path, peer: int, verb: str, arguments: dict[str, str] | None = None) -> object:
        if arguments is not None:
            orders.append((peer, ordered(bytes.fromhex(arguments["order"]))[1]))
            return {"from": 3}
        is_lost = any(each == 1 for each, _ in orders)
        known = {"state": "lost" if is_lost and peer else "member", "incarnation": 5 if peer == 0 else 1}
        return await honest.ask(config, base, peer, verb) | {"peers": {"peer-3": known}}

    assert sotto("init", "cluster", "four", "-n", "4").exit_code == 0
    monkeypatch.setattr(control, "ask", ask)
    result = sotto("remove", "peer-3", "-c", "four/peer-0/peer.toml")
    assert result.exit_code == 0
    assert orders == [(0, 1), (1, 1)]


def test_a_list_that_was_read_again_is_summed_up(asked: list[tuple[str, str]]) -> None:
    result = sotto("admin", "reload", "-c", "kits/peer-1/peer.toml")
    assert asked == [("peer-1", "reload")]
    assert result.stdout.splitlines() == [
        "peer-1: knows shed, which joins when it is started",
        "peer-1: continues without peer-1 from round 12 on",
        "peer-1: cannot announce the loss of peer-9 itself: not heard",
    ]


def test_stopped_peers_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sotto("init", "cluster", "kits", "-n", "2").exit_code == 0
    for index in (0, 1):
        folder = StateFolder(tmp_path / f"kits/peer-{index}/state")
        for round_ in (10, 20):
            folder.checkpoints.save(Checkpoint(round_, {}, {}))
        folder.close()
    one = sotto("admin", "rollback", "--round", "10", "-c", "kits/peer-0/peer.toml")
    assert one.stdout == "kits/peer-0/state: put back to round 10\n"
    refused = sotto("admin", "rollback", "--round", "20", "--run", "kits")
    assert refused.exit_code == 5
    assert "peer-0/state: has no checkpoint of round 20; it can go back to 0, 10" in refused.stderr
    both = sotto("admin", "rollback", "--round", "10", "--run", "kits", "--json")
    assert json.loads(both.stdout) == [{"state": f"kits/peer-{index}/state", "round": 10} for index in (0, 1)]
    assert sotto("admin", "rollback", "--round", "0", "--run", "kits", "-c", "kits/peer-0/peer.toml").exit_code == 2
