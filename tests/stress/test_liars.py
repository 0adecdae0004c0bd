"""The liars of the fault simulator and of the attack tool: their numbers add up, and what they say can be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from peer import wire
from peer.gossip.mixing import whole
from peer.wire.message import Message, MessageKind
from tests.stress.attack.meaning.lies import LIES
from tests.stress.chaos import has_liar
from tests.stress.faults import Scenario, World
from tests.stress.faults.liar import FALSEHOODS, Tongue
from tests.stress.faults.scenario import CASES

SGP, TWO_FACED = 0, 32
"""Seeds."""


def tongue() -> Tongue:
    return Tongue(Scenario(SGP, 10, lies=True), lambda *what: None)


def test_a_frame_that_is_added_moves_the_honest_ones_up() -> None:
    liar = tongue()
    assert liar.say(1, 1, b"SM one") == (1, b"SM one")
    assert liar.add(1, b"bad") == 2
    assert liar.say(1, 2, b"SM two") == (3, b"SM two")
    assert liar.say(1, 1, b"SM one") == (1, b"SM one")
    assert [liar.own_upto(1, number) for number in range(4)] == [0, 1, 1, 2]


def test_what_is_refused_is_taken_back_and_the_next_honest_frame_has_its_number() -> None:
    liar = tongue()
    liar.say(1, 1, b"SM one")
    liar.add(1, b"bad")
    liar.say(1, 2, b"SM two")
    liar.refused(1, 2, "told 7 things that make no sense")
    assert liar.after(1, 1, [(2, b"SM two"), (3, b"SM three")]) == [(2, b"SM two"), (3, b"SM three")]
    assert liar.refusals == {"told # things that make no sense": 1}


def test_an_honest_frame_that_is_refused_stays() -> None:
    liar = tongue()
    liar.say(1, 1, b"SM one")
    liar.refused(1, 1, "it is out of order")
    assert liar.after(1, 0, []) == [(1, b"SM one")]


def test_a_liar_tells_of_no_more_push_weight_than_there_is_and_gives_back_what_it_withheld() -> None:
    scenario = Scenario(TWO_FACED, 500, lies=True)
    liar = Tongue(scenario, lambda *what: None)
    liar.core = scenario.participant(liar.me, on_step=lambda *step: None)
    given, honest = 0.0, Message(MessageKind.GOSSIP, liar.me, 0, layers=whole(scenario.x0, scenario.layout))
    assert scenario.is_two_faced
    for round_ in range(scenario.rounds):
        told = replace(
            honest,
            round=round_,
            mixing_weight=(0.25, 0.75)[round_ % 2],
            push_weight=scenario.num_first * (0.99 if round_ % 4 else 0.5),
        )
        said = wire.decode(liar.twisted(1, wire.encode(told, scenario.layout)), scenario.layout)
        given += said.mixing_weight * (said.push_weight - told.push_weight)
        assert said.push_weight <= scenario.num_first
        assert given < 1e-9
    assert liar.lies["another model for each"] > scenario.rounds / 4


@pytest.mark.slow
def test_no_lie_waits_for_a_newcomer_that_is_no_member_yet() -> None:
    """With this seed its process ends between its join and its first round, and is lied to before it starts again."""
    assert World(Scenario(1434, 100, lies=True)).run().rounds == 100


def test_half_of_the_seeds_have_a_liar_and_each_algorithm_as_often() -> None:
    liars = [seed for seed in range(64 * len(CASES)) if has_liar(seed)]
    assert Counter(seed % len(CASES) for seed in liars) == Counter(dict.fromkeys(range(len(CASES)), 32))


def test_the_same_seed_lies_in_the_same_way() -> None:
    one, other = (World(Scenario(5, 15, lies=True)) for _ in range(2))
    assert outcome(one) == outcome(other)
    assert one.trace == other.trace


def outcome(world: World) -> Any:
    try:
        return world.run()
    except Exception as error:  # Whatever it comes to, it comes to it twice.
        return str(error)


def test_every_falsehood_is_told_in_some_seed() -> None:
    told: Counter[str] = Counter()
    for seed in range(len(CASES)):
        world = World(Scenario(seed, 40, lies=True))
        outcome(world)
        told += world.liar_said
    assert told.keys() >= FALSEHOODS.keys()


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_every_lie_says_what_it_is(lie: Any) -> None:
    assert lie.what.endswith(".")
    assert all("=" in setting for setting in lie.settings)
