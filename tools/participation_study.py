"""Simulates very many peers of which few take part in each round, and shows how the worst of them do.

    python -m tools.participation_study                              1,000 and 10,000 peers, 1 % in each of 300 rounds
    python -m tools.participation_study --peers 100000 --models travel
    python -m tools.participation_study --fraction 0.1 --set algorithm.name=sparse-push --set compressor.kind=top_k

SGP with whole messages among the peers that are drawn, 20 samples of the task `clusters` each with label skew 0.8. Of
100 peers that are there, 10 leave in an hour, for half an hour on average; a round takes a minute of virtual time.
Beside it one process that takes as many steps with as many samples each. All models are evaluated, not a sample.

Models "stay" with their peers, or "travel": those that were drawn hand theirs over to those that are drawn next, and
keep a copy. "fetched at the end" is the same run once all peers that are there after the last round have fetched one of
the models that travelled.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from peer.config.options import Config
from peer.lab.participation import ParticipationSimulator, churn
from peer.train.baseline import single_process
from peer.train.local_step import Trainer
from tools.grid import Program

SAMPLES_OF_A_PEER = 20
STEP_S = 60.0
PROGRAM = Program.named("participation")
HEAD = (
    "| peers | drawn in a round | never drawn | models | worst 1 % | 5 % | median | mean | averaged model "
    "| one process | kB a peer sent | MB in all | CPU, s |"
)


def main() -> int:
    arguments = PROGRAM.parse(__doc__)
    print(HEAD)
    print(re.sub(r"[^|]+", " ---: ", HEAD))
    for peers in arguments.peers:
        samples = f"training.task_options.samples={peers * SAMPLES_OF_A_PEER}"
        config = PROGRAM.config(f"run.rounds={arguments.rounds}", *arguments.set, samples)
        for models in arguments.models:
            for row in rows(config, peers, arguments, travel=models == "travel"):
                print(row, flush=True)
    return 0


def rows(config: Config, peers: int, arguments: argparse.Namespace, *, travel: bool) -> Iterator[str]:
    """Yield the rows of one run."""
    started = time.process_time()
    availability = churn(
        peers,
        config.run.rounds * STEP_S,
        leaving_per_hour=arguments.churn,
        mean_away_s=60 * arguments.away_minutes,
        seed=config.run.seed,
    )
    run = ParticipationSimulator(
        config,
        Path(),
        num_peers=peers,
        fraction=arguments.fraction,
        availability=availability,
        step_s=STEP_S,
        hand_over=travel,
    )
    run.run()
    print(f"{peers:,} peers: {time.process_time() - started:.0f} s, evaluating", file=sys.stderr, flush=True)
    drawn = int(run.times_drawn.sum()) / config.run.rounds
    alone = single_process(
        run.setup.task,
        config.training,
        rounds=config.run.rounds,
        seed=config.run.seed,
        batch_size=round(config.training.batch_size * drawn),
        device=config.peer.device,
        base=run.setup.base,
    )
    trainer = run.trainer
    assert isinstance(trainer, Trainer)
    for models in ("travel", "fetched at the end") if travel else ("stay",):
        if models == "fetched at the end":
            print(f"{run.fetch():,} of {peers:,} peers fetch a model", file=sys.stderr, flush=True)
        accuracies = np.sort([trainer.evaluate(model).accuracy for model in run.models()])
        averaged = trainer.evaluate(run.averaged_model(), averaged=True).accuracy
        figures = [
            accuracies[: max(1, peers // 100)].mean(),
            np.quantile(accuracies, 0.05),
            np.median(accuracies),
            accuracies.mean(),
            averaged,
            alone.evaluation.accuracy,
        ]
        cells = [
            f"{peers:,}",
            f"{drawn:.0f}",
            f"{100 * (run.times_drawn == 0).mean():.1f} %",
            models,
            *(f"{100 * figure:.1f} %" for figure in figures),
            f"{run.frame_bytes / peers / 1e3:.1f}",
            f"{run.frame_bytes / 1e6:,.0f}",
            f"{time.process_time() - started:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
