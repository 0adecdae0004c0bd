"""In which precision a task's model computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from peer.config.options import TrainingOptions
from peer.config.precision_choice import FASTEST, Precision
from peer.errors import ConfigError, LocalProtocolError
from peer.train.bfloat16 import compute_in_bfloat16_
from peer.train.layers import EIGHT_BIT
from peer.train.own_task import inner_task
from peer.train.task import Task


def precision_of(task: Task, options: TrainingOptions) -> Precision:
    """Return the configured precision; by default the one that the task asks for by an attribute `precision`, and
    float32 where it has none. Raises LocalProtocolError for "fastest", which `RunSetup.training` replaces."""
    if options.precision == FASTEST:
        raise LocalProtocolError('training.precision = "fastest" has to be settled before a model is made')
    if options.precision != "auto":
        return options.precision
    preferred: Precision = getattr(inner_task(task), "precision", "float32")
    return preferred


def make_model(task: Task, precision: Precision) -> torch.nn.Module:
    """Return a new model of the task that computes in that precision.

    Any task can do bfloat16. It can do 8 bits if its `make_model` takes an argument `layers`, of which it builds the
    model. Raises ConfigError (`training.precision`) if it does not.
    """
    if precision != "int8":
        model = task.make_model()
        if precision == "bfloat16" and isinstance(model, torch.nn.Module):
            compute_in_bfloat16_(model)
        return model
    if not takes_layers(inner_task(task).make_model):
        raise no_eight_bits(task.name)
    eight_bit: torch.nn.Module = task.make_model(layers=EIGHT_BIT)  # type: ignore[call-arg]
    return eight_bit


def takes_layers(function: Callable[..., object]) -> bool:
    """Return whether a function has an argument `layers`."""
    try:
        return "layers" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Functions of C may not tell.
        return False


def no_eight_bits(name: str) -> ConfigError:
    """Return the error of a task whose model consists of ordinary layers."""
    return ConfigError(
        f"the model of task {name} consists of float32 layers; build it from the layers passed to its function "
        "(docs/eight-bit.md), or train it in float32 or bfloat16",
        key="training.precision",
        value="int8",
        valid="float32, bfloat16",
    )
