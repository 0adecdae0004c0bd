"""One worker of a method that needs only torch (`methods`), or of D-PSGD on gloo.

The parameters have the shapes of the model and a gradient that costs next to nothing. The local step is stretched to
its stated duration: DDP sends after the backward pass of the last layers, where the step ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from peer.lab.study.rivals.methods import Descent, Loss, make_method
from peer.lab.study.rivals.worker import Orders, read_orders, run, steps_per_round

_RATE = 0.01


class Shapes(nn.Module):
    """Parameters of given shapes, each with a dense gradient."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(*shape) * 0.01) for shape in shapes)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Return ½ · scale · Σ‖w‖²."""
        return 0.5 * scale * torch.stack([(part * part).sum() for part in self.parts]).sum()


def sleeping_loss(step_s: float) -> Loss:
    """Return the loss of `Shapes`, whose computation lasts as long as a local step."""

    def loss(module: nn.Module) -> torch.Tensor:
        value: torch.Tensor = module(torch.tensor(1.0))
        time.sleep(step_s)
        return value

    return loss


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
                part.add_(part.grad, alpha=-_RATE)
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
        method, loss = make_method(orders.name, orders.settings, model, Descent()), sleeping_loss(orders.step_s)

        def step() -> None:
            for _ in range(steps_per_round(orders.settings)):
                method.step(loss, _RATE)

    run(orders, step)


if __name__ == "__main__":
    main()
