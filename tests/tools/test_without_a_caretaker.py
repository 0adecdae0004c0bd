"""What the demonstration of a run without a caretaker computes; the run itself takes minutes."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from tools.without_a_caretaker import Outcome, zone_with_midnight


@pytest.mark.parametrize("at", [1_795_413_000.2, 1_795_391_999.5, 1_795_478_400.0])
def test_a_day_begins_when_it_should(at: float, monkeypatch: pytest.MonkeyPatch) -> None:
    zone, midnight = zone_with_midnight(at)
    assert at < midnight <= at + 1
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        before, after = datetime.fromtimestamp(midnight - 1), datetime.fromtimestamp(midnight)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert (after.hour, after.minute, after.second) == (0, 0, 0)
    assert (after.date() - before.date()).days == 1


def test_where_the_weights_settle() -> None:
    masses = {0: 4.0, 1: 4.0 + 1e-12, 2: 3.2, 3: 3.0, 4: 3.0 - 1e-12, 5: 3.0}
    assert Outcome(masses, 0, {"peer-0": 0.9, "peer-1": 0.8}, 0).settled() == (3.0, 3)
    assert Outcome({0: 4.0}, 0, {"peer-0": 0.9}, 0).settled() == (4.0, 0)
