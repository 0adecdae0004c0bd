"""Checkpoints: whole or absent, never half; one process a folder."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from peer.errors import StateError
from peer.state.checkpoints import (
    Checkpoint,
    StateFolder,
    StoredArrays,
    checkpoint_name,
    find_checkpoints,
    laid_aside,
    load_checkpoint,
    parse_checkpoint,
    read_description,
)
from peer.state.disk import Disk, Handle


def _checkpoint(round_: int) -> Checkpoint:
    return Checkpoint(round_, {"seen": [1, 2]}, {"x": np.arange(round_ + 1, dtype=np.float32), "u": np.array([0.5])})


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    folder.checkpoints.save(_checkpoint(7))
    loaded = folder.checkpoints.load(folder.checkpoints.rounds()[-1])
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
    saved = StateFolder(tmp_path).checkpoints
    loaded = load_checkpoint(tmp_path / saved.save(Checkpoint(1, {}, arrays))).arrays
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


def test_an_array_is_read_when_it_is_asked_for_and_in_parts(tmp_path: Path) -> None:
    x = np.arange(9, dtype=np.float32)
    path = tmp_path / StateFolder(tmp_path).checkpoints.save(Checkpoint(1, {}, {"a": np.zeros(5, np.int16), "x": x}))
    arrays = load_checkpoint(path).arrays
    assert isinstance(arrays, StoredArrays)
    vector = arrays.vector("x")
    assert (vector.size, vector.dtype) == (9, np.float32)
    assert vector[2:5].tolist() == [2.0, 3.0, 4.0]
    assert vector[7:20].tolist() == [7.0, 8.0]
    assert np.array_equal(np.asarray(vector), x)
    path.rename(tmp_path / "set-aside")
    assert np.array_equal(arrays["x"], x)
    with (tmp_path / "set-aside").open("r+b") as file:
        file.truncate(path.with_name("set-aside").stat().st_size - 4)
    with pytest.raises(StateError, match="was cut off while it was read"):
        _ = arrays["a"]


def test_arrays_may_wait_for_their_checkpoint_in_a_file(tmp_path: Path) -> None:
    """It has their values as they were, and no name: nothing is left of it when the process ends."""
    folder = StateFolder(tmp_path)
    arrays = {"moments": np.arange(700_000, dtype=np.float32), "text": np.frombuffer(b"{}", np.uint8)}
    arrays["none"] = np.zeros(0, np.uint8)
    now = {name: array.copy() for name, array in arrays.items()}
    aside = laid_aside(folder.disk, arrays)
    arrays["moments"] += 1.0
    assert {each.name for each in tmp_path.iterdir()} == {"lock"}
    found = tmp_path / folder.checkpoints.save(Checkpoint(1, {}, {**aside, "one": np.array(7)}))
    expected = folder.checkpoints.save(Checkpoint(2, {}, {**now, "one": np.array(7)}))
    read, whole = load_checkpoint(found).arrays, load_checkpoint(tmp_path / expected).arrays
    assert {name: array.tobytes() for name, array in read.items()} == {n: a.tobytes() for n, a in whole.items()}
    assert found.stat().st_size == (tmp_path / expected).stat().st_size


def test_a_disk_that_is_full_refuses_arrays_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Handle, parts: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Handle, "append", full)
    with pytest.raises(StateError, match="cannot be written: No space left on device"):
        laid_aside(Disk(tmp_path), {"x": np.zeros(3)})


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, keep=2)
    for round_ in (1, 2, 30, 100):
        folder.checkpoints.save(_checkpoint(round_))
    assert [load_checkpoint(path).round for path in find_checkpoints(tmp_path)] == [30, 100]


def test_of_regular_rounds_as_many_are_kept_beside_the_newest(tmp_path: Path) -> None:
    """Peers that save early, each when its own journal is full, still have a checkpoint of one round in common."""
    folder = StateFolder(tmp_path, keep=2, regular=10)
    for round_ in (10, 20, 30, 33, 36, 39):
        folder.checkpoints.save(_checkpoint(round_))
    assert folder.checkpoints.rounds() == [20, 30, 36, 39]


def test_going_back_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, keep=5)
    for round_ in (10, 20, 30):
        folder.checkpoints.save(_checkpoint(round_))
    assert folder.checkpoints.go_back(25, "aside-") == 20
    newest = folder.checkpoints.load(folder.checkpoints.rounds()[-1])
    assert newest.round == 20
    assert folder.checkpoints.go_back(5, "aside-") == 0
    assert not folder.checkpoints.rounds()
    aside = [tmp_path / f"aside-{checkpoint_name(round_)}" for round_ in (10, 20, 30)]
    assert [load_checkpoint(path).round for path in aside] == [10, 20, 30]


def test_a_second_process_cannot_use_the_folder(tmp_path: Path) -> None:
    first = StateFolder(tmp_path)
    with pytest.raises(StateError, match="in use by another peer process"):
        StateFolder(tmp_path)
    first.close()
    StateFolder(tmp_path).close()


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOLCK, "NFS with locks"),
        (errno.EOPNOTSUPP, "a folder on a local disk"),
        (errno.EIO, "kernel's log"),
        (errno.ENOSYS, "a folder on a local disk"),
    ],
)
def test_a_folder_that_cannot_be_locked_is_in_nobodys_use(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StateError) as caught:
        StateFolder(tmp_path)
    assert os.strerror(number) in str(caught.value)
    assert advice in str(caught.value)
    assert "in use" not in str(caught.value)


def modes(folder: Path) -> dict[str, str]:
    """Return the permissions of a folder and of all below it."""
    return {str(path.relative_to(folder)): oct(path.stat().st_mode & 0o7777) for path in [folder, *folder.rglob("*")]}


def test_only_the_owner_can_read_the_folder(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "run" / "state")
    name = folder.checkpoints.save(_checkpoint(3))
    found = modes(tmp_path / "run" / "state")
    assert (found["."], found[name]) == ("0o700", "0o600")
    assert folder.why_not_private is None


def test_what_an_earlier_release_left_readable_is_mended(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "ledger").mkdir(parents=True)
    for name in ("metrics.sqlite", "ledger/00000001.bin"):
        (state / name).write_bytes(b"of an earlier release")
        (state / name).chmod(0o644)
    (tmp_path / "elsewhere").write_text("what a link leads to is not ours")
    (tmp_path / "elsewhere").chmod(0o644)
    (state / "link").symlink_to(tmp_path / "elsewhere")
    (state / "gone").symlink_to(tmp_path / "nowhere")
    (state / "ledger").chmod(0o755)
    state.chmod(0o755)
    StateFolder(state).close()
    (state / "gone").unlink()
    assert modes(state) == {
        ".": "0o700",
        "lock": "0o600",
        "metrics.sqlite": "0o600",
        "ledger": "0o700",
        "ledger/00000001.bin": "0o600",
        "link": "0o644",
    }


def test_a_folder_for_everybody_stays_one_and_the_peer_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "of somebody").write_text("else")
    (tmp_path / "of somebody").chmod(0o644)
    folder = StateFolder(tmp_path)
    assert folder.why_not_private == "it is a folder for the files of everybody"
    assert modes(tmp_path)["."] == "0o1777"
    assert modes(tmp_path)["of somebody"] == "0o644"


@pytest.mark.parametrize("keep_bytes", [0, 5, 60])
def test_a_truncated_checkpoint_is_refused_in_a_sentence(tmp_path: Path, keep_bytes: int) -> None:
    path = tmp_path / StateFolder(tmp_path).checkpoints.save(_checkpoint(3))
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(StateError, match=str(path)):
        load_checkpoint(path)


@pytest.mark.parametrize("at", [3, 30, 150, -1])
def test_a_changed_byte_anywhere_is_noticed(tmp_path: Path, at: int) -> None:
    path = tmp_path / StateFolder(tmp_path).checkpoints.save(_checkpoint(3))
    data = bytearray(path.read_bytes())
    data[at] ^= 0x04
    path.write_bytes(data)
    with pytest.raises(StateError, match=str(path)):
        load_checkpoint(path)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / StateFolder(tmp_path).checkpoints.save(_checkpoint(3))
    assert safetensors.numpy.load_file(path)["x"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("written", "problem"), [(1, "release 0.2 reads it, and writes this format"), (3, "a later release wrote it")]
)
def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, written: int, problem: str) -> None:
    path = tmp_path / "checkpoint-00000012.safetensors"
    safetensors.numpy.save_file({}, path, {"state": "{}", "round": "12", "format": str(written)})
    with pytest.raises(StateError, match=f"has format {written}, but this release reads 2; {problem}"):
        load_checkpoint(path)


def test_a_leftover_of_an_interrupted_write_is_not_a_checkpoint(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.checkpoints.save(_checkpoint(3))
    (tmp_path / ".checkpoint-00000009.safetensors.new").write_bytes(b"half")
    newest = folder.checkpoints.load(folder.checkpoints.rounds()[-1])
    assert newest.round == 3


def test_no_flipped_bit_passes_for_a_checkpoint(tmp_path: Path) -> None:
    """Names and types of arrays are part of what is checked: a renamed array is as lost as a damaged one."""
    whole = (tmp_path / StateFolder(tmp_path).checkpoints.save(_checkpoint(2))).read_bytes()
    for position in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(StateError):
            parse_checkpoint(io.BytesIO(damaged), "damaged")


def test_what_a_checkpoint_says_is_read_without_its_arrays(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.checkpoints.save(Checkpoint(7, {"members": [[2, 1, 1, 5, 0]]}, {"x": np.ones(1000)}))
    folder.close()
    file = tmp_path / checkpoint_name(7)
    assert read_description(file) == (7, {"members": [[2, 1, 1, 5, 0]]})
    file.write_bytes(file.read_bytes()[:400])
    assert read_description(file)[0] == 7
    for damaged in (b"", b"{}", b"\xff" * 100, (2).to_bytes(8, "little") + b"{}"):
        file.write_bytes(damaged)
        with pytest.raises(StateError, match="cannot be read as a checkpoint"):
            read_description(file)
    with pytest.raises(StateError, match="No such file"):
        read_description(tmp_path / "nothing")
