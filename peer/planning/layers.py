"""Sources of layer sizes: a number of parameters, a model by its name, or the task of a configuration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peer.config.options import Config
from peer.planning.messages import even_sizes, sizes_of
from peer.run.setup import RunSetup, settle_precision
from peer.train import tasks
from peer.train.local_step import trained_parameters
from peer.train.models import ready_model
from peer.train.threads import use_one_thread

_STEPS, _WARM_UP = 7, 2


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The parameters that are trained and sent."""

    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] | None = None
    """None where only the number of parameters is known."""
    num_classes: int | None = None
    """0 where the task has none; None where it is not known."""
    source: str

    @property
    def parameters(self) -> int:
        return sum(self.sizes)


def of_number(parameters: int) -> Layers:
    """Return that many parameters in twenty layers of the same size."""
    return Layers(sizes=tuple(even_sizes(parameters)), source=f"{parameters:,} parameters, taken as 20 equal layers")


def of_model(name: str) -> Layers:
    """Return the layers of a model that `sotto lab list models` names. Raises ConfigError."""
    return _of_shapes([tuple(p.shape) for p in ready_model(name).parameters()], None, f"model {name}")


def of_task(config: Config, base: Path) -> Layers:
    """Return the layers that a configuration trains; most tasks need no data for that. Raises ConfigError and
    DataError."""
    options = config.training
    folder = base if config.data.directory is None else base / config.data.directory
    task = tasks.resolve_task(options.task, dict(options.task_options), directory=folder)
    trained = trained_parameters(task.make_model(), options.only)
    return _of_shapes([tuple(p.shape) for p in trained.values()], task.num_classes, f"task {options.task}")


def measured_step_s(config: Config, base: Path, num_peers: int) -> float:
    """Return the median duration of a local step of one peer on this machine, on one thread. Raises SottoError."""
    use_one_thread()
    config, _ = settle_precision(config, base, num_peers)
    trainer = RunSetup.open(config, base, num_peers).trainer(config.peer.index)
    z, seconds = trainer.initial_vector(), []
    for t in range(_WARM_UP + _STEPS):
        started = time.perf_counter()
        step = trainer.gradient(z, t, 0.0, 0.0)
        z = z - np.float32(0.0) * step.gradient
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_WARM_UP:])


def _of_shapes(shapes: Sequence[tuple[int, ...]], num_classes: int | None, source: str) -> Layers:
    sizes = tuple(sizes_of(shapes))
    source = f"{source}: {sum(sizes):,} parameters in {len(sizes)} layers"
    return Layers(sizes=sizes, shapes=tuple(shapes), num_classes=num_classes, source=source)
