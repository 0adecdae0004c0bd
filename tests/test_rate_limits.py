from __future__ import annotations

from peer.rate_limits import Allowance, Allowances, Complaints


def test_an_allowance_lets_a_burst_pass_and_then_a_rate() -> None:
    allowance = Allowance(rate=10, burst=5, now=0.0)
    assert [allowance.spend(1, 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert not allowance.spend(1, 0.05)
    assert allowance.spend(1, 0.15)
    assert allowance.spend(5, 100.0)
    assert not allowance.spend(1, 100.0)


def test_what_is_refused_costs_nothing() -> None:
    allowance = Allowance(rate=1, burst=2, now=0.0)
    assert not allowance.spend(3, 0.0)
    assert allowance.spend(2, 0.0)


def test_who_takes_in_advance_waits_until_it_is_there() -> None:
    allowance = Allowance(rate=100, burst=50, now=0.0)
    assert allowance.wait_s(50, 0.0) == 0.0
    assert allowance.wait_s(100, 0.0) == 1.0
    assert allowance.wait_s(0, 0.5) == 0.5


def test_complaints_are_counted_where_they_are_too_many_to_be_written() -> None:
    complaints = Complaints(per_minute=2, now=0.0)
    assert [complaints.worth_a_line(0.0) for _ in range(5)] == ["", "", None, None, None]
    assert complaints.worth_a_line(30.0) == " (3 more like this were not logged)"
    assert complaints.worth_a_line(60.0) == ""


def test_each_of_several_has_an_allowance_of_its_own() -> None:
    allowances = Allowances(rate=1, burst=2)
    assert [allowances.spend("ada", 0.0) for _ in range(3)] == [True, True, False]
    assert allowances.spend("ben", 0.0)
    assert allowances.spend("ada", 1.0)
