"""Numbers that are finite but too large to add up reach neither the model nor a compressor."""

from __future__ import annotations

import numpy as np
import pytest

from peer.compress.payload import Dense, ValueType, num_values
from peer.errors import DivergenceError
from tests.hostile.meaning.liars import PUSH_SUM, SETTINGS, finishes_like_an_honest_run, started, told
from tests.stress.plausible import blown_up


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_huge_values_are_refused_with_their_size(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    for largest in (3e38, 1e38):
        world.refuses(seq, blown_up(honest, largest), "diverged|θ")
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


@pytest.mark.parametrize("algorithm", sorted(SETTINGS.keys() - {"moniqua", "low-rank", "compressed-allreduce"}))
def test_an_honest_peer_ends_rather_than_send_them(algorithm: str) -> None:
    # Moniqua sends residues, which are small whatever the model is, and what low-rank sends is shortened.
    peer = started(algorithm).peers[1]
    peer.participant.algorithm.x[:] = 3e38
    peer.step()
    with pytest.raises(DivergenceError):
        peer.begin(0.0)
