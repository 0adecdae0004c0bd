"""Norm layers' statistics of the batches seen, for a model that nobody trained: the average of all peers.

The policy. Running statistics of norms and running ranges of 8-bit layers are buffers, and buffers are local: a peer's
come from its own batches and lie in its checkpoints, and no message holds them. A peer's model is evaluated and
exported with its own. The averaged model takes over none of them where data is at hand: it gets new ones from one pass
over training samples, drawn under the run's seed from the whole training set without augmentation, in which all batches
count alike. `peer.ops.whole_models` has no data, and averages them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from peer.random import SHARED, Purpose, stream
from peer.train.memory import aligned
from peer.train.moving import buffers_kept, frozen_kept
from peer.train.task import Data, Task
from peer.train.threads import GENERATOR

SAMPLES = 2048
BATCH = 128
"""Samples of the pass, and of a batch in it; a smaller training set is passed over once."""


def collect_statistics_(model: torch.nn.Module, task: Task, data: Data, *, seed: int, device: torch.device) -> None:
    """Set the running statistics of the model to those of the pass over `data`. The model is in training mode, and the
    state of torch's generator is left as it was."""
    layers = _tracking(model)
    momenta = [getattr(layer, "momentum", None) for layer in layers]
    order = torch.from_numpy(stream(seed, SHARED, Purpose.STATISTICS).permutation(len(data)))[:SAMPLES]
    try:
        for layer in layers:
            layer.reset_running_stats()  # type: ignore[operator]
            layer.momentum = None  # type: ignore[assignment]
        with GENERATOR, torch.no_grad(), torch.random.fork_rng(), frozen_kept(model):
            torch.manual_seed(seed)
            for start in range(0, len(order), BATCH):
                task.loss(model, aligned(data.batch(order[start : start + BATCH]), device))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum  # type: ignore[assignment]


@contextmanager
def statistics_of_average(
    model: torch.nn.Module, task: Task, data: Data, *, seed: int, device: torch.device
) -> Iterator[None]:
    """Within this context the model has the statistics of the pass; afterwards its own again."""
    if not _tracking(model):
        yield
        return
    with buffers_kept(model):
        collect_statistics_(model, task, data, seed=seed, device=device)
        yield


def _tracking(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that keep running statistics: torch's convention is a method `reset_running_stats`, and a
    `momentum` that is None where all batches count alike."""
    return [
        module
        for module in model.modules()
        if callable(getattr(module, "reset_running_stats", None)) and any(True for _ in module.buffers(recurse=False))
    ]
