"""Divides a cluster in two in the middle of a run and lets it heal: what does that cost the worst peer?

    python tools/partition_study.py [--seeds 0,1,2] [--graphs exponential,directed-ring] [--algorithms quant-sgp]
                                    [--set rounds.max_skipped_rounds=1000] [--json FILE]

Eight simulated peers, whose participants, messages and bytes are those of real ones, train the digits task at skew 0.8
with `rounds.late = "skip"`. From two fifths to three fifths of the rounds nothing crosses between peers 0 to 3 and 4 to
7. Each side goes on alone, without half of the classes, for `rounds.max_skipped_rounds` rounds (20; with `--set` for as
long as the partition) and then waits; what they had for each other arrives when the links are back. The row compares
the worst peer's accuracy with that of the run whose links hold. The exit code is 1 where the worst peer is more than a
point behind, as the mean of the seeds.

Where peers wait for each other (`rounds.late = "wait"`, the default) a partition costs time alone: rounds stand still,
and the models are the same to the last bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.config import Config, load
from peer.simulate.network import Cut, LinkModel
from peer.simulate.run import run

PEERS = 8
SIDE = frozenset(range(PEERS // 2))
ALLOWED_POINTS = 1.0
_FROM, _UNTIL = 0.4, 0.6
"""Of the run; a round takes a virtual second where nobody is late."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run with its links whole, and one with the cluster divided for a while."""

    graph: str
    algorithm: str
    seed: int
    worst_whole: float
    """Accuracy of the worst peer, in percent."""
    worst_divided: float
    averaged_whole: float
    averaged_divided: float


def settings(arguments: argparse.Namespace, algorithm: str, graph: str, seed: int) -> Config:
    """Return the job."""
    return load(
        environment={},
        overrides=[
            f"algorithm.name={algorithm}",
            f"graph.kind={graph}",
            f"run.seed={seed}",
            f"run.rounds={arguments.rounds}",
            "data.skew=0.8",
            "evaluation.every_rounds=0",
            "rounds.late=skip",
            "rounds.late_after_s=0.5",
            # Two rounds and a half.
            "rounds.leave_out_after_s=2.5",
            *arguments.set,
        ],
    )


def measure(arguments: argparse.Namespace, algorithm: str, graph: str, seed: int) -> Row:
    """Run the job twice."""
    config = settings(arguments, algorithm, graph, seed)
    cut = Cut(peers=SIDE, from_s=_FROM * arguments.rounds, until_s=_UNTIL * arguments.rounds)
    whole, divided = (
        run(config, Path(), num_peers=PEERS, links=LinkModel(cuts=cuts), step_s=1.0, baseline=False).summary
        for cuts in ((), (cut,))
    )
    assert whole.averaged_accuracy is not None
    assert divided.averaged_accuracy is not None
    return Row(
        graph=graph,
        algorithm=algorithm,
        seed=seed,
        worst_whole=100 * min(whole.peer_accuracy),
        worst_divided=100 * min(divided.peer_accuracy),
        averaged_whole=100 * whole.averaged_accuracy,
        averaged_divided=100 * divided.averaged_accuracy,
    )


def main() -> int:
    """Run all seeds and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--graphs", default="exponential,directed-ring")
    parser.add_argument("--algorithms", default="quant-sgp")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the job")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    arguments = parser.parse_args()
    rows: list[Row] = []
    behind = False
    print("| graph | algorithm | seed | worst peer | with a partition | averaged | with a partition |", flush=True)
    for graph, algorithm in itertools.product(arguments.graphs.split(","), arguments.algorithms.split(",")):
        own = []
        for seed in map(int, arguments.seeds.split(",")):
            row = measure(arguments, algorithm, graph, seed)
            own.append(row)
            print(
                f"| {graph} | {row.algorithm} | {seed} | {row.worst_whole:.2f} % | {row.worst_divided:.2f} % | "
                f"{row.averaged_whole:.2f} % | {row.averaged_divided:.2f} % |",
                flush=True,
            )
        cost = statistics.mean(row.worst_whole - row.worst_divided for row in own)
        print(
            f"{graph}, {algorithm}: the partition costs the worst peer {cost:+.2f} points, mean of {len(own)} seeds",
            flush=True,
        )
        behind |= cost > ALLOWED_POINTS
        rows += own
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return int(behind)


if __name__ == "__main__":
    sys.exit(main())
