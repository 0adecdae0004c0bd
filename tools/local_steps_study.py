"""How many local steps may a training script do between two exchanges, and what does an outer momentum change?

    python -m tools.local_steps_study --set data.directory=FOLDER [--steps 256] [--every 1,8,32] [--outer 0:1,0.5:0.5]
                                      [--json FILE]

Eight simulated peers run a training loop of their own with `sottovoce.simulate`: SGD with Nesterov momentum, weight
decay, a warm-up and a cosine, on CIFAR-10 averaged down to 16×16 pixels at skew 0.8, with the loss that is adjusted for
the labels of the peer. All rows have as many gradient steps, of the same batches at the same learning rate; they differ
in how many of them lie between two exchanges (`--every`), and in momentum and learning rate of the outer step
(`--outer`). The graph is the one-peer exponential one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sottovoce
import torch

from peer.config.options import Config, load
from peer.config.writer import write_peer_file
from peer.run.setup import RunSetup
from peer.train.threads import use_one_thread
from tools.grid import Program, write_rows

PEERS = 8
PROGRAM = Program.named("local_steps")
GOSSIP = ("algorithm.name=sgp", "graph.kind=exponential-one-peer", "evaluation.every_rounds=0")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. Accuracies in percent."""

    every: int
    outer_momentum: float
    outer_learning_rate: float
    rounds: int
    worst: float
    mean: float
    averaged: float
    """Accuracy of the average of all models."""
    sent_mbytes: float
    """Mean over the peers."""
    cpu_s: float


def train(where: sottovoce.Place, setup: RunSetup, every: int, momentum: float, rate: float) -> npt.NDArray[np.float32]:
    """Train as a training script does; return the final model of this peer."""
    trainer = setup.trainer(where.index)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    with sottovoce.join(
        trainer.model,
        where,
        every=every,
        keep=[optimizer],
        outer_momentum=momentum,
        outer_learning_rate=rate,
    ) as peer:
        while not peer.done:
            optimizer.param_groups[0]["lr"] = trainer.rate(peer.steps)
            loss = trainer.batch_loss(peer.steps)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            peer.step(loss)
    return trainer.vector()


def measure(task: Config, folder: Path, *, steps: int, every: int, momentum: float, rate: float) -> Row:
    """Run the scripts of all peers, and judge their models."""
    setup, rounds = RunSetup.open(task, Path(), PEERS), steps // every
    file = folder / "run.toml"
    overrides = ["training.task=loop", f"run.rounds={rounds}", f"run.seed={task.run.seed}", *GOSSIP]
    write_peer_file(file, load(environment={}, overrides=overrides))
    started = time.process_time()
    found = sottovoce.simulate(lambda where: train(where, setup, every, momentum, rate), file, peers=PEERS)
    cpu_s = time.process_time() - started
    judge = setup.trainer(0)
    accuracies = [100 * judge.evaluate(model).accuracy for model in found.results]
    average = np.asarray(np.stack(found.results).mean(axis=0), np.float32)
    return Row(
        every=every,
        outer_momentum=momentum,
        outer_learning_rate=rate,
        rounds=rounds,
        worst=min(accuracies),
        mean=sum(accuracies) / PEERS,
        averaged=100 * judge.evaluate(average).accuracy,
        sent_mbytes=found.sent_bytes / PEERS / 1e6,
        cpu_s=cpu_s,
    )


def main() -> int:
    """Run all combinations and print a table."""
    arguments = PROGRAM.parse(__doc__)
    use_one_thread()
    task = PROGRAM.config(f"run.rounds={arguments.steps}", *arguments.set)
    rows: list[Row] = []
    print("| H | outer momentum, rate | rounds | worst | mean | averaged | MB sent by a peer | CPU s |", flush=True)
    for outer in arguments.outer:
        momentum, rate = map(float, outer.split(":"))
        for every in arguments.every:
            with tempfile.TemporaryDirectory() as folder:
                row = measure(task, Path(folder), steps=arguments.steps, every=every, momentum=momentum, rate=rate)
            rows.append(row)
            print(
                f"| {every} | {momentum:g}, {rate:g} | {row.rounds} | {row.worst:.1f} | {row.mean:.1f} |"
                f" {row.averaged:.1f} | {row.sent_mbytes:.2f} | {row.cpu_s:.0f} |",
                flush=True,
            )
            write_rows(rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
