"""What simulations of a few sizes say of more peers than can be simulated, and how wrong that is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from peer.config import options as configuration
from peer.config.options import Config
from peer.gossip.topology import build_schedule
from peer.simulate import run as simulator
from peer.state.metrics import MetricsStore
from tools.predict_scale import Simulated, errors_beyond, fit, mixing_rounds, rounds_to


def points(exponent: float, *sizes: int) -> list[Simulated]:
    return [
        Simulated(num_peers=size, mixing_rounds=size**2 / 10, rounds=50 * (size**2 / 10) ** exponent) for size in sizes
    ]


def test_a_power_law_is_found_and_extrapolated() -> None:
    law = fit(points(0.2, 8, 32, 128))
    assert law.factor == pytest.approx(50)
    assert law.exponent == pytest.approx(0.2)
    assert law.rounds(1000.0) == pytest.approx(50 * 1000**0.2)
    assert errors_beyond(points(0.2, 128, 8, 32)) == {128: pytest.approx(0, abs=1e-9)}


def test_errors_are_those_of_what_smaller_sizes_say() -> None:
    found = points(0.2, 8, 16, 32, 64)
    slower = Simulated(num_peers=64, mixing_rounds=found[3].mixing_rounds, rounds=2 * found[3].rounds)
    # The largest one takes twice as long as the law says, and no smaller size knows.
    assert errors_beyond([*found[:3], slower]) == {32: pytest.approx(0, abs=1e-9), 64: pytest.approx(-0.5)}
    assert errors_beyond(found[:2]) == {}


def test_graphs_that_mix_alike_need_alike() -> None:
    same = [Simulated(num_peers=size, mixing_rounds=4.0, rounds=rounds) for size, rounds in ((8, 40), (16, 90))]
    assert fit(same).exponent == 0.0
    assert fit(same).rounds(4.0) == pytest.approx(math.sqrt(40 * 90))


def test_mixing_takes_the_inverse_of_the_gap_and_a_whole_cycle() -> None:
    ring = build_schedule(16, "ring")
    assert mixing_rounds(ring) == pytest.approx(1 / ring.spectral_gap)
    one_peer = build_schedule(16, "exponential-one-peer")
    assert one_peer.spectral_gap == 1.0
    assert mixing_rounds(one_peer) == 4.0
    # A ring needs four times the rounds for twice the peers; a ring of 100,000 has no dense matrix.
    assert mixing_rounds(build_schedule(100_000, "ring")) == pytest.approx(3 / (2 * math.pi**2) * 1e10 * 0.5, rel=0.01)


def job() -> Config:
    overrides = [
        "training.task=clusters", "training.task_options.samples=400", "training.batch_size=5", "run.rounds=60",
        "training.learning_rate=0.5", "training.momentum=none", "training.schedule=constant", "algorithm.name=sgp",
        "compressor.kind=none", "data.holdout_fraction=0", "evaluation.every_rounds=5",
    ]  # fmt: skip
    return configuration.load(overrides=overrides, environment={})


def test_rounds_are_counted_until_the_peers_are_that_accurate_on_average(tmp_path: Path) -> None:
    simulator.run(job(), Path(), num_peers=4, directory=tmp_path, stacked=True, baseline=False)
    store = MetricsStore(tmp_path / "metrics.sqlite", read_only=True)
    peers = [each for each in store.evaluations() if each.peer >= 0]
    store.close()
    by_round = {
        round_: sum(each.accuracy for each in peers if each.round == round_) / 4
        for round_ in sorted({each.round for each in peers})
    }
    target = max(by_round.values()) - 0.05
    after = next(round_ for round_, accuracy in by_round.items() if accuracy >= target)
    found = rounds_to(job(), 4, target)
    assert found is not None
    assert after - 5 < found <= after
    assert rounds_to(job(), 4, 0.999) is None
