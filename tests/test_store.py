"""Checkpoints: whole or absent, never half; one process a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.errors import StateError
from peer.store import Checkpoint, StateFolder, find_checkpoints, load_checkpoint


def _checkpoint(round_: int) -> Checkpoint:
    return Checkpoint(round_, {"seen": [1, 2]}, {"x": np.arange(round_ + 1, dtype=np.float32), "u": np.array([0.5])})


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    folder.save(_checkpoint(7))
    loaded = folder.newest()
    assert loaded is not None
    assert (loaded.round, loaded.state) == (7, {"seen": [1, 2]})
    assert loaded.arrays["x"].tobytes() == np.arange(8, dtype=np.float32).tobytes()
    assert loaded.arrays["u"].dtype == np.float64


def test_arrays_of_every_kind_and_shape_come_back(tmp_path: Path) -> None:
    kinds = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    arrays = {kind: np.array([1, 0, 1], kind) for kind in [*kinds, "bool"]} | {
        "none": np.zeros(0, np.float32),
        "one": np.array(7, np.int64),
        "matrix": np.arange(6.0).reshape(2, 3),
        "every second": np.arange(10, dtype=np.float32)[::2],
        "large": np.arange(300_000, dtype=np.float32),
    }
    loaded = load_checkpoint(StateFolder(tmp_path).save(Checkpoint(1, {}, arrays))).arrays
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, keep=2)
    for round_ in (1, 2, 30, 100):
        folder.save(_checkpoint(round_))
    assert [load_checkpoint(path).round for path in find_checkpoints(tmp_path)] == [30, 100]


def test_going_back_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, keep=5)
    for round_ in (10, 20, 30):
        folder.save(_checkpoint(round_))
    assert folder.go_back(25) == 20
    newest = folder.newest()
    assert newest is not None
    assert newest.round == 20
    assert folder.go_back(5) == 0
    assert folder.newest() is None


def test_a_second_process_cannot_use_the_folder(tmp_path: Path) -> None:
    first = StateFolder(tmp_path)
    with pytest.raises(StateError, match="in use by another peer process"):
        StateFolder(tmp_path)
    first.close()
    StateFolder(tmp_path).close()


@pytest.mark.parametrize("keep_bytes", [0, 5, 60])
def test_a_truncated_checkpoint_is_refused_in_a_sentence(tmp_path: Path, keep_bytes: int) -> None:
    path = StateFolder(tmp_path).save(_checkpoint(3))
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(StateError, match=str(path)):
        load_checkpoint(path)


def test_a_leftover_of_an_interrupted_write_is_not_a_checkpoint(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.save(_checkpoint(3))
    (tmp_path / ".checkpoint-00000009.safetensors.123.new").write_bytes(b"half")
    newest = folder.newest()
    assert newest is not None
    assert newest.round == 3
