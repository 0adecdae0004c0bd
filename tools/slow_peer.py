"""Shows what one slow peer costs the others: gradient steps a second with and without it, synchronous and not.

    python -m tools.slow_peer [--peers 8] [--factor 4] [--step-s 0.1] [--rounds 100] [--real] [--json FILE]

Without `--real` the runs are simulated: exact, and over in seconds. With it every peer is a process of its own, whose
local step is made to last `--step-s` (`peer.min_step_s`), and that of the last peer `--factor` times as long
(`peer.slow_down`). Eight processes on two cores then take about rounds × step × (2 × factor + 2) seconds.
Rates are those of single peers, from their own records, without the first tenth.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peer.config.options import Config, load
from peer.config.writer import write_peer_file
from peer.lab.study.cell import run_to_the_end
from peer.ops.local_cluster import Cluster
from peer.records import RoundRecord
from peer.simulate.network import LinkModel
from peer.simulate.run import run
from peer.state.metrics import MetricsStore
from tools.grid import Program, write_rows

PROGRAM = Program.named("slow_peer")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    algorithm: str
    factor: float
    """Ratio of the last peer's step time to that of the others."""
    others_steps_per_s: float
    """Median rate of the other peers."""
    slowest_other_steps_per_s: float
    slow_steps_per_s: float
    staleness: float | None
    worst_accuracy: float | None


def steps_per_s(records: list[RoundRecord]) -> float:
    """Return the rate of one peer, from its own records by round."""
    records = records[len(records) // 10 :]
    return (len(records) - 1) / (records[-1].time_s - records[0].time_s)


def slow_down(cluster: Cluster, peer: int, factor: float) -> None:
    """Make one peer of a cluster, before it is started, `factor` times slower than its steps are."""
    file = cluster.peer_files[peer]
    config = load(file, environment={})
    own = config.peer.model_copy(update={"slow_down": factor - 1.0})
    write_peer_file(file, config.model_copy(update={"peer": own}), force=True)


def simulated(config: Config, peers: int, step_s: float, factor: float, directory: Path) -> list[list[RoundRecord]]:
    """Return the records of every peer of a simulated run."""
    run(
        config,
        Path(),
        num_peers=peers,
        directory=directory,
        step_s=step_s,
        slow={peers - 1: factor},
        links=LinkModel(latency_s=0.001),
        baseline=False,
    )
    records = MetricsStore(directory / "metrics.sqlite", read_only=True).rounds()
    return [[record for record in records if record.peer == peer] for peer in range(peers)]


def real(config: Config, peers: int, factor: float, directory: Path) -> list[list[RoundRecord]]:
    """Return the records of every peer of a run of processes. Raises SottoError if one fails."""
    cluster = Cluster(config, Path(), num_peers=peers, directory=directory)
    try:
        if factor != 1.0:
            slow_down(cluster, peers - 1, factor)
        run_to_the_end(cluster, math.inf)
        cluster.poll()
        return [store.rounds() for store in cluster.stores()[1:]]
    finally:
        cluster.stop()
        cluster.close()


def measure(algorithm: str, factor: float, arguments: argparse.Namespace, directory: Path) -> Row:
    """Run one job and return its row."""
    settings = [f"algorithm.name={algorithm}", f"run.rounds={arguments.rounds}"]
    settings.append(f"peer.min_step_s={arguments.step_s}")
    if algorithm == "moniqua-ad-psgd":
        settings += ["compressor.kind=modulo", "compressor.bits=8"]
    config = PROGRAM.config(*settings)
    if arguments.real:
        peers = real(config, arguments.peers, factor, directory)
        evaluations = [
            record
            for file in directory.glob("peers/peer-*/state/metrics.sqlite")
            for record in MetricsStore(file, read_only=True).evaluations()
        ]
    else:
        peers = simulated(config, arguments.peers, arguments.step_s, factor, directory)
        evaluations = MetricsStore(directory / "metrics.sqlite", read_only=True).evaluations()
    rates = [steps_per_s(records) for records in peers]
    stale = [record.staleness for records in peers for record in records if record.staleness is not None]
    tested = {e.peer: e.accuracy for e in evaluations if e.peer >= 0 and e.split == "test" and e.accuracy is not None}
    return Row(
        algorithm=algorithm,
        factor=factor,
        others_steps_per_s=statistics.median(rates[:-1]),
        slowest_other_steps_per_s=min(rates[:-1]),
        slow_steps_per_s=rates[-1],
        staleness=statistics.fmean(stale) if stale else None,
        worst_accuracy=min(tested.values(), default=None),
    )


def table(rows: list[Row]) -> str:
    """Return the rows as text, each algorithm's rates beside those of its run without a slow peer."""
    lines = [
        f"{'algorithm':16} {'slow peer':>10} {'others /s':>10} {'slowest /s':>10} {'slow /s':>9} "
        f"{'others keep':>12} {'staleness':>10} {'worst peer':>11}"
    ]
    alone = {row.algorithm: row.others_steps_per_s for row in rows if row.factor == 1.0}
    for row in rows:
        stale = "–" if row.staleness is None else f"{row.staleness:.2f}"
        accuracy = "–" if row.worst_accuracy is None else f"{100 * row.worst_accuracy:.1f} %"
        lines.append(
            f"{row.algorithm:16} {row.factor:>9g}× {row.others_steps_per_s:>10.2f} "
            f"{row.slowest_other_steps_per_s:>10.2f} {row.slow_steps_per_s:>9.2f} "
            f"{100 * row.others_steps_per_s / alone[row.algorithm]:>10.1f} % {stale:>10} {accuracy:>11}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print the table."""
    arguments = PROGRAM.parse((__doc__ or "").splitlines()[0])
    rows = []
    for algorithm in arguments.algorithms:
        for factor in (1.0, arguments.factor):
            with tempfile.TemporaryDirectory() as directory:
                rows.append(measure(algorithm, factor, arguments, Path(directory)))
    print(table(rows))
    write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
