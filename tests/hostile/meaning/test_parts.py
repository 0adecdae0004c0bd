"""A part of a sum has the numbers that its owner adds up, in the form of the run, and weighs what a member weighs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from peer import wire
from peer.compress.payload import Dense, Levels, Sparse, ValueType, num_values
from peer.wire.message import Message
from tests.hostile.meaning.liars import (
    LAYOUT,
    RECEIVER,
    SENDER,
    LiarWorld,
    finishes_like_an_honest_run,
    started,
    told,
)


def _due(phase: int, algorithm: str = "low-rank") -> tuple[LiarWorld, int, Message]:
    """Return a run in which a part of that phase waits to be read."""
    world = started(algorithm)
    seq, honest = world.until()
    while honest.phase != phase:
        # Once peer 1 has read it, and all others have done their part.
        world.queues[SENDER, RECEIVER].popleft()
        world.perform(RECEIVER, world.peers[RECEIVER].receive(SENDER, seq, wire.encode(honest, LAYOUT), world.now))
        seq, honest = world.until()
    return world, seq, honest


def test_other_numbers_than_the_owner_adds_up_are_refused() -> None:
    for phase in (0, 1):
        world, seq, honest = _due(phase)
        exponents, codes = honest.layers
        for lie in ((exponents, _cut(codes)), (_longer(exponents), codes), (exponents, _longer(codes))):
            world.refuses(seq, told(honest, layers=lie), "numbers in . pieces of the part that peer . adds up")
        finishes_like_an_honest_run(world)


def test_another_form_is_refused() -> None:
    world, seq, honest = _due(0)
    exponents, codes = honest.layers
    assert isinstance(codes, Levels)
    unused = replace(codes, codes=np.zeros_like(codes.codes))
    lies = [
        (),
        (exponents,),
        (codes, exponents, codes),
        (exponents, unused),
        (exponents, replace(codes, scale=2.0)),
        (exponents, replace(codes, base=-127)),
        (replace(exponents, step=2), codes),
        (exponents, replace(codes, bits=7, codes=codes.codes >> 1)),
    ]
    for lie in lies:
        world.refuses(seq, told(honest, layers=lie), "in a form that this run does not have")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("phase", [0, 1])
def test_other_numbers_than_the_owner_adds_up_are_refused_from_any_compressor(phase: int) -> None:
    world, seq, honest = _due(phase, "compressed-allreduce")
    first, *rest = honest.layers
    assert isinstance(first, Sparse)
    more = replace(first, size=first.size + 1)
    for lie in (
        (),
        tuple(rest),
        (*honest.layers, first),
        (more, *rest),
        (*rest, more),
        (_numbers(9.0, first.size - 1),),
    ):
        world.refuses(seq, told(honest, layers=lie), "numbers in . pieces of the part that peer . adds up")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("phase", [0, 1])
def test_numbers_that_no_honest_part_has_are_refused(phase: int) -> None:
    world, seq, honest = _due(phase, "compressed-allreduce")
    sizes = [num_values(layer) for layer in honest.layers]
    for largest, text in ((1e38, "has diverged: it sent numbers up to 1e.38"), (1e9, "sent what no honest peer does")):
        lie = tuple(_numbers(largest, size) for size in sizes)
        world.refuses(seq, told(honest, layers=lie), text)
    finishes_like_an_honest_run(world)


def test_a_sparse_part_is_none_of_low_rank() -> None:
    world, seq, honest = _due(0)
    world.refuses(
        seq, told(honest, layers=(_numbers(1.0, 2), _numbers(1.0, 3))), "in a form that this run does not have"
    )
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", ["low-rank", "compressed-allreduce"])
def test_a_sum_of_more_or_fewer_than_the_members_is_refused(algorithm: str) -> None:
    world, seq, honest = _due(1, algorithm)
    assert honest.mixing_weight == 1 / 3
    for weight in (1 / 2, 1 / 4, 1.0, 0.0):
        world.refuses(seq, told(honest, mixing_weight=weight), "told the weights")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", ["low-rank", "compressed-allreduce"])
def test_a_part_of_a_phase_comes_once(algorithm: str) -> None:
    world, seq, honest = _due(1, algorithm)
    world.refuses(seq, told(honest, phase=0), "out of turn")
    finishes_like_an_honest_run(world)


def _numbers(value: float, size: int) -> Dense:
    return Dense(np.full(size, value, np.float32), ValueType.FLOAT32)


def _cut(layer: object) -> Levels:
    assert isinstance(layer, Levels)
    return replace(layer, codes=layer.codes[:-1])


def _longer(layer: object) -> Levels:
    assert isinstance(layer, Levels)
    return replace(layer, codes=np.append(layer.codes, layer.codes[:1]))
