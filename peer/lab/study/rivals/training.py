"""Real training of a rival: its own optimizer and communication, on the data, batches and model of a configuration.

One process opens the data and forks a worker for each peer; they talk by gloo over the loopback interface. Partition,
batches, logit adjustment, learning rates and evaluation are those of `peer.train`, so that rivals differ from our
algorithms in nothing else. Started with the path of its orders (JSON) as the only argument.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from peer.config.options import Config, load
from peer.errors import SottoError
from peer.lab.study.rivals.methods import Descent, make_method
from peer.lab.study.rivals.training_orders import TrainingOrders
from peer.run.setup import RunSetup
from peer.train.evaluation import evaluate_model
from peer.train.local_step import Trainer
from peer.train.threads import use_one_thread

_PATIENCE = timedelta(minutes=30)
"""Longest wait of a worker for the others, which share a machine that may be busy."""


def main() -> None:
    """Run all workers; the exit code is 1 if one failed."""
    orders = TrainingOrders(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    use_one_thread()
    config = load(environment={}, overrides=orders.overrides)
    setup = RunSetup.open(config, Path(), orders.num_workers)
    # Read once, and forked: nobody has computed anything yet, so no thread is lost.
    setup.task.train_data()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_work, args=(orders, config, setup, rank)) for rank in range(orders.num_workers)]
    for worker in workers:
        worker.start()
    running = workers
    while running and not any(worker.exitcode for worker in workers):
        wait([worker.sentinel for worker in running])
        running = [worker for worker in workers if worker.exitcode is None]
    # Also where all of them failed at once.
    if any(worker.exitcode for worker in workers):
        # The others would wait for it.
        for worker in running:
            worker.kill()
        sys.exit(1)


def _work(orders: TrainingOrders, config: Config, setup: RunSetup, rank: int) -> None:
    """Train as one worker. With an orderly shutdown, threads of gloo abort now and then."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(orders.folder, 'meeting').resolve()}",
        rank=rank,
        world_size=orders.num_workers,
        timeout=_PATIENCE,
    )
    points = train(orders, config, setup.trainer(rank), rank)
    if rank == 0:
        orders.result_file.write_text(json.dumps(points))
    dist.barrier()
    os._exit(0)


def train(orders: TrainingOrders, config: Config, trainer: Trainer, rank: int) -> list[list[float]]:
    """Return the points of the curve, the same at all workers. Raises SottoError if the loss is not finite, or models
    differ where they are judged."""
    options = config.training
    descent = Descent(beta=options.beta, weight_decay=options.weight_decay)
    method = make_method(orders.name, orders.settings, trainer.model, descent)
    points, losses = [], torch.zeros(2, dtype=torch.float64)
    for step in range(config.run.rounds):
        loss = method.step(partial(trainer.batch_loss, step), trainer.rate(step))
        losses += torch.tensor([float(loss), 1.0])
        done = step + 1
        if done == config.run.rounds or (config.evaluation.every_rounds and done % config.evaluation.every_rounds == 0):
            dist.all_reduce(losses)
            mean = float(losses[0] / losses[1])
            if not np.isfinite(mean):
                raise SottoError(f"the loss is not finite after {done} steps")
            points.append([float(done), _accuracy(trainer, rank, orders.num_workers), mean])
            losses.zero_()
    return points


def _accuracy(trainer: Trainer, rank: int, num_workers: int) -> float:
    """Return the accuracy on the test set, of which each worker judges a part."""
    digest = hashlib.sha256(trainer.vector().tobytes()).digest()
    low = torch.from_numpy(np.frombuffer(digest, np.int64).copy())
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        raise SottoError("the workers hold different models")
    test = trainer.task.test_data()
    indices = np.arange(len(test), dtype=np.int64)[rank::num_workers]
    found = evaluate_model(trainer.task, trainer.model, test, indices, trainer.device)
    right = torch.tensor([float(found.correct.sum())], dtype=torch.float64)
    dist.all_reduce(right)
    return float(right) / len(test)


if __name__ == "__main__":
    main()
