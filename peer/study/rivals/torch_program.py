"""One worker of torch's DistributedDataParallel, or of D-PSGD on gloo.

The parameters have the shapes of the model and a gradient that costs next to nothing, and the local step is made to
last as long as it shall: DDP sends what it averages after the backward pass of the last layers, which is where the step
ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from peer.study.rivals.worker import Orders, read_orders, run

_RANK_OF_POWER_SGD = 2
_HOOKS = {"ddp": None, "ddp-fp16": "fp16", "ddp-powersgd": "powersgd"}


class Shapes(nn.Module):
    """Parameters of given shapes, each with a dense gradient."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(*shape) * 0.01) for shape in shapes)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Return ½ · scale · Σ‖w‖²."""
        return 0.5 * scale * torch.stack([(part * part).sum() for part in self.parts]).sum()


def ddp(model: Shapes, hook: str | None, step_s: float) -> Callable[[], None]:
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

    def step() -> None:
        optimizer.zero_grad()
        loss = wrapped(torch.tensor(1.0))
        time.sleep(step_s)
        loss.backward()
        optimizer.step()

    return step


def d_psgd(model: Shapes, orders: Orders) -> Callable[[], None]:
    """Return the step of D-PSGD: full models to both neighbours of a ring."""
    parameters = list(model.parameters())
    before, after = (orders.rank - 1) % orders.num_workers, (orders.rank + 1) % orders.num_workers

    def step() -> None:
        time.sleep(orders.step_s)
        model.zero_grad()
        model(torch.tensor(1.0)).backward()
        own = torch.cat([part.detach().flatten() for part in parameters])
        left, right = torch.empty_like(own), torch.empty_like(own)
        requests = [dist.isend(own, before), dist.isend(own, after), dist.irecv(left, before), dist.irecv(right, after)]
        for request in requests:
            assert request is not None
            request.wait()
        mixed, start = (own + left + right) / 3, 0
        with torch.no_grad():
            for part in parameters:
                part.copy_(mixed[start : start + part.numel()].view_as(part))
                assert part.grad is not None
                part.add_(part.grad, alpha=-0.01)
                start += part.numel()

    return step


def main() -> None:
    """Run one worker."""
    orders = read_orders()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {
        "MASTER_ADDR": orders.addresses[0], "MASTER_PORT": "7701", "RANK": str(orders.rank),
        "WORLD_SIZE": str(orders.num_workers), "GLOO_SOCKET_IFNAME": orders.interface,
    }  # fmt: skip
    dist.init_process_group("gloo")
    model = Shapes(orders.shapes)
    if orders.name == "d-psgd-gloo":
        step = d_psgd(model, orders)
    else:
        step = ddp(model, _HOOKS[orders.name], orders.step_s)
    run(orders, step)


if __name__ == "__main__":
    main()
