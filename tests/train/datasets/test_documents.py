"""Texts of a folder: which are held out, what a window holds, and what is refused."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.errors import DataError
from peer.train.datasets.documents import WindowData, find_texts, read_windows


def write(folder: Path, texts: list[str], name: str = "{}.txt") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / name.format(number)).write_text(text, "utf-8")
    return texts


def read(folder: Path, length: int = 4) -> tuple[WindowData, WindowData]:
    return read_windows(find_texts(folder), length)


def texts_in(data: WindowData) -> list[str]:
    return bytes(data.tokens.tolist()).decode().split("\0")[:-1]


def text(number: int) -> str:
    return f"document {number} ä" + "." * (number % 7)


def test_a_tenth_is_held_out_by_its_hash_and_copies_count_once(tmp_path: Path) -> None:
    texts = write(tmp_path, [text(number) for number in range(300)])
    write(tmp_path, texts[:20], "copy-{}.txt")
    train, test = read(tmp_path)
    assert sorted(texts_in(train) + texts_in(test)) == sorted(texts)
    for each in texts:
        held_out = hashlib.sha256(each.encode()).digest()[0] < 26
        assert (each in texts_in(test)) == held_out, each
    assert 15 < len(texts_in(test)) < 50
    (said,) = train.found
    assert said.endswith(f"{len(texts_in(train))} different texts, {len(train.tokens):,} bytes")
    # Names of files make no difference.
    (tmp_path / "0.txt").rename(tmp_path / "zero.txt")
    assert texts_in(read(tmp_path)[0]) == texts_in(train)


def test_two_texts_are_one_to_train_on_and_one_held_out(tmp_path: Path) -> None:
    texts = write(tmp_path, ["first text", "second text"])
    train, test = read(tmp_path)
    assert sorted(texts_in(train) + texts_in(test)) == texts
    assert len(texts_in(train)) == 1


def test_windows_are_packed_and_hold_each_byte_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [f"{name} {text(number)}" for number in range(40)])
    train, test = read(tmp_path, length=16)
    windows, folders = train.batch(torch.arange(len(train)))
    assert (windows.dtype, windows.shape) == (torch.int64, (len(train), 16))
    assert torch.equal(folders, train.labels)
    whole = bytes(train.tokens.tolist())
    for number, name in enumerate(("a", "b")):
        joined = bytes(windows[folders == number].flatten().tolist())
        assert joined in whole
        # Only a rest that fills no window is left out, and no window lies in two folders.
        own = [each for each in texts_in(train) if each.startswith(name)]
        length = sum(len(each.encode()) + 1 for each in own)
        assert 0 <= length - len(joined) < 16
    assert test.labels.unique().tolist() == [0, 1]


def test_models_are_judged_by_a_few_windows_that_are_evenly_spread(tmp_path: Path) -> None:
    write(tmp_path, ["a" * 20_000, "b" * 20_000])
    _, test = read(tmp_path)
    gaps = test.starts.diff().unique().tolist()
    assert (len(gaps), gaps[0] % 4) == (1, 0)
    assert 128 < len(test) <= 256
    assert int(test.starts[-1]) > 19_000


def test_texts_come_from_lines_and_compressed_files_of_all_depths(tmp_path: Path) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    lines = [json.dumps({"text": text(number), "url": "x"}) for number in range(5)]
    (tmp_path / "a" / "deep" / "lines.jsonl").write_text("\n".join(lines))
    (tmp_path / "a" / "packed.txt.gz").write_bytes(gzip.compress(b"packed text"))
    (tmp_path / "a" / ".hidden.txt").write_text("hidden")
    (tmp_path / "a" / "notes.md").write_text("no text by its name")
    (tmp_path / "loose.txt").write_text("loose one")
    (tmp_path / "more.jsonl").write_text('{"text": "another"}\n{"text": ""}\n')
    assert {name: len(paths) for name, paths in find_texts(tmp_path).items()} == {"": 2, "a": 2}
    train, test = read(tmp_path)
    found = texts_in(train) + texts_in(test)
    assert sorted(found) == sorted([*map(text, range(5)), "packed text", "loose one", "another"])


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def guarded(path: str | Path) -> Any:
        if Path(path).name in ("closed", "objects"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    for folder in ("a/.git/objects", "a/b/closed"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "a" / f"{number}.txt").write_text(f"a text, number {number}")
        if folder == "a/.git/objects":
            assert len(find_texts(tmp_path)["a"]) == 2
    with pytest.raises(DataError, match="a/b/closed cannot be read: Permission denied"):
        find_texts(tmp_path)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, r"holds no texts \(\.txt, \.jsonl\)"),
        ({"a.txt": b"same", "b.txt": b"same"}, "holds 1 texts that are in no other: one is held out"),
        ({"a.txt": b"a text", "b.txt": b"caf\xe9"}, "b.txt cannot be read: .*utf-8"),
        ({"a.txt": b"a text", "b.txt": b"a\0b"}, "b.txt holds zero bytes, so it is no text"),
        ({"a.jsonl": b'{"text": "a"}\n{"text": 3}'}, 'a.jsonl, line 2: is no object with a "text"'),
        ({"a.jsonl": b'{"text": "a"}\n{"text": "b"'}, "a.jsonl, line 2: is not valid JSON"),
        ({"a.jsonl": b'{"text": "half \\ud800"}'}, "a.jsonl, line 1: is not valid JSON: .*surrogates not allowed"),
        ({"a.jsonl": b'{"text": "a\\u0000b"}'}, "a.jsonl, line 1 holds zero bytes"),
        (
            {"a.txt": b"short", "b.txt": b"no"},
            "and a window takes 8: add texts, or lower training.task_options.context",
        ),
    ],
)
def test_a_folder_that_holds_no_texts_is_refused_by_name(files: dict[str, bytes], says: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        read(tmp_path, length=8)
