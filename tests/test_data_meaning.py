"""What the numbers in the data of two devices stand for is compared as text, in its order."""

from __future__ import annotations

import os
import unicodedata

import pytest

from peer.data_meaning import (
    DIGEST_BYTES,
    ENTRY_BYTES,
    MOST_ENTRIES,
    Meaning,
    advice,
    meanings_of,
    normal_name,
    refuse_told,
)


def told(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str | None:
    other = Meaning.of("classes", theirs)
    return Meaning.of("classes", ours).difference(other.digest, other.entries, len(other.names))


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (("cat", "dog"), ("cat", "dog"), None),
        (("cat", "dog"), ("dog", "fox"), "number 0 is 'cat' here, and another one there"),
        (("cat", "dog", "fox"), ("cat", "elk", "fox"), "number 1 is 'dog' here"),
        (("cat", "dog"), ("cat", "dog", "fox"), "there are 3 there, and 2 here"),
        (("cat", "dog", "fox"), ("cat", "dog"), "there are 2 there, and 3 here"),
        (("cat", "dog"), ("cat", "elk", "fox"), "number 1 is 'dog' here"),
        (("a", "bc"), ("ab", "c"), "number 0 is 'a' here"),
        (("cat\n",), ("cat",), r"number 0 is 'cat\n' here"),
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
    assert mine.difference(other.digest, other.entries, 30_522) == "they differ between numbers 900 and 929"
    assert "the same tokens, in the same order" in advice("tokens")
    assert "data.classes" in advice("classes")


def test_a_digest_that_differs_counts_whatever_the_entries_say() -> None:
    mine = Meaning.of("classes", ("cat", "dog"))
    assert mine.difference(os.urandom(DIGEST_BYTES), mine.entries, 2) == "it says not where"
    assert mine.difference(os.urandom(DIGEST_BYTES), b"", 1 << 31) == f"there are {1 << 31} there, and 2 here"


@pytest.mark.parametrize(
    ("kind", "digest_bytes", "entry_bytes"),
    [("k" * 65, DIGEST_BYTES, 0), ("k", 31, 0), ("k", DIGEST_BYTES, 3), ("k", DIGEST_BYTES, 4 * MOST_ENTRIES + 4)],
)
def test_what_no_peer_tells_is_refused(kind: str, digest_bytes: int, entry_bytes: int) -> None:
    with pytest.raises(ValueError, match="no "):
        refuse_told(kind, bytes(digest_bytes), bytes(entry_bytes))


def test_a_task_tells_few_kinds() -> None:
    assert [each.kind for each in meanings_of({"features": ["b"], "classes": ["a"]})] == ["classes", "features"]
    for wrong in ({str(number): ["a"] for number in range(9)}, {"": ["a"]}, {"k" * 65: ["a"]}, {"a\n": ["a"]}):
        with pytest.raises(ValueError, match="at most 8 kinds"):
            meanings_of(wrong)
