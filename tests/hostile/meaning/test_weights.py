"""A mixing weight is that of the round's graph, and a push-sum weight is part of what the run began with."""

from __future__ import annotations

import math

import pytest

from tests.hostile.meaning.liars import PUSH_SUM, SETTINGS, finishes_like_an_honest_run, started, told
from tests.node.durable_peers import LATE


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_mixing_weight_that_the_graph_does_not_have_is_refused(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    weight = honest.mixing_weight
    for lie in (2.0, -weight, 1.0 - weight / 2, weight + 1e-9, -0.0, 1e300, math.nextafter(1.0, 2.0)):
        world.refuses(seq, told(honest, mixing_weight=lie), "told the weights")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_push_weight_that_nobody_can_have_is_refused(algorithm: str) -> None:
    world = started(algorithm)
    seq, honest = world.until()
    lies = [0.0, 3.1, 1e300, 5e-324] if algorithm in PUSH_SUM else [0.0, 0.5, math.nextafter(1.0, 2.0), 1e300]
    for u in lies:
        world.refuses(seq, told(honest, push_weight=u), "told the weights")
    finishes_like_an_honest_run(world)


@pytest.mark.parametrize("algorithm", ["sgp", "quant-sgp", "choco-sgd"])
def test_so_is_a_message_that_comes_late(algorithm: str) -> None:
    # What came late was judged only when it was applied, between two rounds.
    world = started(algorithm, late=LATE, rounds=12, lag=lambda sender, number: 40 * (sender == 0 and number % 5 == 0))
    seq, honest = world.until(at_round=4)
    world.refuses(seq, told(honest, mixing_weight=2.0), "told the weights")
    world.run()


def test_a_lie_before_its_round_ends_nobody_at_a_restart_either() -> None:
    world = started("sgp")
    seq, honest = world.until(at_round=3)
    world.refuses(seq, told(honest, mixing_weight=2.0), "told the weights")
    recovery = world.restart(1)
    assert not recovery.notices
    finishes_like_an_honest_run(world)
