"""Divides a cluster in two in the middle of a run and lets it heal: what does that cost the worst peer?

    python -m tools.partition_study [--seeds 0,1,2] [--graphs exponential] [--algorithms sgp,sparse-push,quant-sgp]
                                    [--json FILE]

Eight simulated peers, whose participants, messages and bytes are those of real ones, train the digits task at skew 0.8
with `rounds.late = "skip"`. From two fifths to three fifths of the rounds nothing crosses between peers 0 to 3 and 4 to
7, and what they had for each other arrives when the links are back. Each side goes on without half of the classes: in
one run for `rounds.max_skipped_rounds` rounds (20), after which it waits, in another one all the time. Both are
compared with the run whose links hold. The exit code is 1 where the worst peer of the first is more than a point
behind, as the mean of the seeds.

Where peers wait for each other (`rounds.late = "wait"`, the default) a partition costs time alone: rounds stand still,
and the models are the same to the last bit.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from peer.config.options import Config
from peer.errors import DivergenceError
from peer.simulate.network import Cut, LinkModel
from peer.simulate.run import run
from tools.grid import Program, write_rows

PROGRAM = Program.named("partition")
PEERS = 8
SIDE = frozenset(range(PEERS // 2))
ALLOWED_POINTS = 1.0
_FROM, _UNTIL = 0.4, 0.6
"""Fractions of the run; a round takes a virtual second where nobody is late."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Accuracies at the end of one run, in percent; 0 if it diverged."""

    worst: float
    averaged: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run with its links whole, and two with the cluster divided for a while."""

    graph: str
    algorithm: str
    seed: int
    whole: Outcome
    waits: Outcome
    """Each side waits after `rounds.max_skipped_rounds` rounds."""
    goes_on: Outcome
    """Neither side ever waits."""


def outcome(config: Config, *cuts: Cut) -> Outcome:
    """Run a job over links with these cuts."""
    try:
        found = run(config, Path(), num_peers=PEERS, links=LinkModel(cuts=cuts), step_s=1.0, baseline=False).summary
    except DivergenceError:
        return Outcome(worst=0.0, averaged=0.0)
    assert found.averaged_accuracy is not None
    return Outcome(worst=100 * min(found.peer_accuracy), averaged=100 * found.averaged_accuracy)


def measure(arguments: argparse.Namespace, algorithm: str, graph: str, seed: int) -> Row:
    """Run the job three times."""
    own = [f"algorithm.name={algorithm}", f"graph.kind={graph}", f"run.seed={seed}"]
    config = PROGRAM.config(*own, f"run.rounds={arguments.rounds}", *arguments.set)
    cut = Cut(peers=SIDE, from_s=_FROM * arguments.rounds, until_s=_UNTIL * arguments.rounds)
    without_end = config.rounds.model_copy(update={"max_skipped_rounds": arguments.rounds})
    return Row(
        graph=graph,
        algorithm=algorithm,
        seed=seed,
        whole=outcome(config),
        waits=outcome(config, cut),
        goes_on=outcome(config.model_copy(update={"rounds": without_end}), cut),
    )


def main() -> int:
    """Run all seeds and print a table."""
    arguments = PROGRAM.parse(__doc__)
    rows: list[Row] = []
    behind = False
    print("worst peer (averaged model), %")
    print("| graph | algorithm | seed | links whole | divided, waits after a while | divided, goes on |", flush=True)
    for graph, algorithm in itertools.product(arguments.graphs, arguments.algorithms):
        own = []
        for seed in arguments.seeds:
            row = measure(arguments, algorithm, graph, seed)
            own.append(row)
            cells = (f"{each.worst:.2f} ({each.averaged:.2f})" for each in (row.whole, row.waits, row.goes_on))
            print(f"| {graph} | {algorithm} | {seed} | " + " | ".join(cells) + " |", flush=True)
        waits = statistics.mean(row.whole.worst - row.waits.worst for row in own)
        goes_on = statistics.mean(row.whole.worst - row.goes_on.worst for row in own)
        print(
            f"{graph}, {algorithm}: costs the worst peer {waits:+.2f} points, and {goes_on:+.2f} where neither side "
            f"waits; mean of {len(own)} seeds",
            flush=True,
        )
        behind |= waits > ALLOWED_POINTS
        rows += own
        write_rows(rows, arguments.json)
    return int(behind)


if __name__ == "__main__":
    sys.exit(main())
