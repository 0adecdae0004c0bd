"""How accurate are the worst peer and the averaged model where every peer trains with differential privacy?

    python -m tools.privacy_study --data FOLDER [--seeds 0,1] [--skews 0,0.8] [--epsilons none,8,3] [--rounds 200]
                                  [--rates 0.1,0.3,1] [--clip-norms 0.3,1] [--attack shift]

Eight simulated peers, each of which hears all others, train logistic regression on MNIST with `d-psgd`. Learning rate
and clip norm are chosen for each skew and each ε from the same grid (without privacy there is only the rate to choose),
by the worst peer of one run under a seed that the table does not use. That choice reads the accuracy on the test set,
in all rows alike; it is not part of the ε.

`--attack`: the last two peers attack as in tools/robustness_study.py, and the honest ones mix by trimmed means.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peer.config.options import Config
from peer.train.local_step import Trainer
from tools.grid import Program
from tools.robustness_study import PEERS, AttackedRun

PROGRAM = Program.named("privacy")
TUNING_SEED = 100
ATTACKERS = 2


@dataclass(frozen=True)
class Choice:
    """The tuned settings."""

    rate: float
    clip_norm: float | None


@dataclass(frozen=True)
class Result:
    """Accuracies at the end, in percent, and the ε that each peer spent."""

    worst: float
    averaged: float
    epsilon: float | None


def settings(arguments: argparse.Namespace, epsilon: str, skew: str, seed: int, choice: Choice) -> Config:
    """Return the job."""
    private = (
        [] if choice.clip_norm is None else [f"privacy.epsilon={epsilon}", f"privacy.clip_norm={choice.clip_norm}"]
    )
    robust = ["algorithm.mixing=trimmed-mean", f"algorithm.attackers={ATTACKERS}"] if arguments.attack else []
    own = [f"data.directory={arguments.data}", f"data.skew={skew}", f"training.learning_rate={choice.rate}"]
    own += [f"training.batch_size={arguments.batch_size}", f"run.rounds={arguments.rounds}"]
    return PROGRAM.config(*own, f"run.seed={seed}", f"privacy.simulation_seed={seed}", *private, *robust)


def result(config: Config, attack: str | None) -> Result:
    """Return the result of a run; that of the honest peers, where some attack."""
    run = AttackedRun(config, Path(), num_peers=PEERS)
    if attack is not None:
        run.attackers, run.attack = ATTACKERS, attack
    run.run()
    trainer = run.trainer
    assert isinstance(trainer, Trainer)
    models = [participant.model() for participant in run.participants[: run.num_honest]]
    average = np.stack(models).mean(axis=0, dtype=np.float64).astype(np.float32)
    budgets = [run.setup.budget_of_privacy(peer) for peer in range(PEERS)]
    spent = [budget.spent(config.run.rounds) for budget in budgets if budget is not None]
    return Result(
        100 * min(trainer.evaluate(model).accuracy for model in models),
        100 * trainer.evaluate(average).accuracy,
        max(spent, default=None),
    )


def tuned(arguments: argparse.Namespace, epsilon: str, skew: str) -> Choice:
    """Return the best choice of the grid."""
    clip_norms: Sequence[float | None] = [None] if epsilon == "none" else arguments.clip_norms
    choices = [Choice(rate, norm) for rate, norm in itertools.product(arguments.rates, clip_norms)]
    if len(choices) == 1:
        return choices[0]
    found = {
        choice: result(settings(arguments, epsilon, skew, TUNING_SEED, choice), arguments.attack).worst
        for choice in choices
    }
    return max(choices, key=lambda choice: found[choice])


def cell(figures: Sequence[float]) -> str:
    """Return mean and range over the seeds."""
    return f"{np.mean(figures):.1f} ({min(figures):.1f} to {max(figures):.1f})"


def main() -> int:
    """Print a table."""
    arguments = PROGRAM.parse(__doc__)
    print("| skew | ε | spent | learning rate | clip norm | worst peer, % | averaged model, % |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for skew, epsilon in itertools.product(arguments.skews, arguments.epsilons):
        choice = tuned(arguments, epsilon, skew)
        results = [
            result(settings(arguments, epsilon, skew, seed, choice), arguments.attack) for seed in arguments.seeds
        ]
        spent = "–" if results[0].epsilon is None else f"{results[0].epsilon:.2f}"
        norm = "–" if choice.clip_norm is None else f"{choice.clip_norm:g}"
        cells = [cell([each.worst for each in results]), cell([each.averaged for each in results])]
        print(f"| {skew} | {epsilon} | {spent} | {choice.rate:g} | {norm} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
