"""Real peers over links of 1 Mbit/s: budgets hold on the interfaces, and the accounts are those of the kernel.

Everything happens inside network namespaces, which needs root, iproute2, gcc and TAP devices.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from peer.config.options import Config, load
from peer.errors import SottoError
from peer.gossip.budget import BURST_S
from peer.links import network
from peer.links.network import LinkNetwork
from peer.links.profiles import Profile
from peer.ops.cluster_files import Host
from peer.ops.local_cluster import Cluster
from peer.state.metrics import LinkRecord
from tests.links.namespaces import namespaces

_MISSING = network.missing()

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.skipif(_MISSING is not None, reason=f"links cannot be shaped here: {_MISSING}"),
]

BUDGET = 45_000
ETHERNET_BYTES = 14
"""Bytes that an interface counts on top of each IP packet."""
SEGMENT_HEADER_BYTES = 52
"""IP and TCP headers of a segment over IPv4, with time stamps."""
SAMPLE_S = 0.25
LIMIT_S = 150.0


@dataclass
class Interface:
    """What left the interface of one peer, by the kernel and by the peer."""

    samples: list[tuple[float, float, int]] = field(default_factory=list)
    """(time of the question, time of the answer, bytes by then): on a busy machine the answer comes later."""
    records: list[LinkRecord] = field(default_factory=list)

    @property
    def sent_bytes(self) -> int:
        return self.samples[-1][2] - self.samples[0][2]

    def spans(self) -> list[tuple[float, int]]:
        """Return (seconds at most, bytes) of all spans between two samples."""
        return [
            (told - asked, after - before)
            for (asked, _, before), (_, told, after) in itertools.combinations(self.samples, 2)
        ]


@dataclass
class ShapedRun:
    interfaces: list[Interface]
    accuracy: float | None
    """Accuracy of the averaged model."""
    fractions: list[list[float]]
    """For each peer, the fraction of every round."""
    logs: list[str]


def job(*overrides: str) -> Config:
    common = ("evaluation.every_rounds=0", "training.warmup_rounds=5", "transport.backoff_max_s=0.5")
    return load(environment={}, overrides=[*common, *overrides])


def run_shaped(config: Config, directory: Path, *, num_peers: int, rate_kbit: float) -> ShapedRun:
    """Train to the last round where each peer sends and receives so much, and look at its interface meanwhile."""
    profile = Profile(up_kbit=rate_kbit, down_kbit=rate_kbit, latency_ms=0)
    interfaces = [Interface() for _ in range(num_peers)]
    with LinkNetwork([profile] * num_peers) as links:
        hosts = [Host(links.address(peer), 7700) for peer in range(num_peers)]
        with closing(
            Cluster(config, Path(), num_peers=num_peers, directory=directory, hosts=hosts, launcher=links.command)
        ) as cluster:
            try:
                cluster.start()
                until = time.monotonic() + LIMIT_S
                is_over = False
                while not is_over:
                    is_over = cluster.finished()
                    for peer, interface in enumerate(interfaces):
                        asked = time.monotonic()
                        sent = links.sent_bytes(peer)
                        interface.samples.append((asked, time.monotonic(), sent))
                    if (failure := cluster.failure()) is not None:
                        raise failure
                    if time.monotonic() > until:
                        raise SottoError(f"the run takes longer than {LIMIT_S:g} s")
                    cluster.poll()
                    time.sleep(SAMPLE_S)
                cluster.evaluate(config.run.rounds, cluster.final_states())
                for record in (link for store in cluster.stores()[1:] for link in store.links()):
                    interfaces[record.peer].records.append(record)
                fractions = [[float(row.fraction or 0.0) for row in store.rounds()] for store in cluster.stores()[1:]]
                logs = [(file.parent / "log.txt").read_text() for file in cluster.peer_files]
                return ShapedRun(interfaces, cluster.averaged_figure, fractions, logs)
            finally:
                cluster.stop()


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
    run = run_shaped(config, tmp_path, num_peers=2, rate_kbit=1000)
    assert run.accuracy is not None
    assert run.accuracy > 0.9
    for interface in run.interfaces:
        first_message = 6_000
        assert all(sent <= BUDGET * (span + BURST_S) + first_message for span, sent in interface.spans())
        assert_accounts_agree(interface)
    for used in run.fractions:
        # Turned down, and what the rest of the budget allows is used.
        assert used[0] == 0.5
        assert max(used[100:]) < 0.5
    assert "a budget depends on the clock" in run.logs[0]


def test_a_run_over_links_of_one_megabit_needs_no_budget(tmp_path: Path) -> None:
    # Full models, 64 kB each, to two neighbours over 2 Mbit/s: half a second for each round.
    config = job("run.rounds=8", "algorithm.name=sgp", "graph.kind=ring")
    run = run_shaped(config, tmp_path, num_peers=4, rate_kbit=2000)
    for interface in run.interfaces:
        # What the shaper lets through at once is on top of the rate.
        assert all(sent <= 2000 * 125 * 1.05 * span for span, sent in interface.spans() if span >= 2.0)
        assert len(interface.records) == 2
        assert all(record.frame_bytes > 8 * 60_000 for record in interface.records)
        assert_accounts_agree(interface)


def assert_accounts_agree(interface: Interface) -> None:
    """The peer's own figures of its links and the interface's are within 1 % of each other."""
    for record in interface.records:
        assert record.socket_bytes is not None
        assert record.packet_bytes is not None
        assert record.payload_bytes < record.frame_bytes < record.protobuf_bytes < record.socket_bytes
        assert record.socket_bytes < record.packet_bytes
    packets = sum(record.packet_bytes or 0 for record in interface.records)
    segments = (packets - sum(record.socket_bytes or 0 for record in interface.records)) / SEGMENT_HEADER_BYTES
    expected = packets + segments * ETHERNET_BYTES
    assert packets < interface.sent_bytes
    # Handshakes and farewells of TCP are in the one and not in the other.
    assert abs(interface.sent_bytes - expected) < 0.01 * expected + 500 * len(interface.records)


def test_nothing_is_left_behind_when_a_run_fails() -> None:
    profile = Profile(up_kbit=1000, down_kbit=1000, latency_ms=0)
    started: list[subprocess.Popen[bytes]] = []
    names: set[str] = set()

    def fail(links: LinkNetwork) -> None:
        names.update(links.namespace(device) for device in range(2))
        inside = [*links.command(0), "sh", "-c", "echo inside; exec sleep 600"]
        started.append(subprocess.Popen(inside, stdout=subprocess.PIPE))
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == b"inside\n"
        assert names <= namespaces()
        raise SottoError("it did not work out")

    with pytest.raises(SottoError), LinkNetwork([profile] * 2) as links:
        fail(links)
    assert started[0].wait(60) != 0
    assert not names & namespaces()
