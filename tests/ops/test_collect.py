"""Reports of clusters: what running peers hand over, what was collected or copied back before, what is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import Config, PeerAddress, load
from peer.config.writer import write_resolved
from peer.errors import PeerUnreachable, RemoteError, StateError
from peer.ops import control, standing
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.cluster_summary import write_cluster_summary
from peer.ops.collect import Member, collect, is_cluster
from peer.report.run_data import load_run
from peer.report.run_page import render
from peer.state.checkpoints import Checkpoint, StateFolder
from peer.state.metrics import EvaluationRecord, LinkRecord, MetricsStore, Summary
from tests.cli.runner import sotto
from tests.ops.answering import STATUS, answered, newcomer
from tests.report.sample_run import round_record

ROUNDS = 40
NAMES = ("peer-0", "peer-1", "peer-2")


def record(store: MetricsStore, peer: int, rounds: int) -> None:
    """Write what a peer has measured in its first rounds."""
    store.put(*(round_record(peer, t, ROUNDS) for t in range(rounds)))
    for done in range(10, rounds + 1, 10):
        for split in ("test", "holdout"):
            correct = (done + peer, done)
            store.put(EvaluationRecord(peer=peer, round=done, split=split, correct=correct, total=(50, 50)))
    store.put(LinkRecord(peer=peer, neighbor=(peer + 1) % 3, frames=rounds, frame_bytes=360 * rounds))
    store.flush()


@dataclass
class Devices:
    """Peers that answer control calls, without a network."""

    kits: Path
    running: dict[str, MetricsStore] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    knows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each running peer says of the others."""
    criteria: Any = field(default_factory=lambda: {"accuracy": "higher"})
    precisions: dict[str, Any] = field(default_factory=dict)
    """What each running peer says that it chose to train in."""
    newcomers: list[dict[str, Any]] = field(default_factory=list)
    lies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What else a status holds."""
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    forge: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """What becomes of a page of rows on its way."""

    def start(self, name: str, index: int, rounds: int) -> None:
        store = self.running.setdefault(name, MetricsStore(None))
        record(store, index, rounds)
        self.rounds[name] = rounds

    async def ask(
        self, config: Config, base: Path, peer: int | PeerAddress | None, verb: str, arguments: Any = None
    ) -> dict[str, Any]:
        entry = peer if isinstance(peer, PeerAddress) else config.peers[config.peer.index if peer is None else peer]
        self.asked.append((entry.name, verb, arguments))
        if entry.name not in self.running:
            raise PeerUnreachable(f"nobody listens at {entry.advertise}")
        if verb == "status":
            others = {name: {"state": "member", "problem": None} for name in NAMES if name != entry.name}
            return answered("status", STATUS | {
                "name": entry.name, "round": self.rounds[entry.name], "rounds": ROUNDS,
                "criteria": self.criteria, "newcomers": self.newcomers, "precision": self.precisions.get(entry.name),
                "peers": others | self.knows.get(entry.name, {}),
            } | self.lies.get(entry.name, {}))  # fmt: skip
        columns, rows, last = self.running[entry.name].page(arguments["table"], after=arguments["after"])
        page: dict[str, Any] = json.loads(json.dumps({"columns": columns, "rows": rows, "last": last}))
        return answered("metrics", page if self.forge is None else self.forge(page))


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    kits = tmp_path / "kits"
    config = load(environment={}, overrides=[f"run.rounds={ROUNDS}"])
    write_cluster(kits, config, [Host("127.0.0.1", port) for port in (7700, 7701, 7702)])
    found = Devices(kits)
    monkeypatch.setattr(control, "ask", found.ask)
    return found


def states(members: list[Member]) -> list[str]:
    return [member.state for member in members]


def summed_up(devices: Devices, *, ask: bool = True) -> Summary:
    return write_cluster_summary(devices.kits, collect(devices.kits, ask=ask))


def test_a_run_of_sotto_up_is_no_cluster(devices: Devices, tmp_path: Path) -> None:
    assert is_cluster(devices.kits)
    assert not is_cluster(tmp_path)
    assert not is_cluster(tmp_path / "nothing")


def test_running_peers_hand_over_their_figures(devices: Devices) -> None:
    for index, name in enumerate(NAMES):
        devices.start(name, index, 20)
    summary = summed_up(devices)
    assert summary.missing == []
    assert summary.ended == "3 of 3 peers are running"
    assert summary.completed_rounds == 20
    assert summary.peer_accuracy == [0.4, 0.41, 0.42]
    assert summary.parameters == 9610
    assert summary.frame_bytes == 3 * 20 * 360
    data = load_run(devices.kits)
    assert [len(data.rounds_of(peer)) for peer in range(3)] == [20, 20, 20]
    assert {row.split for row in data.evaluations} == {"test"}, "a hold-out stays on its device"
    assert (devices.kits / "collected").stat().st_mode & 0o777 == 0o700


def test_only_what_is_new_is_asked_for(devices: Devices) -> None:
    devices.start("peer-0", 0, 20)
    collect(devices.kits)
    devices.asked.clear()
    devices.start("peer-0", 0, 30)
    collect(devices.kits)
    own = [(verb, arguments) for name, verb, arguments in devices.asked if name == "peer-0"]
    assert own == [
        ("status", None),
        ("metrics", {"table": "rounds", "after": 19}),
        ("metrics", {"table": "evaluations", "after": 20}),
        ("metrics", {"table": "links", "after": -1}),
    ]
    assert len(load_run(devices.kits).rounds_of(0)) == 30


def test_a_peer_that_was_put_back_forgets_what_came_after(devices: Devices) -> None:
    devices.start("peer-0", 0, 30)
    collect(devices.kits)
    devices.running.clear()
    devices.start("peer-0", 0, 10)
    collect(devices.kits)
    assert len(load_run(devices.kits).rounds_of(0)) == 10


def test_a_peer_that_is_cut_off_is_named_with_what_there_is_of_it(devices: Devices) -> None:
    for index, name in enumerate(NAMES):
        devices.start(name, index, 20)
    collect(devices.kits)
    del devices.running["peer-2"]
    devices.start("peer-0", 0, 25)
    summary = summed_up(devices)
    assert summary.missing == [
        "peer-2 cannot be reached (nobody listens at 127.0.0.1:7702). The figures of its first 20 rounds are here."
    ]
    assert summary.ended == "2 of 3 peers are running; 1 of 3 peers cannot be reached"
    assert len(summary.peer_accuracy) == 3
    page = render(load_run(devices.kits))
    assert "peer-2 cannot be reached" in page
    assert "Ended early" not in page


def test_finished_left_and_lost_peers_are_not_unreachable(devices: Devices) -> None:
    for index, name in enumerate(NAMES):
        devices.start(name, index, 20)
    collect(devices.kits)
    devices.running = {"peer-0": devices.running["peer-0"]}
    devices.knows["peer-0"] = {"peer-1": {"state": "left"}, "peer-2": {"state": "lost"}}
    members = collect(devices.kits)
    assert states(members) == ["running", "left", "lost"]
    summary = write_cluster_summary(devices.kits, members)
    assert summary.missing == [
        "peer-1 has left the run, says peer-0. The figures of its first 20 rounds are here.",
        "peer-2 was excluded from the run as lost, says peer-0. The figures of its first 20 rounds are here.",
    ]
    # Their last accuracies are not those of the run.
    assert summary.members == [0]
    # What is final is remembered when nobody is left to ask.
    devices.start("peer-0", 0, ROUNDS)
    collect(devices.kits)
    devices.running.clear()
    members = collect(devices.kits)
    assert states(members) == ["finished", "left", "lost"]
    assert write_cluster_summary(devices.kits, members).ended == "completed"
    assert states(collect(devices.kits, ask=False)) == ["finished", "left", "lost"]


def test_a_copied_state_folder_counts_where_it_has_more(devices: Devices) -> None:
    devices.start("peer-0", 0, 20)
    summed_up(devices)
    devices.running.clear()
    folder = StateFolder(devices.kits / "peer-0" / "state")
    folder.checkpoints.save(Checkpoint(ROUNDS, {}, {}))
    folder.close()
    store = MetricsStore(devices.kits / "peer-0" / "state" / "metrics.sqlite")
    record(store, 0, ROUNDS)
    store.close()
    members = collect(devices.kits, ask=False)
    assert members[0].recorded == ROUNDS
    assert members[0].standing == standing.Standing("finished", "its state folder", ROUNDS)
    assert write_cluster_summary(devices.kits, members).completed_rounds == ROUNDS
    assert len(load_run(devices.kits).rounds_of(0)) == ROUNDS


def test_a_newcomer_that_no_file_lists_is_asked_too(devices: Devices) -> None:
    devices.start("peer-0", 0, 20)
    devices.newcomers = [newcomer(devices.kits, 3, "garage")]
    devices.start("garage", 3, 10)
    members = collect(devices.kits)
    assert [(member.index, member.name, member.state) for member in members][-1] == (3, "garage", "running")
    assert write_cluster_summary(devices.kits, members).peer_names[3] == "garage"
    assert load_run(devices.kits).peer_name(3) == "garage"


def test_a_peer_of_an_earlier_release_is_named(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(config: Config, base: Path, peer: Any, verb: str, arguments: Any = None) -> dict[str, Any]:
        if verb == "metrics" and peer == 0:
            raise RemoteError("it does not know this call")
        return await devices.ask(config, base, peer, verb, arguments)

    monkeypatch.setattr(control, "ask", ask)
    for index, name in enumerate(NAMES):
        devices.start(name, index, 20)
    summary = summed_up(devices)
    assert summary.missing == [
        "peer-0 answers, but does not hand over its figures: it does not know this call. None of its figures are here."
    ]


def test_figures_that_are_none_are_refused_and_those_of_others_stay(devices: Devices) -> None:
    for index, name in enumerate(NAMES):
        devices.start(name, index, 20)
    devices.forge = lambda page: (
        page | {"rows": [["<script>"] * len(page["columns"])]} if devices.asked[-1][0] == "peer-1" else page
    )
    summary = summed_up(devices)
    assert len(summary.missing) == 1
    assert "peer-1 answers, but does not hand over its figures: sent rounds that are no metrics" in summary.missing[0]
    assert "<script>alert" not in render(load_run(devices.kits))


def test_invented_newcomers_are_asked_nothing(devices: Devices) -> None:
    devices.start("peer-0", 0, 20)
    honest = newcomer(devices.kits, 3, "garage")
    stranger = newcomer(_other_kits(devices.kits.parent / "theirs"), 5, "attic")
    devices.newcomers = [
        *({**honest, "index": index, "name": f"invented-{index}"} for index in range(4, 1000)),
        {**honest, "advertise": "10.0.0.9:22"}, {**honest, "index": 4}, {**honest, "certificate": ""},
        {**honest, "certificate": "00" * 900}, stranger, honest,
    ]  # fmt: skip
    members = collect(devices.kits)
    assert [member.name for member in members] == [*NAMES, "garage"]
    assert {name for name, _, _ in devices.asked} == {*NAMES, "garage"}


def _other_kits(folder: Path) -> Path:
    write_cluster(folder, load(environment={}), [Host("127.0.0.1", 7800), Host("127.0.0.1", 7801)])
    return folder


@pytest.mark.parametrize(
    "lie",
    [
        {"round": -1}, {"round": 1 << 70}, {"rounds": "x"}, {"links": [[]]}, {"criteria": {"accuracy": []}},
        {"newcomers": [{"index": "3"}]}, {"newcomers": [{}] * 3000}, {"peers": {"peer-0": "gone"}}, {"name": None},
        {"precision": {"precision": "int8", "step_s": {"int8": "fast"}}}, {"exit_code": 9, "round": None},
    ],
)  # fmt: skip
def test_a_liar_that_is_first_in_the_list_harms_no_report(devices: Devices, lie: dict[str, Any]) -> None:
    for index, name in enumerate(NAMES):
        devices.start(name, index, 20)
    devices.lies["peer-0"] = lie
    summary = summed_up(devices)
    assert summary.missing[0].startswith("peer-0 cannot be reached (answered 'status' with nonsense: ")
    assert [len(load_run(devices.kits).rounds_of(peer)) for peer in range(3)] == [0, 20, 20]


def test_what_most_peers_say_of_the_run_counts(devices: Devices) -> None:
    for index, name in enumerate(NAMES):
        devices.start(name, index, 20)
    devices.lies["peer-0"] = {"rounds": 1 << 50, "criteria": {"mood": "lower"}}

    def forge(page: dict[str, Any]) -> dict[str, Any]:
        if devices.asked[-1][0] == "peer-0" and "round" in page["columns"]:
            for row in page["rows"]:
                row[page["columns"].index("round")] = 1 << 40
        return page

    devices.forge = forge
    summary = summed_up(devices)
    assert summary.criteria == {"accuracy": "higher"}
    assert f"sent rounds of round {1 << 40}, and the run has {ROUNDS}" in summary.missing[0]


def test_a_peer_that_sends_pages_for_ever_is_given_up(devices: Devices) -> None:
    devices.start("peer-0", 0, 20)
    devices.forge = lambda page: page | {"last": 3}
    summary = summed_up(devices)
    assert "pages that do not go on" in summary.missing[0]


def test_before_the_first_round_there_is_nothing_to_report(devices: Devices) -> None:
    with pytest.raises(
        StateError, match=r"nothing to report yet: peer-0 .*nobody listens[^;]*; peer-1 [^;]*; peer-2 [^;]*$"
    ):
        summed_up(devices)


def test_what_the_models_of_a_task_are_compared_by_comes_from_the_peers(devices: Devices) -> None:
    devices.start("peer-0", 0, 20)
    rmse = EvaluationRecord(peer=0, round=20, split="test", correct=(), total=(), metrics={"RMSE": 0.5})
    devices.running["peer-0"].put(rmse)
    devices.criteria = {"RMSE": "lower"}
    summary = summed_up(devices)
    assert (summary.criteria, summary.peer_metrics, summary.peer_accuracy) == ({"RMSE": "lower"}, {"RMSE": [0.5]}, [])
    # It is remembered where nobody says so any more, and believed only if it can be true.
    assert summed_up(devices, ask=False).criteria == {"RMSE": "lower"}
    devices.criteria = {"RMSE": "<script>"}
    assert summed_up(devices).missing[0].startswith("peer-0 cannot be reached (answered 'status' with nonsense")


def test_what_devices_chose_to_train_in_is_known_when_they_have_ended(devices: Devices) -> None:
    for file in devices.kits.glob("peer-*/peer.toml"):
        write_resolved(load(file, environment={}, overrides=["training.precision=fastest"]), file, file.parent)
    chosen = {name: {"precision": "int8", "step_s": {"float32": 0.002, "int8": 0.001}} for name in NAMES[:2]}
    devices.precisions = chosen
    for index, name in enumerate(NAMES):
        devices.start(name, index, 20)
    summary = summed_up(devices)
    assert (summary.precision, summary.chosen_precisions) == ("int8", chosen)
    devices.precisions["peer-1"] = {"precision": "float32", "step_s": {}}
    assert summed_up(devices).precision == "fastest"
    devices.running.clear()
    assert summed_up(devices).chosen_precisions == {**chosen, "peer-1": devices.precisions["peer-1"]}


def test_sotto_report_writes_page_summary_and_graph(devices: Devices) -> None:
    devices.start("peer-0", 0, 20)
    result = sotto("report", str(devices.kits))
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "1 of 3 peers are running; 2 of 3 peers cannot be reached" in words
    assert "peer-1 cannot be reached" in words
    for name in ("report.html", "summary.json", "graph.svg"):
        assert (devices.kits / name).exists()
    page = (devices.kits / "report.html").read_text()
    assert "unreachable" in page
    assert "collected" in page
    answer = json.loads(sotto("report", str(devices.kits), "--offline", "--json").stdout)
    assert answer["summary"]["peer_states"]["peer-0"] == "unreachable"
    assert sotto("lab", "compare", str(devices.kits)).exit_code == 0


def test_a_damaged_note_of_what_was_known_is_forgotten(devices: Devices) -> None:
    devices.start("peer-0", 0, 20)
    collect(devices.kits)
    (devices.kits / "collected" / "peers.json").write_text('{"peer-1": 3}')
    assert states(collect(devices.kits)) == ["running", "unreachable", "unreachable"]
    shutil.rmtree(devices.kits / "collected")
    assert states(collect(devices.kits, ask=False)) == ["unreachable"] * 3
