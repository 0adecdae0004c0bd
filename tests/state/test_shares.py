"""Shares of a final average on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from peer.errors import StateError
from peer.records import ModelForm
from peer.run.summary import average
from peer.state import shares
from peer.state.shares import MOST_CHUNKS, ShareFile, places, write_average

FORM = ModelForm(
    trained={"_orig_mod.a": (7, 11), "b": (), "c": (5,)},
    private=("own",),
    entries={"_orig_mod.a": "_orig_mod.a", "b": "b", "c": "c", "tied": "c", "own": "own"},
    without=(),
)
SIZE = 7 * 11 + 1 + 5


@pytest.fixture
def vectors() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [(random.standard_normal(SIZE) * 10.0 ** random.integers(-20, 20, SIZE)).astype("f4") for _ in range(3)]


@pytest.fixture
def file(tmp_path: Path, vectors: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> ShareFile:
    monkeypatch.setattr(shares, "CHUNK_NUMBERS", 10)
    file = ShareFile(tmp_path / "average.part", SIZE, (2, 5, 9))
    file.open()
    for owner, vector in zip(file.owners, vectors, strict=True):
        file.put_all(owner, vector)
    return file


def test_the_mean_is_the_sum_in_order_and_double_precision(
    tmp_path: Path, file: ShareFile, vectors: list[np.ndarray]
) -> None:
    weights = (0.5, 1.0, 1.5)
    path = tmp_path / "average.safetensors"
    write_average(
        path, places(FORM), lambda begin, end: file.mean(begin, end, sum(weights)), rounds=3, members=(2, 5, 9)
    )
    by_hand = average(list(zip(vectors, weights, strict=True)))
    tensors = load_file(path)
    assert {*tensors} == {"a", "b", "c", "tied"}
    assert np.array_equal(tensors["a"].numpy(), by_hand[:77].reshape(7, 11))
    assert np.array_equal(tensors["b"].numpy(), by_hand[77].reshape(()))
    for name in ("c", "tied"):
        assert np.array_equal(tensors[name].numpy(), by_hand[78:])
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "rounds": "3", "members": "2, 5, 9"}


def test_what_is_not_there_is_missing(file: ShareFile, vectors: list[np.ndarray]) -> None:
    digests = file.put_all(5, vectors[1])
    assert file.missing(5, digests) == set()
    file.put(5, 3, bytes(file.length(3)))
    assert file.missing(5, digests) == {3}
    assert file.length(file.num_chunks - 1) == 4 * (SIZE % 10)


def test_a_large_model_has_no_more_chunks_than_a_note_holds(tmp_path: Path) -> None:
    assert ShareFile(tmp_path / "none", 10**9 + 1, (0,)).num_chunks <= MOST_CHUNKS
    assert not (tmp_path / "none").exists()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "average.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="it is a link"):
        ShareFile(tmp_path / "average.part", 10, (0,)).open()
    assert not (tmp_path / "elsewhere").exists()
