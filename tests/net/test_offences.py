"""Counting what no honest peer does."""

from __future__ import annotations

from peer.net.offences import NOTABLE, Offences


def test_the_first_of_a_kind_is_worth_a_line_then_every_tenfold() -> None:
    offences = Offences()
    worth = [n for n in range(1, 1001) if offences.add(1, f"sent frame {n} where {n + 1} is next, says 'name{n}'")]
    assert worth == [1, 10, 100, 1000]
    assert offences.add(1, "its checksum is wrong")
    assert offences.add(2, "its checksum is wrong"), "each neighbour has its own"
    assert (offences.count(1), offences.last(1)) == (1001, "its checksum is wrong")
    assert (offences.count(3), offences.last(3)) == (0, None)


def test_a_neighbour_that_provokes_ever_new_sentences_gets_few_lines() -> None:
    offences = Offences()
    lines = sum(offences.add(1, "a" * n) for n in range(10_000))
    assert lines < 50
    assert offences.count(1) == 10_000


def test_the_operator_is_told_after_some_and_then_every_tenfold() -> None:
    offences, told = Offences(), []
    for count in range(1, 500):
        offences.add(1, "wrong")
        if offences.is_due(1):
            told.append(count)
    assert told == [NOTABLE, 10 * NOTABLE, 100 * NOTABLE]
