"""Data sets by name: fetched whole, recorded where nobody publishes a checksum, unpacked with care."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.errors import ConfigError, DataError
from peer.train.datasets import catalogue
from peer.train.datasets.catalogue import DATA_SETS, DataSet, RemoteFile, fetch, read_record, unpack
from peer.train.datasets.image_files import CIFAR10, CIFAR100, CifarLayout
from peer.train.listed import task_info
from peer.train.tasks import TASKS
from tests.cli.runner import sotto
from tests.train.datasets.file_server import Shelf, serving

FIRST, SECOND = b"one" * 1000, b"two" * 500


def archive(*names: str) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    return memory.getvalue()


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """Two data sets: one of two files, of which one has a known checksum, and one that is an archive."""
    with serving({"a.bin": FIRST, "b.txt": SECOND, "pack.tgz": archive("pack/x/1", "pack/y/2")}) as shelf:
        known = hashlib.sha256(FIRST).hexdigest()
        files = (
            RemoteFile("a.bin", shelf.url, known, 3000),
            RemoteFile("b.txt", shelf.url),
        )
        renamed = (RemoteFile("c.jsonl", shelf.url, known, there="a.bin"),)
        sets = {
            "two": DataSet("Two files.", "digits", files),
            "renamed": DataSet("A file of another name.", "text", renamed),
            "packed": DataSet("An archive.", "digits", (RemoteFile("pack.tgz", shelf.url),), unpacks=True),
        }
        monkeypatch.setattr(catalogue, "DATA_SETS", sets)
        yield shelf


@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100])
def test_the_archive_of_cifar_that_is_fetched_is_the_one_that_is_read(layout: CifarLayout):
    assert [file.name for file in DATA_SETS[layout.task].files] == [f"{layout.archive}.tar.gz"]


def test_every_data_set_is_for_a_task_and_comes_over_an_authenticated_connection():
    names = set(DATA_SETS) - {"bert-vocabulary", "c4", "gpt2-tokenizer"}
    assert names == set(TASKS) - {"clusters", "digits", "synthetic", "image-folder", "text"}
    for item in DATA_SETS.values():
        assert item.task in TASKS
        assert item.summary.endswith(".")
        assert not item.option or item.option in task_info(item.task).options
        for file in item.files:
            assert file.url.startswith("https://")
            assert file.sha256 is None or re.fullmatch("[0-9a-f]{64}", file.sha256)


def test_all_files_come_and_unknown_checksums_are_recorded(shelf: Shelf, tmp_path: Path):
    found = fetch("two", tmp_path / "d")
    assert [file.path.name for file in found.files] == ["a.bin", "b.txt"]
    assert found.recorded == ("b.txt",)
    assert read_record(tmp_path / "d") == {"b.txt": hashlib.sha256(SECOND).hexdigest()}
    assert fetch("two", tmp_path / "d").recorded == ()
    assert len(shelf.asked) == 2


def test_a_file_may_have_another_name_here(shelf: Shelf, tmp_path: Path):
    for mirror in (None, shelf.url):
        (found,) = fetch("renamed", tmp_path / str(mirror is None), mirror=mirror).files
        assert (found.path.name, found.path.read_bytes()) == ("c.jsonl", FIRST)


def test_a_recorded_checksum_holds_from_then_on(shelf: Shelf, tmp_path: Path):
    fetch("two", tmp_path)
    (tmp_path / "b.txt").unlink()
    shelf.files["b.txt"] = SECOND[::-1]
    with pytest.raises(DataError, match=r"b\.txt: the file received has the SHA-256"):
        fetch("two", tmp_path)


def test_an_unknown_name_is_told_the_others(shelf: Shelf, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"NAME: unknown data set \(got 'tow'\); valid: two, renamed, packed"):
        fetch("tow", tmp_path)


def test_an_archive_is_unpacked_once(shelf: Shelf, tmp_path: Path):
    fetch("packed", tmp_path)
    assert (tmp_path / "pack/x/1").read_bytes() == b"abc"
    (tmp_path / "pack/x/1").write_bytes(b"own")
    fetch("packed", tmp_path)
    assert (tmp_path / "pack/x/1").read_bytes() == b"own"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["SHA256SUMS", "pack", "pack.tgz"]


@pytest.mark.parametrize(
    "content",
    [archive("pack/../../evil"), archive("/evil", "pack/1"), b"no archive", archive(), archive("p/1")[:40]],
    ids=["climbs", "absolute", "no archive", "empty", "cut"],
)
def test_archives_that_reach_out_or_are_damaged_leave_nothing(tmp_path: Path, content: bytes):
    folder = tmp_path / "deep" / "down"
    folder.mkdir(parents=True)
    (folder / "a.tgz").write_bytes(content)
    with pytest.raises(DataError):
        unpack(folder / "a.tgz")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.tgz"]


def test_the_command_fetches_and_says_how_to_use_it(shelf: Shelf, tmp_path: Path):
    result = sotto("data", "fetch", "two", "-o", str(tmp_path / "d"))
    assert result.exit_code == 0, result.output
    assert f"fetched    {tmp_path}/d/a.bin (3,000 bytes, SHA-256 " in result.stdout
    assert f"use it with: --task digits --set data.directory={tmp_path}/d" in result.stdout
    again = json.loads(sotto("data", "fetch", "two", "-o", str(tmp_path / "d"), "--json").stdout)
    assert [file["fetched_bytes"] for file in again["files"]] == [0, 0]
    assert again["files"][0]["sha256"] == hashlib.sha256(FIRST).hexdigest()


def test_a_mirror_is_asked_in_place_of_the_official_address(shelf: Shelf, tmp_path: Path):
    with serving({"m/a.bin": FIRST, "m/b.txt": SECOND}) as mirror:
        result = sotto("data", "fetch", "two", "-o", str(tmp_path), "--mirror", f"{mirror.url}/m/", "--json")
    assert result.exit_code == 0, result.output
    assert (len(shelf.asked), len(mirror.asked)) == (0, 2)


def test_a_file_for_an_option_is_named_wherever_the_task_looks(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    item = DataSet("One file.", "text", (RemoteFile("a.bin", shelf.url),), option="tokenizer")
    monkeypatch.setattr(catalogue, "DATA_SETS", {"one": item})
    result = sotto("data", "fetch", "one")
    assert f"use it with: --set training.task_options.tokenizer={tmp_path}/data/one/a.bin" in result.stdout


def test_what_went_wrong_is_one_sentence(shelf: Shelf, tmp_path: Path):
    shelf.files["a.bin"] = FIRST[::-1]
    result = sotto("data", "fetch", "two", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("sotto: error: http://127.0.0.1")
    assert "expected" in result.stderr


def test_the_list_names_every_data_set():
    rows = json.loads(sotto("data", "list", "--json").stdout)
    assert [row["name"] for row in rows] == list(DATA_SETS)
    assert all(row["name"] in sotto("data", "list").stdout for row in rows)
