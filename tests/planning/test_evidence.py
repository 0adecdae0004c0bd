"""The file of measurements, and how it is read."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from peer.config.options import load
from peer.errors import ConfigError
from peer.planning.evidence import Measured, Option, Setting, read
from peer.run import plan as run_plan
from peer.train.tasks import TASKS

EVIDENCE = read()


def test_every_row_is_about_an_option_and_every_setting_has_its_reference() -> None:
    names = [option.name for option in EVIDENCE.options]
    assert len(set(names)) == len(names)
    for setting in EVIDENCE.settings:
        assert {row.option for row in setting.measured} <= set(names)
        assert setting.curve(setting.reference, max(row.skew for row in setting.measured)) is not None
        assert set(setting.tasks) <= set(TASKS)
        for row in setting.measured:
            rounds = [point[0] for point in row.worst]
            assert rounds == sorted(set(rounds))
            assert all(0 < accuracy <= 100 for _, accuracy in row.worst)


@pytest.mark.parametrize("option", [o for o in EVIDENCE.options if o.rival is None], ids=lambda option: option.name)
def test_the_validator_accepts_every_option_of_ours(option: Option) -> None:
    config = load(environment={}, overrides=option.settings)
    findings = run_plan.validate_config(config, Path(), 8)
    assert [finding for finding in findings if finding.level == "error"] == []
    # What a plan advises is pasted into a new job, and means there what was measured.
    factors = attrgetter("rank", "factor_bits", "factor_exponents")
    assert factors(load(environment={}, overrides=option.settings, new_job=8).algorithm) == factors(config.algorithm)


def setting(*rows: Measured) -> Setting:
    return Setting(name="one", title="", source="", peers=8, reference="a", measured=rows)


def row(option: str, skew: float, *worst: tuple[int, float], seed: int = 0) -> Measured:
    return Measured(option=option, skew=skew, worst=worst, seed=seed)


def test_seeds_are_averaged_and_a_larger_skew_stands_for_a_smaller_one() -> None:
    known = setting(
        row("a", 0.8, (100, 40), (200, 60)), row("a", 0.8, (100, 50), (200, 64), seed=1), row("a", 1, (100, 9))
    )
    assert known.curve("a", 0.5) == ((100, 45.0), (200, 62.0))
    assert known.curve("a", 0.9) == ((100, 9.0),)
    assert known.curve("b", 0.5) is None


def test_rounds_to_an_accuracy_lie_between_measured_points() -> None:
    known = setting(row("a", 1, (100, 40), (200, 60), (300, 50), (400, 70)))
    assert known.rounds_to("a", 1, 40) == 100
    assert known.rounds_to("a", 1, 30) == 100
    # It fell below 55 once more after 200 rounds.
    assert known.rounds_to("a", 1, 55) == 325
    assert known.rounds_to("a", 1, 71) is None
    assert known.rounds_to("b", 1, 30) is None


def test_the_setting_of_a_task() -> None:
    assert EVIDENCE.for_task("cifar10").name == "images"
    assert EVIDENCE.for_task("digits").name == "digits"
    assert EVIDENCE.for_task("somebody:else") is EVIDENCE.settings[0]
    with pytest.raises(ConfigError, match="images"):
        EVIDENCE.setting("nothing")
