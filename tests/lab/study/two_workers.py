"""A program: two workers train a small model with each of the rivals' methods; prints all models as JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from peer.lab.study.rivals.methods import Descent, eight_bit_mean, make_method
from tests.lab.study.test_rivals import METHODS, SIZE, STEPS, WEIGHT_DECAY, rate


class Distance(nn.Module):
    """½ ‖w − c‖² for a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.linspace(-1.0, 1.0, SIZE)
        self.matrix = nn.Parameter(start[:-10].clone().view(-1, 15))
        self.vector = nn.Parameter(start[-10:].clone())

    def forward(self, centre: torch.Tensor) -> torch.Tensor:
        return 0.5 * (torch.cat([self.matrix.reshape(-1), self.vector]) - centre).square().sum()


def apply(centre: torch.Tensor, module: nn.Module) -> torch.Tensor:
    distance: torch.Tensor = module(centre)
    return distance


def work(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    found = {}
    for label, (name, settings) in METHODS.items():
        model = Distance()
        method = make_method(name, settings, model, Descent(beta=0.9, weight_decay=WEIGHT_DECAY))
        centre = torch.sin(torch.arange(SIZE) * (rank + 1.0))
        for step in range(STEPS):
            method.step(partial(apply, centre), rate(step))
        found[label] = torch.cat([model.matrix.detach().reshape(-1), model.vector.detach()]).tolist()
    found["eight bits"] = eight_bit_mean(torch.sin(torch.arange(SIZE) * (rank + 1.0))).tolist()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(rank, Path(sys.argv[1]))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(any(worker.exitcode for worker in workers))
