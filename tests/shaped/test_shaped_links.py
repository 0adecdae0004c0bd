"""Real peers over links of 1 Mbit/s: budgets hold on the interfaces, and the accounts are those of the kernel.

Everything happens inside network namespaces, which needs root and iproute2.
"""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from peer.config.options import Config, load
from peer.errors import SottoError
from peer.gossip.budget import BURST_S
from tests.links.namespaces import namespaces
from tools import shaped_run

_MISSING = shaped_run.missing_tools()

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.skipif(_MISSING is not None, reason=f"links cannot be shaped here: {_MISSING}"),
]

RATE_KBIT = 1000
BUDGET = 45_000


def job(*overrides: str) -> Config:
    common = ("evaluation.every_rounds=0", "training.warmup_rounds=5", "transport.backoff_max_s=0.5")
    return load(environment={}, overrides=[*common, *overrides])


def test_links_stay_under_their_budget_while_training_goes_on(tmp_path: Path) -> None:
    # Half of the coordinates in rounds of 0.04 s or more: twice the budget, if nothing held it back.
    config = job(
        "run.rounds=200",
        "compressor.fraction=0.5",
        "peer.min_step_s=0.04",
        f"compressor.budget_kbytes_per_s={BUDGET / 1000}",
        # Whole models, which the budget of rounds does not bound.
        "run.average=false",
    )
    run = shaped_run.run_shaped(config, tmp_path, num_peers=2, rate_kbit=RATE_KBIT, limit_s=150)
    assert run.accuracy is not None
    assert run.accuracy > 0.9
    for link in run.links:
        assert link.mean_rate <= BUDGET
        first_message = 6_000
        for before, after in itertools.combinations(link.samples, 2):
            span = after.told_s - before.asked_s
            assert after.num_bytes - before.num_bytes <= BUDGET * (span + BURST_S) + first_message
        assert_accounts_agree(link)
    for used in run.settings:
        # Turned down, and what the rest of the budget allows is used.
        assert used[0] == 0.5
        assert max(used[100:]) < 0.5
    assert "a budget depends on the clock" in run.logs[0]


def test_a_run_over_links_of_one_megabit_needs_no_budget(tmp_path: Path) -> None:
    # Full models, 64 kB each: at 1 Mbit/s half a second for each round.
    config = job("run.rounds=8", "algorithm.name=sgp", "graph.kind=ring")
    run = shaped_run.run_shaped(config, tmp_path, num_peers=4, rate_kbit=RATE_KBIT, limit_s=150)
    assert len(run.links) == 8
    for link in run.links:
        # What the token bucket of the qdisc lets through at once is on top of the rate.
        assert link.busiest_rate(2.0) <= RATE_KBIT * 125 * 1.05
        assert link.record is not None
        assert link.record.frame_bytes > 8 * 60_000
        assert_accounts_agree(link)


def assert_accounts_agree(link: shaped_run.LinkFigures) -> None:
    """The peer's own figure of a link and the interface's are within 1 % of each other."""
    record, expected = link.record, link.expected_interface_bytes
    assert record is not None
    assert expected is not None
    assert record.socket_bytes is not None
    assert record.packet_bytes is not None
    assert record.payload_bytes < record.frame_bytes < record.protobuf_bytes < record.socket_bytes
    assert record.socket_bytes < record.packet_bytes < link.interface_bytes
    # Handshakes and farewells of TCP, and ARP, are in the one and not in the other.
    assert abs(link.interface_bytes - expected) < 0.01 * expected + 500


def test_nothing_is_left_behind_when_a_run_fails() -> None:
    started: list[subprocess.Popen[bytes]] = []
    names: set[str] = set()

    def fail(network: shaped_run.ShapedNetwork) -> None:
        process = subprocess.Popen(
            [*network.command(0), "sh", "-c", "echo inside; exec sleep 600"], stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"inside\n"
        names.update(network.command(peer)[-1] for peer in range(2))
        assert names <= namespaces()
        raise SottoError("it did not work out")

    with pytest.raises(SottoError), shaped_run.shaped_network(2, [(0, 1)], rate_kbit=RATE_KBIT) as network:
        fail(network)
    assert started[0].wait(60) != 0
    assert not names & namespaces()
