"""Numbers that are finite but too large to add up reach neither the model nor a compressor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from peer.compress import block_float
from peer.compress.payload import Dense, LayerPayload, Residues, ValueType, num_values
from peer.errors import DivergenceError
from peer.wire.message import Message, MessageKind
from tests.hostile.meaning.liars import PUSH_SUM, SETTINGS, finishes_like_an_honest_run, started, told


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_huge_values_are_refused_with_their_size(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    for largest in (3e38, 1e38):
        layers = tuple(_blown_up(layer, largest) for layer in honest.layers)
        if honest.kind is MessageKind.PART:
            layers = block_float.encode(np.full(num_values(honest.layers[1]), largest), _sizes_of(honest), 8)
        world.refuses(seq, told(honest, layers=layers), "diverged|θ")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", ["moniqua", "moniqua-d2"])
def test_numbers_in_the_place_of_a_code_are_refused(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    for number, layer in enumerate(honest.layers):
        dense = Dense(np.full(num_values(layer), 1e10, np.float32), ValueType.FLOAT32)
        layers = (*honest.layers[:number], dense, *honest.layers[number + 1 :])
        world.refuses(seq, told(honest, layers=layers), f"sent layer {number} whole, where all send a code")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", PUSH_SUM)
def test_so_are_values_that_a_small_push_weight_makes_huge(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    world.refuses(seq, told(honest, push_weight=2e-38), "diverged")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", sorted(SETTINGS.keys() - {"moniqua"}))
def test_an_honest_peer_ends_rather_than_send_them(algorithm: str) -> None:
    # Moniqua sends residues, which are small whatever the model is.
    peer = started(algorithm).peers[1]
    peer.participant.algorithm.x[:] = 3e38
    peer.step()
    with pytest.raises(DivergenceError):
        peer.begin(0.0)


def _sizes_of(part: Message) -> npt.NDArray[np.int64]:
    """Return sizes of as many pieces as a part has."""
    pieces, numbers = map(num_values, part.layers)
    return np.array([1] * (pieces - 1) + [numbers - pieces + 1], np.int64)


def _blown_up(layer: LayerPayload, largest: float) -> LayerPayload:
    if isinstance(layer, Residues):
        return replace(layer, theta=float(np.float32(largest)))
    # Levels have no room for such numbers, but nobody is bound to the compressor of the run.
    return Dense(np.full(num_values(layer), largest, np.float32), ValueType.FLOAT32)
