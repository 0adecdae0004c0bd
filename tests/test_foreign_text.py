"""Texts of others hold nothing that a terminal obeys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peer.config.options import load
from peer.errors import ConfigError, RemoteProtocolError
from peer.foreign_text import printable, printable_values, quote
from tests.cli.runner import sotto

HOSTILE = "a\x1b[31mred\r\nINFO all is well\u202etxt.exe\x9b2J\u2028\x00"


@pytest.mark.parametrize("text", [printable(HOSTILE), quote(HOSTILE), str(RemoteProtocolError(HOSTILE))])
def test_escapes_line_breaks_and_changes_of_direction_are_taken_out(text: str) -> None:
    assert text.isprintable()
    assert "red" in text


def test_a_text_is_cut() -> None:
    assert len(printable("x" * 10_000)) == 500
    assert len(printable("x" * 10_000, None)) == 10_000
    assert len(quote("x" * 10_000)) == 82


def test_all_texts_of_a_json_value_are_cleaned_and_the_rest_stays() -> None:
    assert printable_values({"a\n": ["b\x1b", {"c\t": None}], "d": 1.5, "e": True}) == {
        "a ": ["b ", {"c ": None}],
        "d": 1.5,
        "e": True,
    }


@pytest.mark.parametrize(
    ("encoding", "sentence"),
    [
        ("utf-16", "is UTF-16 text, as PowerShell's > writes it: save it as UTF-8"),
        ("latin-1", "is not UTF-8 text"),
    ],
)
def test_a_file_in_another_encoding_is_named_with_what_helps(encoding: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_bytes("# Größe\n".encode(encoding))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load(tmp_path / "peer.toml", environment={})
    graph = (f"graph.file={tmp_path / 'peer.toml'}", "graph.kind=file")
    result = sotto("lab", "validate", "--peers", "2", *(word for setting in graph for word in ("--set", setting)))
    assert (result.exit_code, sentence in result.stderr) == (2, True)
