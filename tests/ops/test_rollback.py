"""Stopped peers go back to an earlier checkpoint, all or none, and nothing is deleted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from peer.errors import StateError
from peer.ops.rollback import newest_common_round, put_back
from peer.state.checkpoints import Checkpoint, StateFolder, find_checkpoints, load_checkpoint
from peer.train.private_step import SECRET_FILE


def a_state(directory: Path, *rounds: int, inbox: int = 0) -> Path:
    """Return a state folder with checkpoints of these rounds, and a journal after the last one."""
    folder = StateFolder(directory, keep=len(rounds) + 1)
    for round_ in rounds:
        waiting: dict[str, object] = {"inbox": [[1, inbox, 4]]} if inbox else {}
        folder.checkpoints.save(Checkpoint(round_, waiting, {"x": np.zeros(round_ + 1, np.float32)}))
    folder.close()
    (directory / f"journal-{rounds[-1] if rounds else 0:08d}.log").write_bytes(b"records")
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


def test_what_is_newer_is_renamed_and_nothing_is_deleted(tmp_path: Path) -> None:
    state = a_state(tmp_path / "state", 10, 20, 30)
    before = content(state)
    put_back([state], 10)
    after = content(state)
    # Going back on purpose begins an era, so that nobody takes it for a state that was lost.
    assert json.loads(after.pop("progress.json"))["era"] == 1
    aside = {name.removeprefix("set-aside-1-"): data for name, data in after.items()}
    assert aside == before
    assert sorted(set(after) - set(before)) == [
        "set-aside-1-checkpoint-00000020.safetensors",
        "set-aside-1-checkpoint-00000030.safetensors",
        "set-aside-1-journal-00000030.log",
    ]
    assert [load_checkpoint(path).round for path in find_checkpoints(state)] == [10]


def test_what_is_set_aside_twice_has_two_numbers(tmp_path: Path) -> None:
    state = a_state(tmp_path / "state", 10, 20)
    put_back([state], 10)
    a_state(state, 20)
    put_back([state], 0)
    assert len([name for name in content(state) if name.startswith("set-aside-1-")]) == 2
    assert len([name for name in content(state) if name.startswith("set-aside-2-")]) == 3
    assert find_checkpoints(state) == []


def test_frames_that_waited_in_the_checkpoint_are_kept_in_a_copy(tmp_path: Path) -> None:
    state = a_state(tmp_path / "state", 10, 20, inbox=7)
    before = content(state)["checkpoint-00000010.safetensors"]
    put_back([state], 10)
    assert content(state)["set-aside-1-checkpoint-00000010.safetensors"] == before
    assert load_checkpoint(find_checkpoints(state)[0]).state == {"inbox": []}


def test_private_peers_do_not_go_back(tmp_path: Path) -> None:
    state = a_state(tmp_path / "state", 10, 20)
    (state / SECRET_FILE).touch()
    before = content(state)
    with pytest.raises(StateError, match="would not count those that are done again"):
        put_back([state], 10)
    assert content(state) == before


def test_all_go_back_or_none(tmp_path: Path) -> None:
    first, second = a_state(tmp_path / "first", 10, 20), a_state(tmp_path / "second", 20)
    before = content(first)
    with pytest.raises(StateError, match="second: has no checkpoint of round 10; it can go back to 0, 20"):
        put_back([first, second], 10)
    with pytest.raises(StateError, match="third: no such state folder"):
        put_back([first, tmp_path / "third"], 20)
    assert content(first) == before
    assert not (tmp_path / "third").exists()


def test_a_peer_that_runs_is_left_alone(tmp_path: Path) -> None:
    state = a_state(tmp_path / "state", 10, 20)
    running = StateFolder(state)
    with pytest.raises(StateError, match="in use by another peer process"):
        put_back([state], 10)
    running.close()


def test_the_newest_round_that_all_have(tmp_path: Path) -> None:
    folders = [a_state(tmp_path / "0", 10, 20, 30), a_state(tmp_path / "1", 20, 30, 40)]
    assert newest_common_round(folders, 40) == 30
    assert newest_common_round(folders, 29) == 20
    assert newest_common_round([*folders, a_state(tmp_path / "2")], 40) == 0
