"""Text data sets, small ones in the published formats, and BERT's pieces."""

from __future__ import annotations

import gzip
import lzma
import sys
from pathlib import Path

import pytest
import torch

from peer.errors import DataError
from peer.train.datasets import text_files
from peer.train.datasets.text_files import Sentences, read_ag_news, read_sentence_lengths, read_sst2
from peer.train.datasets.tokens import TextData, make_tokenizer, read_vocabulary

PIECES = [
    "[PAD]",
    "[unused0]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "film",
    "is",
    "un",
    "##watch",
    "##able",
    "!",
    "caf",
    "##e",
]


@pytest.fixture
def vocabulary(tmp_path: Path) -> dict[str, int]:
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return read_vocabulary(tmp_path / "vocab.txt")


def test_ag_news_joins_title_and_description(tmp_path: Path):
    rows = '"3","Fears for T N","Unions ""representing"" workers\\nat Turner"\n"1","Oil\\prices","fall"\n'
    (tmp_path / "train.csv").write_text(rows)
    read = read_ag_news(tmp_path, "train")
    assert read.texts == ('Fears for T N Unions "representing" workers at Turner', "Oil prices fall")
    assert read.labels.tolist() == [2, 0]


@pytest.mark.parametrize("name", ["sentiment-train", "sentiment-train.gz", "sentiment-train.xz", "train.tsv"])
def test_sst2_is_read_in_both_of_its_formats(tmp_path: Path, name: str):
    lines = "contains no wit , only labored gags \t0\na charming journey . \t1\n"
    if name == "train.tsv":
        lines = "sentence\tlabel\n" + lines
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(lines.encode()))
    read = read_sst2(tmp_path, "train")
    assert read.texts == ("contains no wit , only labored gags", "a charming journey .")
    assert read.labels.tolist() == [0, 1]


def test_sentence_lengths_come_in_three_splits(tmp_path: Path):
    (tmp_path / "sentence_length.txt").write_text("tr\t0\tShort one .\nte\t5\tLong .\nva\t3\tMiddle .\ntr\t2\tMore .\n")
    read = read_sentence_lengths(tmp_path)
    assert read["tr"].texts == ("Short one .", "More .")
    assert [read[split].labels.tolist() for split in ("tr", "va", "te")] == [[0, 2], [3], [5]]


LIES = [
    ("ag", "train.csv", b'"5","a","b"\n', "line 1: the class is '5'; classes range from 1 to 4"),
    ("ag", "train.csv", b'"1","a","b"\n"2","a"\n', "line 2: 2 fields instead of class, title and description"),
    ("ag", "train.csv", b"", "contains no sentences"),
    ("ag", "train.csv", b'"1","a","\xff"\n', "cannot be read"),
    ("sst", "sentiment-train", b"no label here\n", "line 1: missing tab"),
    ("sst", "sentiment-train", b"good\t2\n", "classes range from 0 to 1"),
    ("sst", "sentiment-train", "good\t²\n".encode(), "line 1: the class is"),
    ("sst", "sentiment-train.gz", gzip.compress(b"good\t1\n" * 999, mtime=0)[:-9], "cannot be read"),
    ("length", "sentence_length.txt", b"tr\t6\tx\n", "classes range from 0 to 5"),
    ("length", "sentence_length.txt", b"xx\t1\tx\n", "line 1: expected tr, va or te"),
    ("length", "sentence_length.txt", b"tr\t1\tx\n", "contains no sentences"),
]


@pytest.mark.parametrize(("kind", "name", "content", "sentence"), LIES)
def test_files_in_another_format_are_refused_with_the_line(tmp_path: Path, kind, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    readers = {
        "ag": lambda: read_ag_news(tmp_path, "train"),
        "sst": lambda: read_sst2(tmp_path, "train"),
        "length": lambda: read_sentence_lengths(tmp_path),
    }
    with pytest.raises(DataError, match=sentence):
        readers[kind]()


def test_lines_without_an_end_are_refused_before_they_fill_the_memory(tmp_path: Path, monkeypatch):
    (tmp_path / "sentiment-train.gz").write_bytes(gzip.compress(b"a" * 100_000))
    with pytest.raises(DataError, match="line 1: more than 65536 characters"):
        read_sst2(tmp_path, "train")
    monkeypatch.setattr(text_files, "MAX_LINES", 2)
    (tmp_path / "sentiment-train").write_text("good\t1\n" * 3)
    with pytest.raises(DataError, match="more than 2 lines"):
        read_sst2(tmp_path, "train")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"does not contain sentiment-dev or dev\.tsv"):
        read_sst2(tmp_path, "dev")


# Pieces


def test_sentences_are_cut_as_berts(vocabulary: dict[str, int]):
    tokenizer = make_tokenizer(vocabulary, length=32)
    assert tokenizer.encode("The FILM is unwatchable!").tokens == [
        "[CLS]", "the", "film", "is", "un", "##watch", "##able", "!", "[SEP]",
    ]  # fmt: skip
    assert tokenizer.encode("café").tokens == ["[CLS]", "caf", "##e", "[SEP]"], "accents are stripped"
    assert tokenizer.encode("zebra").tokens == ["[CLS]", "[UNK]", "[SEP]"]


def test_long_sentences_keep_their_end_mark(vocabulary: dict[str, int]):
    tokens = make_tokenizer(vocabulary, length=5).encode("the film is the film is").tokens
    assert tokens == ["[CLS]", "the", "film", "is", "[SEP]"]


def test_a_batch_is_padded_to_its_longest_sentence(vocabulary: dict[str, int]):
    sentences = Sentences(("the film", "the " * 9, "is !"), torch.tensor([1, 0, 1]))
    data = TextData(sentences, make_tokenizer(vocabulary, length=32), padding=0)
    pieces, labels = data.batch(torch.tensor([2, 0]))
    assert pieces.tolist() == [[3, 7, 11, 4, 0, 0, 0, 0], [3, 5, 6, 4, 0, 0, 0, 0]]
    assert labels.tolist() == [1, 1]
    assert data.batch(torch.tensor([0, 1]))[0].shape == (2, 16)
    assert torch.equal(data.batch(torch.tensor([2, 0]))[0], pieces)


def test_a_vocabulary_that_is_not_berts_is_refused(tmp_path: Path):
    (tmp_path / "v.txt").write_text("[PAD]\n[UNK]\nthe\n")
    with pytest.raises(DataError, match=r"lacks \[CLS\], \[SEP\]"):
        read_vocabulary(tmp_path / "v.txt")
    (tmp_path / "v.txt").write_text("\n".join([*PIECES, "the"]))
    with pytest.raises(DataError, match="contains a token twice"):
        read_vocabulary(tmp_path / "v.txt")
    with pytest.raises(DataError, match="cannot be read"):
        read_vocabulary(tmp_path / "nowhere.txt")


def test_without_tokenizers_one_is_told_what_to_install(vocabulary: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'sottovoce\[text\]'"):
        make_tokenizer(vocabulary, length=8)
