"""The place of a training script in a run: which peer it is, of how many, and under which configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from peer.config.options import OWN_LOOP, Config, TrainingOptions, load_device
from peer.errors import ConfigError, UsageError
from peer.gossip.base import GraphNeed
from peer.library.loop_steps import LoopSteps
from peer.library.meeting import Meeting
from peer.run.plan import algorithm_spec


class Host(Protocol):
    """The host of a script's peer: a thread with a daemon, or a simulation."""

    def meet(self) -> Meeting:
        """Return where script and peer meet. Called first, in the script's thread."""
        ...

    def open(self, steps: LoopSteps, config: Config) -> int:
        """Go back to where the peer was, if it was anywhere; return the last round with a local step. Raises
        SottoError."""
        ...

    def start(self) -> None:
        """Let the peer train."""
        ...

    def stop(self, reason: str) -> None:
        """End the peer before its last round; return when it has ended."""
        ...


@dataclass(frozen=True)
class Place:
    """A training script's place in a run. `join` takes one instead of a path."""

    index: int
    """Number of this peer, from 0."""
    num_peers: int
    """Number of listed peers."""
    name: str
    """Name of this peer."""
    source: str
    """Origin of the place: a configuration file, or a simulation."""
    config: Config = field(repr=False)
    host: Callable[[Callable[[Config], Config]], Host] = field(repr=False)
    """Makes the host of this peer; told how to derive the run's configuration from that of the file."""
    deals: bool = field(default=False, repr=False)
    """Whether all peers read the same data, on one machine, and `local` deals it out."""


def derive_config(
    config: Config,
    *,
    every: int,
    steps: int | None,
    outer_momentum: float | None,
    outer_learning_rate: float,
) -> Config:
    """Return the configuration of a run whose training section says what the script decides, so that peers compare it.

    `steps`: gradient steps of the run, from which its rounds follow; None: as many rounds as the file says.
    `outer_momentum`: None where gradients are averaged. Raises ConfigError for a file that says otherwise.
    """
    training = config.training
    if training.task != OWN_LOOP:
        raise ConfigError(
            "names a task, but a training script joins the run; create the folders with --task loop",
            key="training.task",
            value=training.task,
            valid=f'"{OWN_LOOP}"',
        )
    decided, unset = [("training", key) for key in TrainingOptions.model_fields if key != "task"], Config()
    for section, key in (*decided, ("algorithm", "outer_rate"), ("algorithm", "outer_momentum")):
        value = getattr(getattr(config, section), key)
        if value != getattr(getattr(unset, section), key):
            problem = "has no effect with a loop of your own: the script decides; remove the key"
            raise ConfigError(problem, key=f"{section}.{key}", value=value)
    spec = algorithm_spec(config)
    if outer_momentum is None and not (spec.acts_on_mean("script") and spec.graph is GraphNeed.COMPLETE):
        raise ConfigError(
            "hands no device the mean of all gradients, which average='gradients' needs; choose the algorithm"
            " low-rank, compressed-allreduce or allreduce, on the complete graph, or leave average out",
            key="algorithm.name",
            value=spec.name,
            valid="low-rank, compressed-allreduce, allreduce",
        )
    derived = TrainingOptions(
        task=OWN_LOOP,
        local_steps=every,
        learning_rate=outer_learning_rate,
        schedule="constant",
        warmup_rounds=0,
        momentum="script" if outer_momentum is None else "nesterov" if outer_momentum else "none",
        beta=outer_momentum or 0.0,
        label_adjustment=False,
    )
    changes: dict[str, object] = {"training": derived}
    if steps is not None:
        # The last round is a whole one too.
        changes["run"] = config.run.model_copy(update={"rounds": -(-steps // every)})
    return config.model_copy(update=changes)


def read_config(file: str | os.PathLike[str]) -> tuple[Config, Path]:
    """Return the configuration of a file, and its path from the root: a script may change its working directory.
    Raises UsageError or ConfigError."""
    if not isinstance(file, (str, os.PathLike)):
        raise UsageError(f"the configuration is of type {type(file).__name__}; give the path of a peer.toml")
    path = Path(file)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the file in it, {path / 'peer.toml'}")
    return load_device(path), path.resolve()
