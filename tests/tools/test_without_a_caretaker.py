"""The demonstration without a caretaker, shorter than the recorded one."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from tools.releases import PREDECESSOR, unpacked
from tools.without_a_caretaker import Demonstration, Outcome, Plan, calm, report, zone_with_midnight


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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_needs_nobody_but_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Larger messages reach the cap in fewer rounds. The other rounds are for machines that start commands slowly.
    plan = Plan(rounds=2500, min_step_s=0.05, lost_after_s=25.0, settings=("compressor.fraction=0.5",))
    demonstration = Demonstration(plan, tmp_path, unpacked(PREDECESSOR, tmp_path / "predecessor"))
    demonstration.run()
    assert report(demonstration, calm(plan, tmp_path)) == []
    said = capsys.readouterr().out
    for part in ("Certificates", "Releases", "A loss", "A data cap"):
        assert part in said
