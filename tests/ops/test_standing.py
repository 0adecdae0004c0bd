"""What became of a silent peer: believed of its folder only where it is final, and of others by its weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peer.config.options import Config, PeerAddress
from peer.gossip.incarnations import Numbering
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.ops.standing import Standing, from_answers, from_average, from_folder, last_figures
from peer.records import RoundRecord
from peer.state.checkpoints import Checkpoint, StateFolder
from peer.state.disk import Disk
from peer.state.kept_file import AVERAGE_FILE, SCRIPT_SAYS, ScriptSays
from peer.state.metrics import EvaluationRecord, MetricsStore

CONFIG = Config(peers=tuple(PeerAddress(name=name) for name in ("ada", "ben"))).model_copy(
    update={"run": Config().run.model_copy(update={"rounds": 40})}
)
AGAIN = Numbering(2).number(0, 1)
LEAVE = Change(ChangeKind.LEAVE, 0, 0, 30)


def save(base: Path, done: int, *changes: Change) -> None:
    folder = StateFolder(base / "state")
    folder.checkpoints.save(Checkpoint(done, {"members": Membership((0, 1), changes).state()}, {}))
    folder.close()


@pytest.mark.parametrize(
    ("done", "changes", "expected"),
    [
        (40, (), Standing("finished", "its state folder", 40)),
        (39, (), None),
        (30, (LEAVE,), Standing("left", "its state folder", 30)),
        # It has announced that it leaves, and was killed before.
        (29, (LEAVE,), None),
        (35, (Change(ChangeKind.LEAVE, 1, 1, 30),), None),
        # It was lost, came back under another number, and left.
        (35, (Change(ChangeKind.LEAVE, AGAIN, AGAIN, 30),), Standing("left", "its state folder", 35)),
        (40, (Change(ChangeKind.LOST, 1, 0, 30),), Standing("finished", "its state folder", 40)),
    ],
)
def test_a_state_folder_tells_what_is_final(
    done: int, changes: tuple[Change, ...], expected: Standing | None, tmp_path: Path
) -> None:
    save(tmp_path, done, *changes)
    assert from_folder(CONFIG, tmp_path) == expected


def test_the_metrics_of_the_last_round_are_enough(tmp_path: Path) -> None:
    assert from_folder(CONFIG, tmp_path) is None
    (tmp_path / "state").mkdir()
    store = MetricsStore(tmp_path / "state" / "metrics.sqlite")
    store.put(RoundRecord(peer=0, round=39, time_s=1.0))
    store.close()
    assert from_folder(CONFIG, tmp_path) == Standing("finished", "its state folder", 40)


def test_the_length_of_a_run_is_that_on_which_a_script_decided(tmp_path: Path) -> None:
    save(tmp_path, 5)
    assert from_folder(CONFIG, tmp_path) is None
    SCRIPT_SAYS.keep(Disk(tmp_path / "state"), ScriptSays(5))
    assert from_folder(CONFIG, tmp_path) == Standing("finished", "its state folder", 5)
    MetricsStore(tmp_path / "state" / "metrics.sqlite").close()
    assert last_figures(CONFIG, tmp_path)["rounds"] == 5


@pytest.mark.parametrize(
    ("done", "changes", "expected"),
    [
        (40, (), Standing("finished", "the folder of ada", 40)),
        (39, (), None),
        (40, (Change(ChangeKind.LOST, 1, 0, 30),), None),
        (40, (Change(ChangeKind.LEAVE, 1, 1, 30),), None),
    ],
)
def test_the_average_in_one_folder_tells_that_the_others_finished_too(
    done: int, changes: tuple[Change, ...], expected: Standing | None, tmp_path: Path
) -> None:
    save(tmp_path, done, *changes)
    assert from_average(CONFIG, tmp_path, 1) is None
    (tmp_path / "state" / AVERAGE_FILE).touch()
    assert from_average(CONFIG, tmp_path, 1) == expected


def test_what_a_silent_peer_told_of_itself_is_in_the_folder_of_another(tmp_path: Path) -> None:
    save(tmp_path, 40)
    store = MetricsStore(tmp_path / "state" / "metrics.sqlite")
    store.put(RoundRecord(peer=0, round=39, time_s=1.0, loss=2.5))
    store.put(EvaluationRecord(peer=1, round=39, split="test", correct=(3,), total=(4,)))
    store.close()
    found = last_figures(CONFIG, tmp_path, 1)
    assert (found["accuracy"], found["loss"], found["payload_bytes"]) == (0.75, None, None)


@pytest.mark.parametrize("name", ["checkpoint-00000040.safetensors", "metrics.sqlite"])
def test_a_damaged_folder_tells_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).write_bytes(b"damaged" * 100)
    assert from_folder(CONFIG, tmp_path) is None


def answer(name: str, *, linked: bool = False, **others: str) -> dict[str, Any]:
    links = {other: {"up": linked} for other in others}
    return {"name": name, "links": links, "peers": {other: {"state": state} for other, state in others.items()}}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], None),
        ([answer("ada", ben="member")], None),
        ([answer("ada", ben="finished")], Standing("finished", "ada")),
        # One of them has not heard of it yet.
        ([answer("ada", ben="member"), answer("cleo", ben="lost")], Standing("lost", "cleo")),
        ([answer("ada", ben="not joined"), answer("cleo", ben="joining")], Standing("joining", "cleo")),
        ([answer("ada", ben="finished"), answer("cleo", ben="left")], Standing("left", "cleo")),
        ([answer("ada", ben="member"), answer("cleo", linked=True, ben="member")], Standing("connected", "cleo")),
        ([answer("ada", linked=True, ben="joining")], Standing("joining", "ada")),
        # Of an earlier release, and of a peer that says what no peer says.
        ([{"name": "ada"}, answer("cleo", ben="on fire")], None),
    ],
)
def test_of_what_others_say_the_latest_news_count(answers: list[dict[str, Any]], expected: Standing | None) -> None:
    assert from_answers("ben", answers) == expected


def test_it_is_told_as_a_sentence() -> None:
    assert Standing("finished", "ada").sentence == "has finished, says ada"
    assert Standing("connected", "ada").sentence == "is connected, says ada"
    assert (
        Standing("left", "its state folder", 30).sentence == "has left the run after 30 rounds, says its state folder"
    )
    assert Standing("not joined", "ada").sentence == "has not joined yet, says ada"
