"""What the numbers in the data of two devices stand for is compared as text, in its order."""

from __future__ import annotations

import os
import unicodedata

import pytest

from peer.foreign_text import normal_name
from peer.wire.data_meaning import (
    DIGEST_BYTES,
    ENTRY_BYTES,
    MOST_ENTRIES,
    Meaning,
    meanings_of,
    refuse_told,
)


def told(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str | None:
    other = Meaning.of("classes", theirs)
    mine = Meaning.of("classes", ours)
    return mine.difference(other.digest, other.entries, len(other.names), here="ada", there="ben")


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (("cat", "dog"), ("cat", "dog"), None),
        (
            ("cat", "dog"),
            ("dog", "fox"),
            "the classes of ben are not those of ada: number 0 is 'cat' at ada, and another one at ben",
        ),
        (("cat", "dog", "fox"), ("cat", "elk", "fox"), "number 1 is 'dog' at ada"),
        (("cat", "dog"), ("cat", "dog", "fox"), "ben has 3 and ada 2"),
        (("cat", "dog", "fox"), ("cat", "dog"), "ben has 2 and ada 3"),
        (("cat", "dog"), ("cat", "elk", "fox"), "number 1 is 'dog' at ada"),
        (("a", "bc"), ("ab", "c"), "number 0 is 'a' at ada"),
        (("cat\n",), ("cat",), r"number 0 is 'cat\n' at ada"),
    ],
)
def test_what_differs_is_named_by_ones_own_names(ours: tuple[str, ...], theirs: tuple[str, ...], words: str) -> None:
    said = told(ours, theirs)
    assert said is None if words is None else words in str(said)


def test_names_are_text_however_a_file_system_writes_them() -> None:
    one, other = (unicodedata.normalize(form, "Ähre") for form in ("NFC", "NFD"))
    assert one != other
    assert told((one, "Zebra"), (other, "Zebra")) is None
    assert normal_name(other) == one


def test_of_a_long_list_the_place_is_named() -> None:
    names = tuple(f"piece {number}" for number in range(30_522))
    mine = Meaning.of("tokens", names)
    assert len(mine.entries) <= MOST_ENTRIES * ENTRY_BYTES
    other = Meaning.of("tokens", (*names[:900], "another", *names[901:]))
    said = mine.difference(other.digest, other.entries, 30_522, here="ada", there="ben")
    assert said == (
        "the tokens of ben are not those of ada: they differ between numbers 900 and 929; use the same tokens, in the"
        " same order, on all devices"
    )


def test_of_each_name_four_bytes_are_told() -> None:
    told = Meaning.of("classes", ("cat", "dog", "elephant"))
    assert (ENTRY_BYTES, len(told.entries)) == (4, 3 * 4)
    assert b"elep" not in told.entries


def test_a_digest_that_differs_counts_whatever_the_entries_say() -> None:
    mine = Meaning.of("classes", ("cat", "dog"))
    for entries, count, words in (
        (mine.entries, 2, "it says not where"),
        (b"", 1 << 31, "ben has 2147483648 and ada 2"),
    ):
        said = mine.difference(os.urandom(DIGEST_BYTES), entries, count, here="ada", there="ben")
        assert f"the classes of ben are not those of ada: {words}; use the same" in str(said)
        assert "data.classes" in str(said)


@pytest.mark.parametrize(
    ("kind", "digest_bytes", "entry_bytes"),
    [("k" * 65, DIGEST_BYTES, 0), ("k", 31, 0), ("k", DIGEST_BYTES, 3), ("k", DIGEST_BYTES, 4 * MOST_ENTRIES + 4)],
)
def test_what_no_peer_tells_is_refused(kind: str, digest_bytes: int, entry_bytes: int) -> None:
    with pytest.raises(ValueError, match="no "):
        refuse_told(kind, bytes(digest_bytes), bytes(entry_bytes))


def test_a_task_tells_few_kinds() -> None:
    assert [each.kind for each in meanings_of({"features": ["b"], "classes": ["a"]})] == ["classes", "features"]
    with pytest.raises(ValueError, match="no list of names"):
        meanings_of({"classes": "cat"})
    for wrong in ({str(number): ["a"] for number in range(9)}, {"": ["a"]}, {"k" * 65: ["a"]}, {"a\n": ["a"]}):
        with pytest.raises(ValueError, match="at most 8 kinds"):
            meanings_of(wrong)
