"""One cell of a study: a whole run of real peers in namespaces, one interface each, and its figures."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from peer.config.options import Config
from peer.errors import SottoError
from peer.links.measure import Measured, measure
from peer.links.network import LinkNetwork
from peer.links.profiles import Profile
from peer.ops.cluster_files import Host
from peer.ops.local_cluster import Cluster
from peer.records import RoundRecord
from peer.run.setup import RunSetup
from peer.state.metrics import MetricsStore

PORT = 7700
_POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The measurement of one cell. Means are over peers and settled rounds."""

    rounds: int
    """Settled rounds."""
    round_s: float
    """Median over the settled rounds, since the machine does other work too."""
    mean_round_s: float
    train_s: float
    """Duration of the gradient alone, which is part of the stated step."""
    gossip_s: float
    wait_s: float
    cpu_s: float
    payload_bytes: float
    """Compressed numbers that one peer sends in a round."""
    interface_bytes: float
    """Bytes that leave the interface of one peer in a round, headers included; mean over all rounds."""
    goodput_kbit: float
    """Goodput of the link between devices 0 and 1, measured before the peers start."""
    round_trip_ms: float
    asked_kbit: float
    asked_round_trip_ms: float
    loss_curve: tuple[tuple[float, float, float], ...] = ()
    """(seconds, bytes that one peer has sent, mean training loss of the peers), round by round."""

    @classmethod
    def of(cls, ends: Sequence[Sequence[float]], settle: int, link: Measured, **figures: Any) -> Self:
        """Return a measurement from the seconds at which each peer ended its rounds, of which the first `settle` do not
        count, and from the other figures."""
        means = [statistics.mean(together) for together in zip(*ends, strict=True)]
        spans = [after - before for before, after in itertools.pairwise(means[settle - 1 :])]
        return cls(
            rounds=len(spans),
            round_s=statistics.median(spans),
            mean_round_s=statistics.mean(spans),
            goodput_kbit=link.goodput_kbit,
            round_trip_ms=link.round_trip_ms,
            asked_kbit=link.asked_kbit,
            asked_round_trip_ms=link.asked_round_trip_ms,
            **figures,
        )


def settle_rounds(config: Config, num_peers: int) -> int:
    """Return how many rounds at the start of a run are left out of the figures. Raises SottoError.

    They contain the delay of the process that started last: its neighbours wait for it in the first round, their
    neighbours in the second, and so on across the graph.
    """
    schedule = RunSetup.open(config, Path(), num_peers).schedule
    return 1 + (schedule.diameter or num_peers)


def run_cell(config: Config, num_peers: int, profile: Profile, *, limit_s: float) -> CellResult:
    """Train in shaped namespaces to the last round. Raises SottoError if a peer fails or `limit_s` is exceeded."""
    settle = settle_rounds(config, num_peers)
    with tempfile.TemporaryDirectory(prefix="sotto-cell-") as name, LinkNetwork([profile] * num_peers) as network:
        link = measure(network, 0, 1, seconds=1.0)
        hosts = [Host(network.address(peer), PORT) for peer in range(num_peers)]
        cluster = Cluster(
            config, Path(), num_peers=num_peers, directory=Path(name), hosts=hosts, launcher=network.command
        )
        before = [network.sent_bytes(peer) for peer in range(num_peers)]
        try:
            run_to_the_end(cluster, limit_s)
            sent = [network.sent_bytes(peer) - before[peer] for peer in range(num_peers)]
            # Not `cluster.poll`, which would also judge the averaged model.
            records = []
            for folder in cluster.state_folders:
                with closing(MetricsStore(folder / "metrics.sqlite", read_only=True)) as store:
                    records.append(store.rounds())
            return summarize(records, sent, settle, link)
        finally:
            cluster.stop()
            cluster.close()


def run_to_the_end(cluster: Cluster, limit_s: float) -> None:
    """Start the peers and wait until all have ended. Raises SottoError if one fails or `limit_s` is exceeded."""
    until = time.monotonic() + limit_s
    cluster.start()
    while not cluster.finished():
        if (failure := cluster.failure()) is not None:
            raise failure
        if time.monotonic() > until:
            raise SottoError(f"the cell took longer than {limit_s:.0f} s")
        time.sleep(_POLL_S)
    if (failure := cluster.failure()) is not None:
        raise failure


_MEANS = ("train_s", "gossip_s", "wait_s", "cpu_s", "payload_bytes")
"""Fields of a round's row of which a result has the mean."""


def summarize(records: Sequence[Sequence[RoundRecord]], sent: Sequence[int], settle: int, link: Measured) -> CellResult:
    """Return the figures of a run from its peers' records, by peer and round, and their interfaces' bytes.

    The first `settle` rounds, at least one, count for the interfaces' bytes and the curve of the loss only.
    """
    settled = [row for rows in records for row in rows[settle:]]
    curve, total = [], 0.0
    for together in zip(*records, strict=True):
        total += statistics.mean(row.frame_bytes for row in together)
        losses = [row.loss for row in together if row.loss is not None]
        if losses:
            seconds = statistics.mean(row.time_s for row in together)
            curve.append((seconds, total, statistics.mean(losses)))
    return CellResult.of(
        [[row.time_s for row in rows] for rows in records],
        settle,
        link,
        **{name: statistics.mean(getattr(row, name) for row in settled) for name in _MEANS},
        interface_bytes=statistics.mean(sent) / len(records[0]),
        loss_curve=tuple(curve),
    )
