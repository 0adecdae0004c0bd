"""Which option a plan takes, and why not another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from peer.config.options import Config, PeerAddress, load
from peer.errors import ConfigError
from peer.links.profiles import Profile
from peer.planning import evidence as measurements
from peer.planning import layers
from peer.planning.plan import Plan, Situation, Weighed, make_plan

EVIDENCE = measurements.read()
IMAGES = EVIDENCE.setting("images")


def configured(settings: Sequence[str]) -> Config:
    return load(environment={}, overrides=settings)


def situation(rate_kbit: float, **changes: object) -> Situation:
    given = Situation(
        layers=layers.of_model("resnet20"),
        num_peers=8,
        link=Profile(up_kbit=rate_kbit, down_kbit=rate_kbit, latency_ms=1),
        step_s=0.1,
        skew=0.8,
    )
    return replace(given, **changes)  # type: ignore[arg-type]  # some of its fields


def planned(given: Situation) -> Plan:
    return make_plan(given, EVIDENCE, IMAGES, configured, Path())


@cache
def thin() -> Plan:
    return planned(situation(1000))


def test_links_take_sums_of_factors_and_thin_ones_local_steps() -> None:
    plan = thin()
    assert plan.best is not None
    assert plan.best.option.name == "low-rank-16-4bit-local-4"
    assert plan.best == plan.best_own
    by_rate = dict(plan.by_rate)
    assert by_rate[1000] == plan.best.option.name
    # Local steps pay where a round takes seconds. On the fastest links, the processor decides.
    assert by_rate[100] == "low-rank-16-4bit-local-4"
    assert by_rate[100_000] == "low-rank-16-4bit"
    assert by_rate[10_000_000] in ("ddp", "low-rank-16-4bit")


def test_a_slow_processor_takes_all_reduce_where_links_are_fast() -> None:
    """A sum of factors is work for the processor, an all-reduce next to none."""
    slow = planned(situation(10_000_000, processor=20.0))
    assert slow.best is not None
    assert slow.best.option.name == "ddp"


def test_latency_makes_sums_slow_that_are_added_up_in_every_step() -> None:
    """A sum takes two exchanges of all peers, a ring one with one neighbour; with local steps, there are fewer sums."""
    given = situation(1000)
    far = planned(replace(given, link=replace(given.link, latency_ms=1000)))
    rated = [each.option.name for each in far.estimates if each.progress_s is not None]
    assert rated[0] == "low-rank-16-4bit-local-4"
    assert rated.index("quant-sgp-10%-ring") < rated.index("low-rank-4")


def test_what_a_round_with_local_steps_takes_is_shared_out_to_them() -> None:
    by_name = {each.option.name: each for each in thin().estimates}
    alone, four = by_name["low-rank-16-4bit"], by_name["low-rank-16-4bit-local-4"]
    assert alone.round_s is not None
    assert four.round_s is not None
    assert alone.work_s is not None
    assert four.work_s is not None
    assert 4 * (four.up_bytes or 0) == pytest.approx(alone.up_bytes or 0, rel=0.01)
    # Each weighs its own work.
    assert 4 * (four.round_s - 0.1 - four.work_s) == pytest.approx(alone.round_s - 0.1 - alone.work_s, rel=0.01)


def test_a_sum_of_factors_takes_two_exchanges_with_every_peer() -> None:
    four = next(each for each in thin().estimates if each.option.name == "low-rank-4")
    assert four.frame_bytes is not None
    assert four.up_bytes == pytest.approx(14 * four.frame_bytes, rel=0.1)
    # Links of 1 Mbit/s and 1 ms, and a step of 0.1 s.
    assert four.work_s is not None
    assert four.round_s == pytest.approx(0.1 + four.work_s + 8e-6 * (four.up_bytes or 0) + 2 * 0.001, rel=0.02)


def test_a_slower_processor_makes_every_round_longer_by_its_work() -> None:
    link = Profile(up_kbit=1000, down_kbit=1000, latency_ms=1)
    names = ("low-rank-4", "quant-sgp-10%-ring", "ddp-powersgd")
    for option in (each for each in EVIDENCE.options if each.name in names):
        weighed = Weighed.weigh(option, situation(1000), IMAGES, configured, Path())
        here, slower = (weighed.estimate(situation(1000, processor=factor, link=link), IMAGES) for factor in (1, 20))
        assert here.work_s is not None
        assert here.work_s > 0
        assert slower.work_s == pytest.approx(20 * here.work_s)
        assert here.round_s is not None
        assert slower.round_s == pytest.approx(here.round_s + 19 * here.work_s, rel=1e-6)


def test_the_order_is_that_of_seconds_times_rounds() -> None:
    rated = [each for each in thin().estimates if each.progress_s is not None]
    for each in rated:
        assert each.round_s is not None
        assert each.rounds_factor is not None
        assert each.progress_s == each.round_s * each.rounds_factor
        assert each.gap_points is not None
        assert each.gap_points <= 6.0
    assert [each.progress_s for each in rated] == sorted(each.progress_s or 0 for each in rated)
    assert next(each.rounds_factor for each in rated if each.option.name == "ddp") == 1.0


def test_options_that_stay_too_far_behind_are_shown_with_their_gap_and_not_rated() -> None:
    one_percent = next(each for each in thin().estimates if each.option.name == "quant-sgp-1%-ring")
    assert one_percent.progress_s is None
    assert "35.5 % in 250 rounds, 13.4 points below all-reduce" in str(one_percent.reason)
    assert one_percent.round_s is not None


def test_bytes_of_a_day_and_totals_follow_from_a_round() -> None:
    for each in thin().estimates:
        if each.up_bytes is None or each.round_s is None:
            continue
        assert each.up_bytes_per_day == each.up_bytes * 86400 / each.round_s
        # No more than the link carries in a day.
        assert each.up_bytes_per_day is not None
        assert each.up_bytes_per_day < 1.001 * 1e6 / 8 * 86400
        total = each.total(1000)
        if each.rounds_factor is not None and total is not None:
            assert total[0] == pytest.approx(1000 * each.rounds_factor * each.round_s)
    assert thin().estimates[0].total(None) is None


def test_nothing_of_ours_is_recommended_where_measurements_say_that_it_does_not_get_there() -> None:
    plan = planned(situation(1000, skew=1.0))
    assert plan.best is not None
    assert plan.best.option.rival == "ddp-powersgd"
    assert plan.best_own is not None
    assert plan.best_own.progress_s is None
    unmeasured = next(each for each in plan.estimates if each.option.name == "moniqua-2-ring")
    assert "not measured at a skew of 1 or more" in str(unmeasured.reason)


def test_measurements_of_eight_peers_say_nothing_about_a_ring_of_many() -> None:
    plan = planned(situation(1000, num_peers=16))
    reasons = {each.option.name: each.reason for each in plan.estimates}
    assert "mixes" in str(reasons["quant-sgp-10%-ring"])
    assert reasons["quant-sgp-5%-exponential"] is None


def test_a_replica_goes_to_everybody_who_keeps_one() -> None:
    """Three neighbours on the exponential graph of eight, one on a directed ring."""
    by_name = {each.option.name: each for each in thin().estimates}
    exponential, ring = by_name["quant-sgp-5%-exponential"], by_name["quant-sgp-10%-ring"]
    assert exponential.up_bytes == pytest.approx(3 * (exponential.frame_bytes or 0), rel=0.06)
    assert ring.up_bytes == pytest.approx(ring.frame_bytes or 0, rel=0.06)
    assert (exponential.memory_bytes or 0) > (ring.memory_bytes or 0)
    one_peer = by_name["sgp-one-peer"]
    assert one_peer.up_bytes == pytest.approx(one_peer.frame_bytes or 0, rel=0.06)


def test_what_needs_shapes_is_not_guessed_from_a_number() -> None:
    plan = planned(situation(1000, layers=layers.of_number(273_258)))
    for name in ("ddp-powersgd", "low-rank-4"):
        estimate = next(each for each in plan.estimates if each.option.name == name)
        assert estimate.round_s is None
        assert "--model" in str(estimate.reason)


def test_graphs_in_which_neighbours_cannot_reach_each_other_are_left_out() -> None:
    peers = tuple(
        PeerAddress(name=f"p{index}", advertise=f"10.0.0.{index}:7700" if index % 2 else None) for index in range(8)
    )

    def behind_nat(settings: Sequence[str]) -> Config:
        return configured(settings).model_copy(update={"peers": peers})

    plan = make_plan(situation(1000), EVIDENCE, IMAGES, behind_nat, Path())
    reasons = {each.option.name: each.reason for each in plan.estimates}
    assert "neither has an advertise address" in str(reasons["quant-sgp-5%-exponential"])
    assert reasons["quant-sgp-10%-ring"] is None


def test_one_peer_has_nothing_to_plan() -> None:
    with pytest.raises(ConfigError, match="2 or more"):
        planned(situation(1000, num_peers=1))


def test_layers_of_a_task_need_no_data() -> None:
    found = layers.of_task(configured(["training.task=cifar10"]), Path())
    assert found.parameters == 273_258
    assert found.num_classes == 10
    assert found.shapes is not None
    assert len(found.shapes) == 86


def test_a_step_is_measured_on_the_task_itself(tmp_path: Path) -> None:
    assert 0 < layers.measured_step_s(configured([]), tmp_path, 4) < 5
