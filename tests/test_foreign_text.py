"""Texts of others hold nothing that a terminal obeys."""

from __future__ import annotations

import pytest

from peer.errors import RemoteProtocolError
from peer.foreign_text import printable, printable_values, quote

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
