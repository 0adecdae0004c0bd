"""Digests of the model that a run starts from: what differs is named, and what a neighbour tells is bounded."""

from __future__ import annotations

import hashlib

import pytest

from peer.wire.data_meaning import MOST_ENTRIES, refuse_entries
from peer.wire.start_model import ENTRY_BYTES, Entry, StartModel, Tensors


def entries(count: int, *others: int, form: str = "[2]") -> list[Entry]:
    """Return so many tensors, some of which have other values than they have without."""

    def digest(text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()

    return [(f"t{k}", digest(f"t{k}{form}"), digest(f"{k}{'!' * (k in others)}")) for k in range(count)]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (entries(6), None),
        (entries(6, 4), "t4 has other values there"),
        (entries(6, 1, 2), "t1, t2 have other values there"),
        (entries(6, 0, 1, 2, 3, 5), "t0, t1, t2 and 2 more have other values there"),
        ([*entries(2), *entries(6, form="[3]")[2:]], "t2 has another name, type or shape there"),
        (entries(5), "there are fewer of them there"),
        (entries(7), "there are more of them there"),
    ],
)
def test_what_differs_is_named(theirs: list[Entry], said: str | None) -> None:
    ours, told = StartModel.of("", entries(6), entries(6)), StartModel.of("", theirs, theirs)
    assert ours.difference(told.digest, told.parameters.entries) == said
    assert ours.buffers.differences(told.buffers.entries) == said


def test_only_other_values_are_mended_by_a_seed() -> None:
    ours = StartModel.of("", entries(3), [])
    apart = [StartModel.of("", theirs, []) for theirs in (entries(3, 1), entries(2), entries(3, form="[3]"))]
    found = [ours.difference(each.digest, each.parameters.entries) for each in apart]
    remedies = [ours.remedy(each) for each in (None, ours.difference(b"another", b""), *found)]
    assert [remedy == ours.advice for remedy in remedies] == [True, False, True, False, False]
    assert remedies[-1].startswith("build the same model on all devices")


def test_models_of_many_tensors_tell_no_more_bytes() -> None:
    count = 3 * MOST_ENTRIES - 5
    ours, theirs = Tensors.of(entries(count)), Tensors.of(entries(count, 3 * 700 + 1))
    assert len(ours.entries) <= MOST_ENTRIES * ENTRY_BYTES
    refuse_entries(ours.entries, ENTRY_BYTES)
    assert ours.differences(ours.entries) is None
    assert ours.differences(theirs.entries) == "t2100 to t2102 has other values there"


def test_only_the_whole_digest_says_that_models_are_the_same() -> None:
    ours = StartModel.of("", entries(3), [])
    assert ours.difference(ours.digest, b"") is None
    assert ours.difference(b"another", ours.parameters.entries) == "it says not where"


@pytest.mark.parametrize("told", [b"1234567", b"1" * ENTRY_BYTES * (MOST_ENTRIES + 1)], ids=["not whole", "too many"])
def test_what_is_no_list_of_entries_is_refused(told: bytes) -> None:
    with pytest.raises(ValueError, match=f"{len(told)} bytes are no list of up to 1024 entries"):
        refuse_entries(told, ENTRY_BYTES)
