"""The built-in tasks, and how a name in the configuration becomes a task."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peer.errors import ConfigError, DataError, SottoError
from peer.random import SHARED, Purpose, stream
from peer.train.data import Classification, TensorData
from peer.train.models import mlp
from peer.train.task import Task

OptionValue = str | int | float | bool


@dataclass(frozen=True)
class TaskInfo:
    """A task as the lists show it."""

    make: Callable[..., Task]
    """Its keyword arguments are the task's options; `directory` among them is where it reads its data."""
    summary: str

    @property
    def options(self) -> tuple[str, ...]:
        """Names of `training.task_options`."""
        return tuple(name for name in inspect.signature(self.make).parameters if name != "directory")


def digits(*, hidden: int = 128) -> Task:
    """Return scikit-learn's 8×8 handwritten digits, 1,437 to train and 360 to test, always the same, for an MLP
    64-hidden-10."""
    _whole("hidden", hidden, 1, 65536)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.from_numpy(stream(0, SHARED, Purpose.HOLD_OUT).permutation(len(bunch.target)))
    pixels = torch.from_numpy(bunch.data).to(torch.float32).div_(16)[order]
    labels = torch.from_numpy(bunch.target).to(torch.int64)[order]
    num_train = round(0.8 * len(labels))
    return Classification(
        name="digits",
        num_classes=10,
        model=lambda: mlp((64, hidden, 10)),
        train=TensorData(pixels[:num_train].clone(), labels[:num_train].clone()),
        test=TensorData(pixels[num_train:].clone(), labels[num_train:].clone()),
    )


TASKS: Mapping[str, TaskInfo] = {
    "digits": TaskInfo(digits, "Handwritten digits, 8×8 pixels, that come with scikit-learn: no download."),
}


def resolve_task(
    name: str, options: Mapping[str, OptionValue] | None = None, *, directory: str | Path | None = None
) -> Task:
    """Return the built-in task of that name, or what the function "package.module:make_task" makes.

    `directory` is `data.directory`; it goes to tasks that take an argument of that name. Modules are looked for where
    Python looks, and in the current folder. Raises ConfigError for a wrong name or option, DataError for data
    or an own task that does not hold what it should.
    """
    options = dict(options or {})
    make = _import(name) if ":" in name else _built_in(name)
    accepted = _accepted(make, name)
    if accepted is not None:
        for option in options:
            if option not in accepted or option == "directory":
                valid = (
                    ", ".join(other for other in accepted if other != "directory") or "none, this task has no options"
                )
                raise ConfigError(f"task {name} has no such option", key=f"training.task_options.{option}", valid=valid)
    if directory is not None and (accepted is None or "directory" in accepted):
        options["directory"] = str(directory)
    try:
        task = make(**options)
    except SottoError:
        raise
    except Exception as error:
        # An own task may raise anything; the chain keeps its traceback for whoever debugs it.
        raise DataError(f"training.task: {name} failed with {type(error).__name__}: {error}") from error
    _check_task(task, name)
    return task


def _built_in(name: str) -> Callable[..., Task]:
    if name not in TASKS:
        raise ConfigError(
            "there is no such task",
            key="training.task",
            value=name,
            valid=f'{", ".join(TASKS)}, or your own as "package.module:make_task"',
        )
    return TASKS[name].make


def _import(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError('your own task is named "package.module:make_task"', key="training.task", value=name)
    # Last, so that a file beside the configuration never hides an installed package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise DataError(
                f"training.task: module {module_name} needs {error.name}, which is not installed"
            ) from error
        raise ConfigError(
            f"there is no module {error.name}; start in the folder that holds it, or install it",
            key="training.task",
            value=name,
        ) from None
    except Exception as error:
        raise DataError(
            f"training.task: importing {module_name} failed with {type(error).__name__}: {error}"
        ) from error
    make = getattr(module, attribute, None)
    if make is None:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise ConfigError(
            f"module {module_name} has no {attribute}",
            key="training.task",
            value=name,
            valid=", ".join(f"{module_name}:{function}" for function in functions) or "a function of that module",
        )
    if not callable(make):
        raise ConfigError(f"{attribute} is no function that makes a task", key="training.task", value=name)
    return make  # type: ignore[no-any-return]


def _accepted(make: Callable[..., Any], name: str) -> list[str] | None:
    """Return the keyword arguments that `make` takes; None where it takes any."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in keywords]


_METHODS = ("make_model", "loss", "train_data", "test_data", "correct", "augment")


def _check_task(task: object, name: str) -> None:
    lacking = [member for member in ("name", "num_classes") if not hasattr(task, member)]
    lacking += [f"{method}()" for method in _METHODS if not callable(getattr(task, method, None))]
    if lacking:
        raise DataError(f"training.task: {name} returned a {type(task).__name__} that lacks {', '.join(lacking)}")
    num_classes = task.num_classes  # type: ignore[attr-defined]
    if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 0:
        raise DataError(f"training.task: num_classes of {name} should be a whole number, 0 where there are no classes")


def _whole(option: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            "is not a whole number in range",
            key=f"training.task_options.{option}",
            value=value,
            valid=f"{low} to {high}",
        )
