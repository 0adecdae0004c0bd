"""Bandwidth budgets on the virtual clock: what goes over a link in any stretch of time, with every kind of dial."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.config.options import Config, load
from peer.gossip.budget import BURST_S
from peer.records import RoundRecord
from peer.run.plan import refuse_errors, validate_config
from peer.simulate.network import LinkModel
from peer.simulate.rounds import Simulator
from peer.state.metrics import MetricsStore

COMMON = ("run.rounds=120", "evaluation.every_rounds=0", "training.warmup_rounds=5")
OVERHEAD_BYTES = 90
TOP_K = ("compressor.fraction=0.1",)
QSGD = ("algorithm.name=choco-sgd", "graph.kind=ring", "compressor.kind=qsgd", "compressor.bits=8")
MODULO = (
    "algorithm.name=moniqua",
    "graph.kind=ring",
    "compressor.kind=modulo",
    "compressor.bits=8",
    "training.momentum=none",
)


def job(*overrides: str, budget: float | None = None) -> Config:
    limit = () if budget is None else (f"compressor.budget_kbytes_per_s={budget}",)
    return load(environment={}, overrides=[*COMMON, *overrides, *limit])


def simulate(config: Config, *, step_s: float = 0.1, rate_kbit_s: float | None = 1000.0) -> list[RoundRecord]:
    """Return the rounds of peer 0 of three."""
    metrics = MetricsStore(None)
    links = LinkModel(rate_kbit_s=rate_kbit_s, overhead_bytes=OVERHEAD_BYTES)
    simulator = Simulator(config, Path(), num_peers=3, metrics=metrics, links=links, step_s=step_s)
    assert simulator.run()
    rounds = [record for record in metrics.rounds() if record.peer == 0]
    metrics.close()
    return rounds


def link_bytes(record: RoundRecord, receivers: int) -> int:
    return record.frame_bytes // receivers + record.messages // receivers * OVERHEAD_BYTES


@pytest.mark.parametrize(
    ("overrides", "receivers", "budget"),
    [
        pytest.param(TOP_K, 1, 8.0, id="top_k"),
        pytest.param((*TOP_K, "compressor.kind=random_k"), 1, 12.0, id="random_k"),
        pytest.param(QSGD, 2, 25.0, id="qsgd"),
        pytest.param(MODULO, 2, 60.0, id="modulo, verified"),
        pytest.param(TOP_K, 1, 1.0, id="less than the smallest message"),
        pytest.param(("algorithm.name=sgp", "run.rounds=20"), 1, 100.0, id="cannot reduce its messages"),
    ],
)
def test_no_stretch_of_time_carries_more_than_the_budget(
    overrides: tuple[str, ...], receivers: int, budget: float
) -> None:
    rounds = simulate(job(*overrides, budget=budget))
    sizes = [link_bytes(record, receivers) for record in rounds]
    # Messages leave before the end of their round, and after the end of the one before.
    ends = [0.0] + [record.time_s for record in rounds]
    for first in range(len(rounds)):
        total = 0
        for last in range(first, len(rounds)):
            total += sizes[last]
            assert total <= 1000 * budget * (ends[last + 1] - ends[first] + BURST_S) + max(sizes)
    assert sum(sizes[:-1]) <= 1000 * budget * rounds[-1].time_s


def test_what_the_budget_allows_is_used_and_no_round_waits() -> None:
    free, limited = simulate(job(*TOP_K)), simulate(job(*TOP_K, budget=10.0))
    assert sum(link_bytes(r, 1) for r in free) > 1.5 * 10_000 * free[-1].time_s
    settled = limited[40:]
    seconds = settled[-1].time_s - limited[39].time_s
    assert 0.8 * 10_000 < sum(link_bytes(r, 1) for r in settled) / seconds <= 10_000
    # Smaller messages take less time on the link, so that rounds are shorter than without a budget.
    assert seconds <= free[-1].time_s - free[39].time_s
    assert {record.fraction for record in free} == {0.1}
    assert max(record.fraction or 1.0 for record in settled) < 0.1


@pytest.mark.parametrize(("overrides", "budget"), [(QSGD, 25.0), (MODULO, 60.0)])
def test_bits_fall_and_training_goes_on(overrides: tuple[str, ...], budget: float) -> None:
    rounds = simulate(job(*overrides, budget=budget))
    bits = [record.bits for record in rounds]
    assert bits[0] == 8
    assert max(number for number in bits[40:] if number is not None) < 8
    first, last = ([r.loss for r in part if r.loss is not None] for part in (rounds[:10], rounds[-10:]))
    assert sum(last) < 0.5 * sum(first)


def test_peers_with_other_bits_repair_each_others_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first θ is far too small, and the slow peer has time to send more bits than the others.
    config = job(*MODULO, "algorithm.theta_value=0.0005", "run.rounds=40", budget=25.0)
    simulator = Simulator(config, Path(), num_peers=3, links=LinkModel(), step_s=0.05, slow={1: 3.0})
    budgets = [participant.budget for participant in simulator.participants]
    # Peer 1 decides for other bits than its neighbours, from the first round on.
    monkeypatch.setattr(budgets[1], "_decide", lambda: 3)
    assert simulator.run()
    used = [participant.algorithm.node.compressor for participant in simulator.participants]
    assert used[1] != used[0]
    assert all(participant.algorithm.metrics().repairs > 0 for participant in simulator.participants)


def test_the_same_budget_on_the_virtual_clock_gives_the_same_bits() -> None:
    one, other = (simulate(job(*TOP_K, budget=12.0)) for _ in range(2))
    assert [(r.time_s, r.loss, r.fraction, r.frame_bytes) for r in one] == [
        (r.time_s, r.loss, r.fraction, r.frame_bytes) for r in other
    ]


def test_the_validator_says_what_a_budget_costs() -> None:
    def said(*overrides: str) -> list[tuple[str, str]]:
        findings = validate_config(job(*overrides, budget=10.0), Path(), 4)
        return [(f.level, f.sentence) for f in findings if f.key == "compressor.budget_kbytes_per_s"]

    assert [(level, "identical" in sentence) for level, sentence in said()] == [("warning", True)]
    assert any("cannot reduce its messages" in sentence for _, sentence in said("algorithm.name=sgp"))
    # A rate that suits top 2 % and nothing less.
    assert any("messages cannot become smaller" in sentence for _, sentence in said("algorithm.averaging_rate=0.15"))
    (level, sentence), *_ = said("algorithm.name=ad-psgd", "graph.kind=ring", "training.momentum=none")
    assert level == "error"
    assert "no rounds" in sentence
    assert refuse_errors(validate_config(job(budget=10.0), Path(), 4))
