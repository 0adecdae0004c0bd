"""How accurate is the worst honest peer where some members send poisonous models, with plain and with robust mixing?

    python -m tools.robustness_study --data FOLDER [--seeds 0,1,2] [--skews 0,0.8] [--assume 2] [--rounds 200]

Eight simulated peers, each of which hears all others, train logistic regression on MNIST (without `--data`: an MLP on
the digits task) with `d-psgd`. The last of them attack: they take part as everybody does, but what they send in the
place of their models is well-formed and wrong. Nothing refuses it; what it does depends on `algorithm.mixing` alone.

    negative   −4 times the own model
    noise      independent numbers of the normal distribution, others in each round
    shift      mean − 1.5 standard deviations of the honest models, coordinate by coordinate ("A little is enough",
               Baruch et al. 2019): the attackers know all models, and hide among them

`--assume` is `algorithm.attackers`, the number of liars that the honest peers reckon with; it is the same in runs with
fewer attackers, so that the rows without any show what protection costs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from peer import wire
from peer.compress.payload import FloatArray
from peer.config.options import Config
from peer.errors import DivergenceError
from peer.gossip.effects import OutgoingFrame
from peer.gossip.mixing import whole
from peer.simulate.rounds import Simulator
from peer.train.local_step import Trainer
from tools.grid import Program

PROGRAM = Program.named("robustness")
PEERS = 8
ATTACKS = ("negative", "noise", "shift")
MIXING = ("plain", "clipped", "trimmed-mean")
NEGATIVE, DEVIATIONS = -4.0, 1.5


class AttackedRun(Simulator):
    """A run whose last peers send other numbers than their models."""

    attack: str = ATTACKS[0]
    attackers: int = 0

    @property
    def num_honest(self) -> int:
        return self.num_peers - self.attackers

    def deliver(self, sender: int, frames: Sequence[OutgoingFrame]) -> None:
        if sender >= self.num_honest:
            frames = [replace(outgoing, frame=self._poisoned(outgoing.frame)) for outgoing in frames]
        super().deliver(sender, frames)

    def _poisoned(self, frame: bytes) -> bytes:
        """Return a frame as an honest peer would send it, with other numbers."""
        layout = self.trainer.layout
        message = wire.decode(frame, layout)
        values = poison(
            self.attack,
            self.participants[message.sender].model(),
            [participant.model() for participant in self.participants[: self.num_honest]],
            np.random.default_rng((self.config.run.seed, message.sender, message.round)),
        )
        return wire.encode(replace(message, layers=whole(values, layout)), layout)


def poison(attack: str, own: FloatArray, honest: Sequence[FloatArray], rng: np.random.Generator) -> FloatArray:
    """Return the numbers that an attacker sends in place of its model, float32[n]."""
    if attack == "negative":
        return own * np.float32(NEGATIVE)
    if attack == "noise":
        return rng.standard_normal(own.size, dtype=np.float32)
    models = np.stack(honest)
    shifted: FloatArray = models.mean(axis=0) - np.float32(DEVIATIONS) * models.std(axis=0)
    return shifted


def settings(arguments: argparse.Namespace, mixing: str, skew: str, seed: int) -> Config:
    """Return the job."""
    task = ["training.task=digits"]
    if arguments.data is not None:
        task = ["training.task=mnist", f"data.directory={arguments.data}"]
    own = [f"algorithm.mixing={mixing}", f"algorithm.attackers={arguments.assume}", f"data.skew={skew}"]
    return PROGRAM.config(*task, *own, f"run.seed={seed}", f"run.rounds={arguments.rounds}", *arguments.set)


def worst_honest(config: Config, attackers: int, attack: str) -> float | None:
    """Return the accuracy of the worst honest peer at the end, in percent; None where the run diverged."""
    run = AttackedRun(config, Path(), num_peers=PEERS)
    run.attackers, run.attack = attackers, attack
    try:
        run.run()
    except DivergenceError:
        return None
    trainer = run.trainer
    assert isinstance(trainer, Trainer)
    return 100 * min(trainer.evaluate(each.model()).accuracy for each in run.participants[: run.num_honest])


def cell(figures: Sequence[float | None]) -> str:
    """Return the figures of all seeds in a few words."""
    finished = [figure for figure in figures if figure is not None]
    if len(finished) < len(figures):
        return f"diverged ({len(figures) - len(finished)} of {len(figures)})"
    mean = f"{np.mean(finished):.1f}"
    return mean if len(finished) == 1 else f"{mean} ({min(finished):.1f} to {max(finished):.1f})"


def main() -> int:
    """Print a table."""
    arguments = PROGRAM.parse(__doc__)
    print("worst honest peer, %")
    print(f"| skew | attackers | attack | {' | '.join(MIXING)} |")
    print("| --- | --- | --- " + "| ---: " * len(MIXING) + "|", flush=True)
    for skew, attackers in itertools.product(arguments.skews, arguments.attackers):
        for attack in ATTACKS if attackers else ("none",):
            cells = [
                cell(
                    [
                        worst_honest(settings(arguments, mixing, skew, seed), attackers, attack)
                        for seed in arguments.seeds
                    ]
                )
                for mixing in MIXING
            ]
            print(f"| {skew} | {attackers} | {attack} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
