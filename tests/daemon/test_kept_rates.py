"""The rates that a run keeps: what overrules them, and what older state folders mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.compress.top_k import TopK
from peer.config.options import check
from peer.daemon.device import kept
from peer.daemon.device.kept import RATES, settle_rates
from peer.errors import StateError
from peer.run.plan import build_compressor
from peer.state.disk import Disk
from tests.state.folders import begin

TEN_PERCENT = TopK(fraction=0.1, value_bits=4)


def settled(folder: Path, rate: float | None = None) -> float:
    config = check({} if rate is None else {"algorithm": {"averaging_rate": rate}})
    return settle_rates(config, TEN_PERCENT, Disk(folder)).averaging_rate


def test_a_new_run_keeps_the_default_that_it_began_with(tmp_path: Path) -> None:
    assert settled(tmp_path) == 0.24
    (tmp_path / RATES.name).write_text('{"averaging_rate": 0.125, "first_theta": 2.0}')
    assert settled(tmp_path) == 0.125


def test_a_start_reads_no_journal_where_the_rates_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its first checkpoint it may be long."""
    assert settled(tmp_path) == 0.24
    monkeypatch.setattr(kept, "begun_round", None)
    assert settled(tmp_path) == 0.24


def test_the_configuration_overrules_and_is_kept(tmp_path: Path) -> None:
    assert settled(tmp_path) == 0.24
    assert settled(tmp_path, 0.5) == 0.5
    assert settled(tmp_path) == 0.5


@pytest.mark.parametrize("round_", [0, 20])
def test_a_run_that_lost_its_rates_or_is_of_release_0_1_is_refused_until_they_are_set(
    tmp_path: Path, round_: int
) -> None:
    begin(Disk(tmp_path), round_)
    with pytest.raises(StateError, match=r"rates\.json is missing in a run that has begun.*set algorithm\.averaging"):
        settled(tmp_path)
    with pytest.raises(StateError, match=r"algorithm\.theta_value"):
        first_theta(tmp_path, averaging_rate=0.048)
    assert settled(tmp_path, 0.048) == 0.048
    assert settled(tmp_path) == 0.048


def first_theta(folder: Path, **options: object) -> float:
    config = check({"algorithm": {"name": "moniqua", **options}, "compressor": {"kind": "modulo"}})
    return settle_rates(config, build_compressor(config), Disk(folder)).first_theta


def test_a_new_run_begins_with_a_small_theta_where_it_adapts(tmp_path: Path) -> None:
    assert first_theta(tmp_path) == 0.01
    assert first_theta(tmp_path, theta_value=0.5) == 0.5
    assert first_theta(tmp_path) == 0.5
    (tmp_path / RATES.name).unlink()
    assert first_theta(tmp_path, theta="constant") == 2.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"averaging_rate": 2.0}',
        '{"averaging_rate": "much"}',
        '{"averaging_rate": 0.5}',
        '{"averaging_rate": 0.5, "first_theta": 0}',
        '{"averaging_rate": 0.5, "float32_weight_gradients": 1}',
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / RATES.name).write_text(text)
    with pytest.raises(StateError, match="or delete it and set"):
        settled(tmp_path)


def float32_weight_gradients(folder: Path) -> bool:
    return settle_rates(check({}), TEN_PERCENT, Disk(folder)).float32_weight_gradients


def test_a_new_run_sums_weight_gradients_in_float32(tmp_path: Path) -> None:
    assert float32_weight_gradients(tmp_path)
    begin(Disk(tmp_path))
    assert float32_weight_gradients(tmp_path)
    assert settled(tmp_path, 0.5) == 0.5
    assert float32_weight_gradients(tmp_path)


OF_RELEASE_0_2 = '{"averaging_rate": 0.24, "first_theta": 0.01}'


def test_a_run_of_release_0_2_keeps_its_rounding_and_the_numbers_of_its_classes(tmp_path: Path) -> None:
    (tmp_path / RATES.name).write_text(OF_RELEASE_0_2)
    for round_ in (0, 40):
        begin(Disk(tmp_path), round_)
        kept = settle_rates(check({}), TEN_PERCENT, Disk(tmp_path))
        assert not kept.float32_weight_gradients
        assert not kept.normal_class_order


def test_a_new_run_keeps_the_normal_order_of_its_classes(tmp_path: Path) -> None:
    new = settle_rates(check({}), TEN_PERCENT, Disk(tmp_path))
    assert new.normal_class_order
    begin(Disk(tmp_path))
    assert settle_rates(check({}), TEN_PERCENT, Disk(tmp_path)) == new
