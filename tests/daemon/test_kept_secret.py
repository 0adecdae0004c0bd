"""The secret of private steps: drawn once, kept from others, and refused where the budget is another."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from peer.daemon.device.kept import settle_privacy
from peer.errors import ConfigError
from peer.run.privacy_budget import Budget
from peer.state.disk import Disk
from peer.train.private_step import SECRET_FILE
from tests.state.folders import begin

BUDGET = Budget(1.5, 0.125, 1e-5, 100, 1)


def test_a_secret_is_drawn_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    secret = settle_privacy(BUDGET, Disk(tmp_path))
    assert secret is not None
    assert len(secret) == 32
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    assert settle_privacy(BUDGET, Disk(tmp_path)) == secret


def test_a_wiped_folder_gets_another_secret(tmp_path: Path) -> None:
    before = settle_privacy(BUDGET, Disk(tmp_path))
    (tmp_path / SECRET_FILE).unlink()
    assert settle_privacy(BUDGET, Disk(tmp_path)) != before


def test_without_privacy_there_is_no_secret(tmp_path: Path) -> None:
    assert settle_privacy(None, Disk(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change", [{"noise_multiplier": 2.0}, {"sampling_rate": 0.25}, {"rounds": 200}, {"delta": 1e-6}, {"local_steps": 2}]
)
def test_another_budget_is_refused_with_what_changed(tmp_path: Path, change: dict[str, float]) -> None:
    settle_privacy(BUDGET, Disk(tmp_path))
    with pytest.raises(ConfigError, match=next(iter(change))):
        settle_privacy(replace(BUDGET, **change), Disk(tmp_path))


def test_it_is_turned_neither_off_nor_on_in_the_middle(tmp_path: Path) -> None:
    settle_privacy(BUDGET, Disk(tmp_path))
    with pytest.raises(ConfigError, match="turned off"):
        settle_privacy(None, Disk(tmp_path))
    (tmp_path / SECRET_FILE).unlink()
    begin(Disk(tmp_path))
    with pytest.raises(ConfigError, match="turned on"):
        settle_privacy(BUDGET, Disk(tmp_path))
