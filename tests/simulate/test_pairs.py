"""Runs without rounds on the virtual clock: pace, staleness, mass, accuracy, and the same figures as other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.config.options import Config, load
from peer.errors import ConfigError
from peer.node.pair_participant import PairParticipant
from peer.records import RoundRecord
from peer.report.run_page import write_report
from peer.simulate.network import LinkModel
from peer.simulate.pairs import AsynchronousSimulator
from peer.simulate.run import Simulation, run
from peer.state.metrics import MetricsStore

STEP_S = 0.1
LATENCY_S = 0.002


def job(*settings: str) -> Config:
    common = ("graph.kind=ring", "data.skew=0", "run.rounds=40", "training.warmup_rounds=5")
    return load(environment={}, overrides=[*common, *settings])


def small(*settings: str) -> Config:
    return job(
        "training.task_options={hidden=4}", "training.learning_rate=0.05", "evaluation.every_rounds=0", *settings
    )


def simulate(config: Config, directory: Path | None = None, **more: Any) -> Simulation:
    more = {"num_peers": 8, "step_s": STEP_S, "links": LinkModel(latency_s=LATENCY_S), "baseline": False, **more}
    return run(config, Path(), directory=directory, **more)


def rows(directory: Path, peer: int) -> list[RoundRecord]:
    store = MetricsStore(directory / "metrics.sqlite", read_only=True)
    return [record for record in store.rounds() if record.peer == peer]


def pace(records: list[RoundRecord]) -> float:
    """Return steps a virtual second between the first and the last."""
    return (len(records) - 1) / (records[-1].time_s - records[0].time_s)


@pytest.mark.parametrize("algorithm", ["ad-psgd", "moniqua-ad-psgd"])
def test_a_slow_peer_slows_nobody(tmp_path: Path, algorithm: str) -> None:
    extra = ["compressor.kind=modulo"] if algorithm == "moniqua-ad-psgd" else []
    config = small(f"algorithm.name={algorithm}", *extra)
    simulation = simulate(config, tmp_path, slow={3: 4.0})
    assert pace(rows(tmp_path, 3)) == pytest.approx(1 / (4 * STEP_S), rel=1e-9)
    for peer in {*range(8)} - {3}:
        assert pace(rows(tmp_path, peer)) == pytest.approx(1 / STEP_S, rel=1e-9)
        assert len(rows(tmp_path, peer)) == 40
    # Gradients of the slow peer are older when they are applied.
    stale = [np.mean([record.staleness for record in rows(tmp_path, peer)[:10]]) for peer in range(8)]
    assert stale[3] > 1.5 * max(stale[:3] + stale[4:])
    assert simulation.summary.staleness is not None
    assert simulation.summary.staleness > 0
    assert simulation.summary.most_staleness == max(r.staleness or 0 for peer in range(8) for r in rows(tmp_path, peer))


def test_in_rounds_everybody_falls_to_the_pace_of_the_slow_peer(tmp_path: Path) -> None:
    simulate(small("algorithm.name=d-psgd"), tmp_path, slow={3: 4.0})
    for peer in range(8):
        assert pace(rows(tmp_path, peer)[10:]) == pytest.approx(1 / (4 * STEP_S), rel=1e-6)
        assert all(record.staleness is None for record in rows(tmp_path, peer))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["algorithm.name=ad-psgd"], id="ad-psgd"),
        pytest.param(["algorithm.name=moniqua-ad-psgd", "compressor.kind=modulo", "compressor.bits=4"], id="moniqua"),
    ],
)
def test_every_peer_learns_the_digits(settings: list[str]) -> None:
    simulation = simulate(job("run.rounds=250", *settings), slow={3: 4.0})
    assert simulation.summary.worst_accuracy is not None
    assert simulation.summary.worst_accuracy > 0.93
    assert simulation.summary.averaged_accuracy is not None
    assert simulation.summary.averaged_accuracy > 0.93


@pytest.mark.parametrize("peers", [2, 5])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["algorithm.name=ad-psgd"], id="ad-psgd"),
        pytest.param(
            [
                "algorithm.name=moniqua-ad-psgd",
                "compressor.kind=modulo",
                "compressor.bits=3",
                "algorithm.theta_value=0.001",
            ],
            id="moniqua, first theta far too small",
        ),
    ],
)
def test_mass_changes_by_the_gradient_steps_alone(settings: list[str], peers: int) -> None:
    moved = 0.0

    def note(participant: PairParticipant, record: RoundRecord) -> None:
        nonlocal moved
        moved = moved - record.rate * participant.gradient.astype(np.float64)

    # Thin links: replies come after the step, and requests cross.
    simulator = AsynchronousSimulator(
        small(*settings),
        Path(),
        num_peers=peers,
        step_s=STEP_S,
        slow={0: 2.5},
        links=LinkModel(rate_kbit_s=100, latency_s=0.03),
        after_round=note,
    )
    assert simulator.run()
    x0 = simulator.trainer.initial_vector().astype(np.float64)
    total = np.sum([p.model().astype(np.float64) for p in simulator.participants], axis=0)
    assert np.abs(moved).max() > 0.1, "nobody moved, so nothing was tested"
    np.testing.assert_allclose(total, peers * x0 + moved, atol=2e-5)
    assert all(participant.algorithm.idle for participant in simulator.participants)
    exchanges = sum(participant.algorithm.staleness.exchanges for participant in simulator.participants)
    assert exchanges > 20 * peers
    if "algorithm.name=ad-psgd" not in settings:
        assert sum(participant.algorithm.metrics().repairs for participant in simulator.participants) > 0


def test_two_simulations_agree_bit_for_bit() -> None:
    config = small("algorithm.name=ad-psgd")
    first, second = (simulate(config, num_peers=5, slow={1: 1.7}) for _ in range(2))
    assert [x.tobytes() for x in first.models] == [x.tobytes() for x in second.models]


def test_every_byte_and_every_exchange_is_counted_once(tmp_path: Path) -> None:
    """Those too that finished peers send when they answer a slow one."""
    config = small("algorithm.name=moniqua-ad-psgd", "compressor.kind=modulo")
    summary = simulate(config, tmp_path, slow={3: 4.0}).summary
    store = MetricsStore(tmp_path / "metrics.sqlite", read_only=True)
    rounds, links = store.rounds(), store.links()
    assert sum(r.frame_bytes for r in rounds) == sum(link.frame_bytes for link in links) == summary.frame_bytes
    assert sum(r.payload_bytes for r in rounds) == sum(link.payload_bytes for link in links) == summary.payload_bytes
    assert sum(r.messages for r in rounds) == sum(link.frames for link in links)
    # Both ends of an exchange count it.
    assert sum(r.exchanges for r in rounds) == 2 * summary.exchanges > 0
    # Each takes a request and a reply; refusals carry no parameters.
    assert sum(r.values for r in rounds) >= 2 * summary.exchanges * summary.parameters
    assert 7.0 < summary.bits_per_parameter < 10.0
    text = write_report(tmp_path).read_text()
    assert "Staleness" in text


def test_on_links_that_are_too_thin_peers_wait_for_their_own_exchange_only(tmp_path: Path) -> None:
    links = LinkModel(rate_kbit_s=50, latency_s=0.05)
    simulate(small("algorithm.name=ad-psgd"), tmp_path, num_peers=4, links=links)
    records = [record for peer in range(4) for record in rows(tmp_path, peer)]
    assert len(records) == 4 * 40
    waits = [record.wait_s for record in records]
    # A request and its reply there and back, behind at most one reply to somebody else on each link.
    one_way = links.occupies_s(1500, links.rate_kbit_s) + links.latency_s
    assert 0.05 < max(waits) < 4 * one_way


def test_what_needs_rounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="one batch"):
        simulate(small("algorithm.name=ad-psgd"), stacked=True)
    with pytest.raises(ConfigError, match="needs rounds"):
        simulate(small("algorithm.name=ad-psgd", "training.momentum=qg"))


def test_a_peer_alone_just_trains() -> None:
    simulation = simulate(small("algorithm.name=ad-psgd", "graph.kind=complete"), num_peers=1)
    assert simulation.summary.exchanges == 0
    assert simulation.summary.staleness == 0.0
