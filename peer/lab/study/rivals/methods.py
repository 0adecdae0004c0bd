"""Training methods of rivals: gradients averaged by DistributedDataParallel, or models averaged every few steps.

The same code is timed with a gradient that costs next to nothing (`torch_program`) and trains on real data
(`training`). It knows torch and its process group, and nothing else of this package.

| name | average | code | settings |
| --- | --- | --- | --- |
| ddp | gradients | torch | accumulate: number of steps whose gradients are summed up |
| ddp-fp16 | gradients, in 16 bits | torch | |
| ddp-powersgd | gradients, as factors | torch | rank; start: the first compressed step |
| local-sgd | models, every `period` steps | torch; in 8 bits the code below | period, bits |
| diloco | movements of models in `period` steps | the code below | period, bits, rate, beta, inner |

DiLoCo is that of Douillard et al. (2023).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from peer.lab.study.rivals.worker import Settings

BLOCK = 1024
"""Numbers that share a scale where models are averaged in 8 bits."""
_LEVELS = 127
_SCALE_BYTES = 4

Loss = Callable[[nn.Module], torch.Tensor]
"""Maps the module to train, called as the model is, to the mean loss of the next batch."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """The gradient steps of all rivals: SGD with Nesterov momentum, unless told otherwise."""

    beta: float = 0.9
    weight_decay: float = 0.0


class Method(Protocol):
    """One worker of a rival."""

    def step(self, loss: Loss, rate: float) -> torch.Tensor:
        """Take a gradient step with a learning rate, communicate where it is time to, and return the loss."""
        ...


def make_method(name: str, settings: Settings, model: nn.Module, descent: Descent) -> Method:
    """Return the worker of a rival that trains `model`, which starts alike at all workers."""
    if name in _HOOKS:
        return DistributedGradients(model, _HOOKS[name], settings, descent)
    if name in ("local-sgd", "diloco"):
        return PeriodicAverages(model, name, settings, descent)
    raise ValueError(f"there is no rival {name}")


_HOOKS = {"ddp": "", "ddp-fp16": "fp16", "ddp-powersgd": "powersgd"}


class DistributedGradients:
    """DistributedDataParallel with a communication hook."""

    def __init__(self, model: nn.Module, hook: str, settings: Settings, descent: Descent) -> None:
        # More than one bucket makes gloo abort under PowerSGD.
        self._module = DistributedDataParallel(model, bucket_cap_mb=100 if hook == "powersgd" else 25)
        if hook == "fp16":
            self._module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            # By default it starts after 1,000 steps, which is longer than many runs here; it takes nothing below 2.
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=int(settings.get("rank", 2)),
                start_powerSGD_iter=int(settings.get("start", 2)),
            )
            self._module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self._optimizer = _sgd(self._module.parameters(), descent)
        self._accumulate, self._steps = int(settings.get("accumulate", 1)), 0

    def step(self, loss: Loss, rate: float) -> torch.Tensor:
        self._steps += 1
        is_last = self._steps % self._accumulate == 0
        with contextlib.nullcontext() if is_last else self._module.no_sync():
            value = loss(self._module)
            torch.autograd.backward(value / self._accumulate)
        if is_last:
            _set_rate(self._optimizer, rate)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return value.detach()


class PeriodicAverages:
    """Workers that train alone and average every `period` steps: local SGD, or DiLoCo."""

    def __init__(self, model: nn.Module, name: str, settings: Settings, descent: Descent) -> None:
        self._model, period, bits = model, int(settings["period"]), int(settings.get("bits", 32))
        if settings.get("inner") == "adamw":
            inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), weight_decay=descent.weight_decay)
        else:
            inner = _sgd(model.parameters(), descent)
        self._inner, self._outer = inner, None
        if name == "local-sgd" and bits == 32:
            # It averages in the step whose number is `warmup_steps`, counted from 0.
            averager = PeriodicModelAverager(period=period, warmup_steps=period - 1)
            self._inner = PostLocalSGDOptimizer(optim=inner, averager=averager)
            return
        rate, beta = (1.0, 0.0) if name == "local-sgd" else (settings.get("rate", 0.7), settings.get("beta", 0.9))
        self._outer = OuterStep(model.parameters(), period, bits, rate=float(rate), beta=float(beta))

    def step(self, loss: Loss, rate: float) -> torch.Tensor:
        self._inner.zero_grad()
        value = loss(self._model)
        torch.autograd.backward(value)
        _set_rate(self._inner, rate)
        self._inner.step()
        if self._outer is not None:
            self._outer.after_step()
        return value.detach()


class OuterStep:
    """Every `period` steps, one step of SGD with Nesterov momentum whose gradient is the mean movement of all workers;
    then all go on from there. With a rate of 1 and no momentum, it is local SGD."""

    def __init__(self, parameters: Iterable[nn.Parameter], period: int, bits: int, *, rate: float, beta: float) -> None:
        self._parameters, self._period, self._steps = list(parameters), period, 0
        self._mean = eight_bit_mean if bits == 8 else _mean
        self._common = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer = torch.optim.SGD(self._common, lr=rate, momentum=beta, nesterov=beta > 0)

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step; after the last of a period, average."""
        self._steps += 1
        if self._steps % self._period:
            return
        pairs = list(zip(self._common, self._parameters, strict=True))
        moved = self._mean(torch.cat([(start - now).reshape(-1) for start, now in pairs]))
        sizes = [start.numel() for start in self._common]
        for start, part in zip(self._common, torch.split(moved, sizes), strict=True):
            start.grad = part.view_as(start)
        self._optimizer.step()
        for start, now in pairs:
            now.copy_(start)


def eight_bit_mean(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over all workers of their `values: float32[n]`, decoded to the same bits at each.

    A reduce-scatter and a gather, both in 8 bits: each number is the nearest of 255 multiples of the largest of its
    block, divided by 127. The owner of a part adds up in float32, and encodes the mean anew.
    """
    workers = dist.get_world_size()
    part = -(-values.numel() // (workers * BLOCK)) * BLOCK
    padded = values.new_zeros(workers * part)
    padded[: values.numel()] = values
    mine = _encode(padded).view(workers, -1)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine)
    mean = _encode(_decode(theirs.reshape(-1)).view(workers, part).mean(dim=0))
    gathered = mean.new_empty(workers * mean.numel())
    dist.all_gather_into_tensor(gathered, mean)
    return _decode(gathered)[: values.numel()]


def _encode(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of float32[k · BLOCK]: the scale and the codes of each block."""
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / _LEVELS
    codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-_LEVELS, _LEVELS)
    return torch.cat([scales.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], dim=1).reshape(-1)


def _decode(encoded: torch.Tensor) -> torch.Tensor:
    blocks = encoded.view(-1, _SCALE_BYTES + BLOCK)
    scales = blocks[:, :_SCALE_BYTES].contiguous().view(torch.float32)
    return (blocks[:, _SCALE_BYTES:].contiguous().view(torch.int8).to(torch.float32) * scales).reshape(-1)


def _mean(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over all workers."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


def _sgd(parameters: Iterable[nn.Parameter], descent: Descent) -> torch.optim.SGD:
    return torch.optim.SGD(
        parameters, lr=0.0, momentum=descent.beta, nesterov=descent.beta > 0, weight_decay=descent.weight_decay
    )


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
