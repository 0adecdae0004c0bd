"""The small files beside the state, all of them: what is written is read, and what cannot be read is said."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from peer.config.options import PeerAddress
from peer.config.precision_choice import PrecisionChoice
from peer.daemon.device import kept, limits
from peer.daemon.device.kept import KeptRates
from peer.daemon.device.limit_rules import Usage
from peer.daemon.members import first_peer_list
from peer.errors import StateError
from peer.records import ACCURACY, Criterion, ModelForm
from peer.state import incarnation, kept_file, kept_progress, statement_counter
from peer.state.disk import Disk
from peer.state.incarnation import Incarnation
from peer.state.journal import Announced, Begun, Call, Called, Lost, Received, Stepped, TimedOut
from peer.state.kept_file import CHOSEN_PRECISION, CLASS_VOTES, SCRIPT_SAYS, KeptFile, KeptShares, ScriptSays
from peer.state.kept_progress import KEPT_PROGRESS, KeptProgress
from peer.state.recovery import StateFiles, begin_anew, begun_round, journal_name
from tests.state.failing_disk import FailingDisk
from tests.state.folders import begin

MODULES = (first_peer_list, kept, limits, incarnation, kept_file, kept_progress, statement_counter)
KEPT: dict[str, KeptFile[Any]] = {
    each.name: each for module in MODULES for each in vars(module).values() if isinstance(each, KeptFile)
}
VALUES: Mapping[str, object] = {
    "average.json": KeptShares(40, (0, 2), {0: b"own", 2: b"\x00\xff"}),
    "class-votes.json": {0: b"own", 3: b"\x00\xff"},
    "incarnation.json": Incarnation(2, is_begun=False),
    "model.json": ModelForm(
        trained={"a.weight": (2, 3), "b": ()},
        private=("c",),
        entries={"a.weight": "a.weight", "tied.weight": "a.weight", "b": "b", "c": "c"},
        without=("fleeting",),
    ),
    "peers.json": [PeerAddress(name="a", advertise="a:1"), PeerAddress(name="b", advertise="b:2", relay="a")],
    "precision.json": PrecisionChoice("int8", {"float32": 0.002, "int8": 0.001}),
    "secret.json": (bytes(range(32)), {"noise_multiplier": 1.5}),
    "progress.json": KeptProgress(era=2, signed={1: b"said"}),
    "rounds.json": ScriptSays(40, (Criterion("perplexity", "lower"), ACCURACY)),
    "rates.json": KeptRates(0.25, 0.01, float32_weight_gradients=True, normal_class_order=False),
    "statements": 1 << 50,
    "usage.json": Usage("2026-11-23", 5, 70),
}


def test_each_has_a_value_here() -> None:
    assert sorted(KEPT) == sorted(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_what_is_kept_is_read_after_a_power_cut_too(name: str) -> None:
    disk, file = FailingDisk(), KEPT[name]
    assert file.read(disk) is None
    file.keep(disk, VALUES[name])
    disk.lose_power()
    assert file.read(disk) == VALUES[name]


def test_rounds_that_an_earlier_release_kept_are_read(tmp_path: Any) -> None:
    (tmp_path / "rounds.json").write_text('{"rounds": 40}')
    assert SCRIPT_SAYS.read(Disk(tmp_path)) == ScriptSays(40)


def test_where_no_folder_is_nothing_is_kept(tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "none", tmp_path / "file"):
        assert CHOSEN_PRECISION.read(Disk(folder)) is None
        assert incarnation.read_folder(folder) == 0


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', "null", '{"a": 1}', "NaN", "[" * 600])
def test_a_damaged_file_is_named_with_what_to_do(name: str, text: str, tmp_path: Any) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StateError, match=rf"^{re.escape(str(tmp_path / name))} is damaged; \w.*\w"):
        KEPT[name].read(Disk(tmp_path))


@pytest.mark.parametrize("name", VALUES)
def test_a_disk_that_refuses_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, file = FailingDisk(), KEPT[name]
    file.keep(disk, VALUES[name])
    disk.fill()
    with pytest.raises(StateError, match=f"^{name}: cannot be written: No space left on device"):
        file.keep(disk, VALUES[name])

    def refuse(name: str) -> bytes:
        raise OSError(errno.EIO, "Input/output error", name)

    monkeypatch.setattr(disk, "read", refuse)
    with pytest.raises(StateError, match=f"^{name} cannot be read: Input/output error; "):
        file.read(disk)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("precision.json", '{"precision": "int4"}'),
        ("precision.json", '{"precision": "int8", "step_s": {"int8": -1.0}}'),
        ("incarnation.json", '{"incarnation": 0, "begun": true}'),
        ("average.json", '{"rounds": 4, "members": [0, "a"], "notes": {}}'),
        ("class-votes.json", '{"1": "?"}'),
        ("model.json", '{"trained": {"a": [0]}, "private": [], "entries": {"a": "a"}, "without": []}'),
        ("model.json", '{"trained": {"a": [2]}, "private": [], "entries": {"a": 1}, "without": []}'),
        ("rounds.json", '{"rounds": 4, "criteria": {}}'),
        ("rounds.json", '{"rounds": 4, "criteria": {"AUROC": "up"}}'),
        ("rounds.json", '{"rounds": 4, "criteria": ["AUROC"]}'),
        ("secret.json", json.dumps({"secret": "00", "budget": {}})),
    ],
)
def test_a_value_that_cannot_be_is_damage(name: str, text: str, tmp_path: Any) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StateError, match="is damaged"):
        KEPT[name].read(Disk(tmp_path))


def test_what_the_sentence_tells_to_write_is_read(tmp_path: Any) -> None:
    (tmp_path / CHOSEN_PRECISION.name).write_text('{"precision": "bfloat16"}')
    assert CHOSEN_PRECISION.read(Disk(tmp_path)) == PrecisionChoice("bfloat16")


def test_notes_are_written_by_number() -> None:
    disk = FailingDisk()
    CLASS_VOTES.keep(disk, {2: b"b", 1: b"a"})
    assert disk.read(CLASS_VOTES.name) == b'{"1": "YQ==", "2": "Yg=="}'
    KEPT_PROGRESS.keep(disk, KeptProgress(signed={1: b"a"}))
    assert disk.read(KEPT_PROGRESS.name) == b'{"era": 0, "signed": {"1": "YQ=="}}'


# -- whether a run has begun -------------------------------------------------------------------------------------------


def test_an_empty_folder_and_a_first_start_have_not_begun() -> None:
    disk = FailingDisk()
    assert begun_round(disk) is None
    StateFiles(disk, {}, keep=1, regular=0).new_journal(0).close()
    assert begun_round(disk) is None


@pytest.mark.parametrize(
    "record", [Received(0.0, 1, 1, b"frame"), TimedOut(0.0), Announced(0.0, b"notice"), Lost(0.0, 1, 0)]
)
def test_what_others_said_before_is_no_step(record: Any) -> None:
    disk = FailingDisk()
    journal = StateFiles(disk, {}, keep=1, regular=0).new_journal(0)
    journal.append(record)
    assert begun_round(disk) is None


@pytest.mark.parametrize("record", [Begun(0.0, 0), Stepped(0, {}), Called(Call.READ, 0.0, 0, 0, ())])
def test_a_step_in_the_first_journal_is_round_0(record: Any) -> None:
    disk = FailingDisk()
    StateFiles(disk, {}, keep=1, regular=0).new_journal(0).append(record)
    assert begun_round(disk) == 0
    assert "rename its state folder" in begin_anew(0)


def test_a_later_checkpoint_or_journal_is_enough() -> None:
    disk = FailingDisk()
    begin(disk, 20)
    assert begun_round(disk) == 20
    disk.create("checkpoint-00000040.safetensors")
    disk.unlink(journal_name(20))
    assert begun_round(disk) == 40
    assert begin_anew(40) == "begin a new run"
