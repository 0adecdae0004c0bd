"""One worker of a rival: torch's DistributedDataParallel, or D-PSGD on gloo. Run by `rivals`, in a namespace.

    rival_program.py NAME RANK WORKERS ADDRESS SHAPES ROUNDS STEP_S

The parameters have the shapes of the model and a gradient that costs next to nothing, and the local step is made to
last STEP_S: DDP sends what it averages after the backward pass of the last layers, which is where the step ends. It
prints the seconds at the end of each round, and what the interface has sent by then, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

_RANK_OF_POWER_SGD = 2


class Shapes(nn.Module):
    """Parameters of given shapes, each with a dense gradient."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(*shape) * 0.01) for shape in shapes)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Return ½ · scale · Σ‖w‖²."""
        return 0.5 * scale * torch.stack([(part * part).sum() for part in self.parts]).sum()


def ddp(model: Shapes, hook: str | None) -> Callable[[float], None]:
    """Return the step of DistributedDataParallel with a communication hook."""
    # More than one bucket makes gloo abort under PowerSGD.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=100 if hook == "powersgd" else 25)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=_RANK_OF_POWER_SGD, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)

    def step(step_s: float) -> None:
        optimizer.zero_grad()
        loss = wrapped(torch.tensor(1.0))
        time.sleep(step_s)
        loss.backward()
        optimizer.step()

    return step


def d_psgd(model: Shapes, rank: int, workers: int) -> Callable[[float], None]:
    """Return the step of D-PSGD: full models to both neighbours of a ring."""
    parameters = list(model.parameters())

    def step(step_s: float) -> None:
        time.sleep(step_s)
        model.zero_grad()
        model(torch.tensor(1.0)).backward()
        own = torch.cat([part.detach().flatten() for part in parameters])
        left, right = torch.empty_like(own), torch.empty_like(own)
        before, after = (rank - 1) % workers, (rank + 1) % workers
        requests = [dist.isend(own, before), dist.isend(own, after), dist.irecv(left, before), dist.irecv(right, after)]
        for request in requests:
            request.wait()
        mixed, start = (own + left + right) / 3, 0
        with torch.no_grad():
            for part in parameters:
                part.copy_(mixed[start : start + part.numel()].view_as(part))
                part.add_(part.grad, alpha=-0.01)
                start += part.numel()

    return step


def main(arguments: Sequence[str]) -> None:
    """Run one worker."""
    name, rank, workers, address, shapes, rounds, step_s = arguments
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": "7701", "RANK": rank, "WORLD_SIZE": workers}
    dist.init_process_group("gloo")
    model = Shapes(json.loads(shapes))
    if name == "d-psgd-gloo":
        step = d_psgd(model, int(rank), int(workers))
    else:
        step = ddp(model, {"ddp": None, "ddp-fp16": "fp16", "ddp-powersgd": "powersgd"}[name])
    counter = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes")
    ends, sent = [], []
    started = time.monotonic()
    for _ in range(int(rounds)):
        step(float(step_s))
        ends.append(time.monotonic() - started)
        sent.append(int(counter.read_text()))
    dist.barrier()
    print(json.dumps({"ends": ends, "sent_bytes": sent, "cpu_s": time.process_time()}), flush=True)
    # Taken down in order, gloo now and then aborts in its threads.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
