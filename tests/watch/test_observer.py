"""What is seen of a run folder, of a simulation, of kits and of one peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import Config, PeerAddress, load
from peer.config.writer import write_resolved
from peer.errors import ConfigError, PeerUnreachable, SecurityError, StateError
from peer.ops import control
from peer.ops.cluster_files import Host, write_cluster
from peer.state.checkpoints import Checkpoint, StateFolder
from peer.state.metrics import EvaluationRecord, MetricsStore, Summary
from peer.watch.observer import Observer, open_observer
from peer.watch.snapshot import Snapshot
from tests.ops.answering import answered, newcomer
from tests.report.sample_run import as_simulation, evaluation, round_record, write_sample_run

ROUNDS = 40


@dataclass
class Devices:
    """Peers on a ring that answer control calls, without a network."""

    folder: Path
    rounds: dict[str, int] = field(default_factory=dict)
    stores: dict[str, MetricsStore] = field(default_factory=dict)
    says: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What a peer says beside what all say."""
    cut: set[frozenset[str]] = field(default_factory=set)
    """Links that are down."""
    pages: list[tuple[str, str, int]] = field(default_factory=list)
    forge: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def start(self, index: int, rounds: int) -> None:
        name = f"peer-{index}"
        store = self.stores.setdefault(name, MetricsStore(None))
        store.put(*(round_record(index, t, ROUNDS) for t in range(rounds)))
        for done in range(10, rounds + 1, 10):
            store.put(EvaluationRecord(peer=index, round=done, split="test", correct=(done + index,), total=(100,)))
            store.put(EvaluationRecord(peer=index, round=done, split="holdout", correct=(1,), total=(100,)))
        store.flush()
        self.rounds[name] = rounds

    def kill(self, index: int) -> None:
        del self.rounds[f"peer-{index}"]

    async def ask(
        self, config: Config, base: Path, peer: int | PeerAddress | None, verb: str, arguments: Any = None
    ) -> dict[str, Any]:
        index = config.peer.index if peer is None else peer
        name = index.name if isinstance(index, PeerAddress) else config.peers[index].name
        if name not in self.rounds:
            raise PeerUnreachable(f"nobody listens at the address of {name}")
        if verb == "metrics":
            self.pages.append((name, arguments["table"], arguments["after"]))
            columns, rows, last = self.stores[name].page(arguments["table"], after=arguments["after"])
            return answered("metrics", {"columns": columns, "rows": rows, "last": last})
        names = [each.name for each in config.peers]
        me = names.index(name)
        ring = {names[(me + 1) % len(names)]: (False, True), names[me - 1]: (True, False)}
        links = {
            other: {
                "up": other in self.rounds and frozenset((name, other)) not in self.cut,
                "sends": sends, "receives": receives, "frame_bytes": 360 * self.rounds[name], "problem": "no answer",
            }
            for other, (sends, receives) in ring.items()
        }  # fmt: skip
        answer = {
            "name": name, "run": "the run", "state": "running", "round": self.rounds[name], "rounds": ROUNDS,
            "loss": 0.5, "accuracy": 0.9 - me / 100, "metrics": {}, "criteria": {"accuracy": "higher"},
            "payload_bytes": 300 * self.rounds[name], "seconds": float(self.rounds[name]), "links": links,
            "peers": {other: {"state": "member"} for other in names if other != name}, "waiting_for": [],
            "budget_kbytes_per_s": None, "newcomers": [], "diverged": [],
        } | self.says.get(name, {})  # fmt: skip
        return answered("status", answer if self.forge is None else self.forge(answer))


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    kits = tmp_path / "kits"
    write_cluster(
        kits,
        load(environment={}, overrides=[f"run.rounds={ROUNDS}"]),
        [Host("127.0.0.1", port) for port in (7700, 7701, 7702)],
    )
    found = Devices(kits)
    monkeypatch.setattr(control, "ask", found.ask)
    return found


def look(observer: Observer) -> Snapshot:
    return asyncio.run(observer.look())


def states(snapshot: Snapshot) -> dict[str, str]:
    return {peer.name: peer.state for peer in snapshot.peers}


def edge_states(snapshot: Snapshot) -> dict[tuple[int, int], str]:
    return {(edge.a, edge.b): edge.state for edge in snapshot.edges}


# -- a folder on this machine ------------------------------------------------------------------------------------------


def test_a_run_that_is_opened_late_has_its_history(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "digits")
    observer = open_observer(as_simulation(run))
    seen = look(observer)
    assert (seen.kind, seen.name, seen.round) == ("simulation", "digits", 120)
    assert seen.averaged_figure == pytest.approx(evaluation(-1, 120, "test", offset=-1).accuracy)
    assert seen.consensus_distance == pytest.approx(5 / 120)
    worst = seen.worst
    assert worst is not None
    assert (worst.index, worst.figure) == (3, pytest.approx(evaluation(3, 120, "test", offset=3).accuracy))
    assert len(observer.figures.loss.curve(2)) == 120
    assert observer.figures.curves["accuracy"].curve(0)[0][0] == 20
    assert seen.ended == "completed"
    # 300 to 304 bytes a round: every row counts once.
    assert seen.peers[1].payload_bytes == sum(300 + t % 5 for t in range(120))
    assert seen.peers[1].rate == pytest.approx(360 / 0.04)
    assert seen.peers[1].wait_share == pytest.approx(0.03 / 0.04)


def test_what_is_written_later_is_seen_at_the_next_look(tmp_path: Path) -> None:
    run = tmp_path / "sim"
    run.mkdir()
    config = load(environment={}, overrides=["run.rounds=30", 'graph.kind="directed-ring"'])
    write_resolved(config, run / "config.toml", run)
    store = MetricsStore(run / "metrics.sqlite")
    observer = open_observer(run)
    assert look(observer).peers == []
    for rounds in (10, 20, 30):
        for peer in range(5):
            store.put(*(round_record(peer, t, 30) for t in range(rounds - 10, rounds)))
        store.flush()
        seen = look(observer)
        assert (seen.round, seen.rounds) == (rounds, 30)
        assert set(states(seen).values()) == {"finished" if rounds == 30 else "running"}
    assert [(edge.a, edge.b, edge.sends) for edge in seen.edges[:2]] == [(0, 1, (True, False)), (0, 4, (False, True))]
    store.close()


def test_names_and_reasons_of_others_are_printable(tmp_path: Path) -> None:
    run = as_simulation(write_sample_run(tmp_path / "digits"))
    summary = Summary.load(run / "summary.json")
    summary.name, summary.peer_names[0] = "<script>\x1b[31m\nrun", "kitchen\x07\u202e"
    summary.ended = "failed: \x1b]0;title\x07"
    summary.save(run / "summary.json")
    seen = look(open_observer(run))
    assert (seen.name, seen.peers[0].name, seen.ended) == ("<script> [31m run", "kitchen  ", "failed:  ]0;title ")


@pytest.mark.parametrize("place", ["nothing", "empty"])
def test_what_is_no_run_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError):
        open_observer(tmp_path / place)
    (tmp_path / "peer.toml").write_text("nonsense = ")
    with pytest.raises(ConfigError):
        open_observer(tmp_path / "peer.toml")


# -- kits --------------------------------------------------------------------------------------------------------------


def test_running_peers_hand_over_what_is_new(devices: Devices) -> None:
    for index in range(3):
        devices.start(index, 20)
    observer = open_observer(devices.folder)
    seen = look(observer)
    assert (seen.kind, seen.name, seen.round, seen.rounds) == ("cluster", "the run", 20, ROUNDS)
    assert states(seen) == dict.fromkeys(("peer-0", "peer-1", "peer-2"), "running")
    assert [peer.figure for peer in seen.peers] == [0.9, 0.89, 0.88]
    assert seen.worst is not None
    assert seen.worst.name == "peer-2"
    assert edge_states(seen) == {(0, 1): "up", (0, 2): "up", (1, 2): "up"}
    assert len(observer.figures.loss.curve(1)) == 20
    # A hold-out says something of private data and stays where it is.
    assert observer.figures.curves["accuracy"].curve(0) == [(10.0, 0.1), (20.0, 0.2)]
    devices.start(0, 25)
    assert look(observer).peers[0].round == 25
    assert [page for page in devices.pages if page[:2] == ("peer-0", "rounds")] == [
        ("peer-0", "rounds", -1),
        ("peer-0", "rounds", 19),
    ]
    assert not (devices.folder / "collected").exists(), "watching leaves nothing behind"


def test_a_killed_peer_is_unreachable_until_it_is_back(devices: Devices) -> None:
    for index in range(3):
        devices.start(index, 20)
    observer = open_observer(devices.folder)
    look(observer)
    devices.kill(1)
    seen = look(observer)
    assert states(seen)["peer-1"] == "unreachable"
    assert seen.peers[1].problem == "nobody listens at the address of peer-1"
    assert seen.peers[1].round == 20, "what is known of it stays"
    assert edge_states(seen) == {(0, 1): "down", (0, 2): "up", (1, 2): "down"}
    devices.start(1, 22)
    seen = look(observer)
    assert states(seen)["peer-1"] == "running"
    assert set(edge_states(seen).values()) == {"up"}


def test_a_partition_is_edges_that_are_down_between_peers_that_run(devices: Devices) -> None:
    for index in range(3):
        devices.start(index, 20)
    devices.cut = {frozenset(("peer-0", "peer-1")), frozenset(("peer-1", "peer-2"))}
    seen = look(open_observer(devices.folder))
    assert set(states(seen).values()) == {"running"}
    assert edge_states(seen) == {(0, 1): "down", (0, 2): "up", (1, 2): "down"}
    assert seen.edges[0].problem == "no answer"


def test_whoever_waits_longer_than_a_moment_is_shown(devices: Devices) -> None:
    for index in range(3):
        devices.start(index, 20)
    devices.says["peer-2"] = {"waiting_for": ["peer-1", "peer-0"]}
    observer = open_observer(devices.folder)
    assert look(observer).peers[2].waits_for == ()
    devices.says["peer-2"] = {"waiting_for": ["peer-1"]}
    assert look(observer).peers[2].waits_for == (1,)
    devices.start(2, 21)
    assert look(observer).peers[2].waits_for == ()


def test_limits_of_a_device_are_shown_as_in_the_status(devices: Devices) -> None:
    devices.start(0, 20)
    devices.start(1, 20)
    reached = [
        {"reason": "1.2 MiB carried of limits.day_mbytes = 1\x1b[31m", "until": "2026-12-01 00:00+01:00"},
        {"reason": "not on mains (limits.only_on_mains)", "until": None},
    ]
    devices.says["peer-1"] = {"limits": {"then": "pause", "reached": reached, "warnings": ["nearly used"]}}
    seen = look(open_observer(devices.folder))
    assert (seen.peers[0].limits, seen.peers[0].warnings) == ((), ())
    assert seen.peers[1].limits == (
        "paused until 2026-12-01 00:00+01:00: 1.2 MiB carried of limits.day_mbytes = 1 [31m",
        "paused: not on mains (limits.only_on_mains)",
    )
    assert seen.peers[1].warnings == ("nearly used",)
    assert seen.peers[1].state == "running", "it answers, and is in no trouble"


def test_peers_that_left_or_finished_are_no_trouble(devices: Devices) -> None:
    devices.start(0, 20)
    devices.says["peer-0"] = {
        "peers": {"peer-1": {"state": "left"}, "peer-2": {"state": "member"}}, "round": 21,
    }  # fmt: skip
    folder = StateFolder(devices.folder / "peer-2" / "state")
    folder.checkpoints.save(Checkpoint(ROUNDS, {}, {}))
    folder.close()
    seen = look(open_observer(devices.folder))
    assert states(seen) == {"peer-0": "running", "peer-1": "left", "peer-2": "finished"}
    assert seen.peers[1].problem == "has left the run, says peer-0"
    assert edge_states(seen) == {(0, 1): "over", (0, 2): "over"}
    assert seen.round == 21, "who has left holds nobody back"


def test_a_peer_that_only_its_neighbours_reach_is_connected_and_one_that_diverged_is_named(devices: Devices) -> None:
    devices.start(0, 20)
    status = {"up": True, "sends": True, "receives": True, "frame_bytes": 1, "problem": None}
    claim = {"name": "peer-2", "round": 7, "reason": "loss 900", "told_by": "peer-0"}
    devices.says["peer-0"] = {"links": {"peer-1": status}, "diverged": [claim]}
    seen = look(open_observer(devices.folder))
    assert states(seen) == {"peer-0": "running", "peer-1": "connected", "peer-2": "diverged"}
    assert seen.peers[2].problem == "loss 900, says peer-0"


def test_peers_of_different_releases_are_named(devices: Devices) -> None:
    for index in range(2):
        devices.start(index, 20)
        devices.says[f"peer-{index}"] = {"version": "0.2.0"}
    assert look(open_observer(devices.folder)).note is None
    devices.says["peer-0"]["releases"] = {"peer-0": "0.2.0", "peer-1": "0.2.0", "peer-2": "0.1.0"}
    assert look(open_observer(devices.folder)).note == "Releases are mixed: peer-2 runs 0.1.0, the others 0.2.0."


def test_a_newcomer_that_no_file_here_lists_is_asked_too(devices: Devices) -> None:
    devices.start(0, 20)
    devices.says["peer-0"] = {
        "newcomers": [newcomer(devices.folder, 3, "garage"), {"index": 4, "name": "invented", "advertise": "a:1"}]
    }
    seen = look(open_observer(devices.folder))
    assert seen.peers[3].name == "garage"
    assert seen.peers[3].state == "unreachable"
    assert len(seen.peers) == 4


@pytest.mark.parametrize(
    "lie",
    [
        {"links": None},
        {"links": {"peer-1": {"up": "yes"}}},
        {"round": None},
        {"metrics": 7},
        {"payload_bytes": "1"},
        {"limits": []},
        {"limits": {"reached": 7}},
        {"limits": {"reached": [{"reason": "x"}]}},
        {"limits": {"warnings": "x"}},
    ],
)
def test_a_peer_that_answers_nonsense_is_named_and_harms_nothing(devices: Devices, lie: dict[str, Any]) -> None:
    for index in range(2):
        devices.start(index, 20)
    devices.forge = lambda answer: answer | lie if answer["name"] == "peer-1" else answer
    seen = look(open_observer(devices.folder))
    assert seen.peers[0].state == "running"
    assert seen.peers[1].state == "connected"
    assert seen.peers[1].problem is not None
    assert seen.peers[1].problem.startswith("answered 'status' with nonsense: ")


def test_metrics_that_a_peer_may_not_be_asked_for_leave_the_status(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.start(0, 20)

    async def ask(config: Config, base: Path, peer: Any, verb: str, arguments: Any = None) -> dict[str, Any]:
        if verb == "metrics":
            raise SecurityError("metrics are for the operator")
        return await devices.ask(config, base, peer, verb, arguments)

    monkeypatch.setattr(control, "ask", ask)
    seen = look(open_observer(devices.folder))
    assert (seen.peers[0].round, seen.peers[0].problem) == (20, None)


# -- one peer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["peer-1", "peer-1/peer.toml"])
def test_of_one_peer_its_neighbours_are_seen_as_it_sees_them(devices: Devices, place: str) -> None:
    for index in (0, 1):
        devices.start(index, 20)
    seen = look(open_observer(devices.folder / place))
    assert seen.kind == "peer"
    assert states(seen) == {"peer-0": "connected", "peer-1": "running", "peer-2": "unreachable"}
    assert edge_states(seen) == {(0, 1): "up", (1, 2): "down"}
    assert {page[0] for page in devices.pages} == {"peer-1"}
