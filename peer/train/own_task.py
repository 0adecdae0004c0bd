"""The boundary to a user's own task: any error of its code becomes a `TaskError` that names the user's line.

`resolve_task` puts an `OwnTask` around the result of a user's function; all else in the package calls that. Built-in
tasks have no such wrapper: what they raise is our bug.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch

import peer
from peer.errors import SottoError, TaskError
from peer.records import ACCURACY, Criterion
from peer.train.metrics import figure_of, metrics_of
from peer.train.task import Data, Task

Batch = tuple[torch.Tensor, ...]

_LIBRARIES = (f"{Path(peer.__file__).parent}/", f"{sysconfig.get_path('stdlib')}/", "<")
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")


class UserCode:
    """The code that a configuration names as its task."""

    def __init__(self, module: str, what: str = "task", make: Callable[..., Any] | None = None) -> None:
        """`what` the module holds. `make` is the function that makes the task; None while its module is imported."""
        self._package, self._what, self._make = module.partition(".")[0], what, make

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Within this context every exception is the user's, except a SottoError, which already says whose it is, and
        an exit of a script."""
        try:
            yield
        except SottoError:
            raise
        except (Exception, SystemExit) as error:  # Own code may raise anything; an exit would end a peer as a success.
            if isinstance(error, SystemExit) and self._what == "script":
                raise  # Python shows its sentence alone, and exits with its code.
            text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            raise TaskError(f"in your {self._what}: {text} ({self._place(error)})") from error

    def breach(self, problem: str, function: Callable[..., Any]) -> TaskError:
        """Return the error of a function that returned an invalid value."""
        return TaskError(f"in your task: {problem} ({self._definition(function)})")

    def _place(self, error: BaseException) -> str:
        """Return the innermost line of the user's that was running."""
        if isinstance(error, SyntaxError) and error.filename is not None:
            return f"{error.filename}:{error.lineno}"
        place = None
        for frame, line in traceback.walk_tb(error.__traceback__):
            if self._is_own(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
                place = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
        if place is not None:
            return place
        # For example a model of torch's layers alone, whose sizes do not fit the data.
        made = "" if self._what == "script" else f"; the task is made in {self._definition(None)}"
        return f"none of your own lines was running{made}"

    def _definition(self, function: Callable[..., Any] | None) -> str:
        """Return where a function is defined; where the task is made, if that is in a library."""
        for candidate in (function, self._make):
            if candidate is None:
                continue
            plain = inspect.unwrap(candidate)
            code = getattr(plain, "__code__", None)
            if code is not None and self._is_own(code.co_filename, getattr(plain, "__module__", "")):
                return f"{code.co_filename}:{code.co_firstlineno}"
        return f"module {self._package}"

    def _is_own(self, file: str, module: str) -> bool:
        is_library = file.startswith(_LIBRARIES) or any(folder in file for folder in _PACKAGE_FOLDERS)
        return not is_library or module.partition(".")[0] == self._package


class BatchForm:
    """Whether the batches of a task are tuples or dicts of tensors. The package handles tuples; own code gets its dicts
    back."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._names: tuple[str, ...] | None = None
        """Keys of the first dict; empty for tuples, None before the first batch."""

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of the dicts; empty where batches are tuples, or before the first batch."""
        return self._names or ()

    def plain(self, batch: object, name: str, function: Callable[..., Any]) -> Batch:
        """Return the tensors in the result of a user's function. Raises TaskError if it is no batch, or one of another
        form than those before."""
        if not isinstance(batch, dict):
            parts, names = checked_batch(batch, name, function, self._code), ()
        else:
            parts, names = checked_batch(tuple(batch.values()), name, function, self._code), tuple(batch)
        if self._names is None:
            self._names = names
        if set(names) != set(self._names):
            problem = f"{name}() returned a batch with {_keys(names)}; those before had {_keys(self._names)}"
            raise self._code.breach(problem, function)
        return parts if names == self._names else tuple(parts[names.index(each)] for each in self._names)

    def own(self, batch: Batch) -> Batch:
        """Return a batch as the user's code takes it."""
        if not self._names:
            return batch
        # The protocol of tasks can name only one of the two forms.
        return cast(Batch, dict(zip(self._names, batch, strict=True)))


class OwnTask:
    """A user's task whose errors are the user's."""

    def __init__(self, task: Task, code: UserCode) -> None:
        self.inner, self.code = task, code
        self.name, self.num_classes = task.name, task.num_classes
        self.metrics = metrics_of(task)
        self.meaning: Mapping[str, Sequence[str]] = getattr(task, "meaning", {})
        self.form = BatchForm(code)

    def make_model(self, **options: Any) -> torch.nn.Module:
        with self.code.runs():
            return self.inner.make_model(**options)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        with self.code.runs():
            loss = self.inner.loss(model, self.form.own(batch))
        return self._scalar(loss, self.inner.loss)

    def adjusted_loss(self, model: torch.nn.Module, batch: Batch, adjustment: torch.Tensor) -> torch.Tensor:
        """Return the result of the task's own `adjusted_loss`; to be called only if the task has one."""
        inner: Any = self.inner
        with self.code.runs():
            loss = inner.adjusted_loss(model, self.form.own(batch), adjustment)
        return self._scalar(loss, inner.adjusted_loss)

    def train_data(self) -> Data:
        with self.code.runs():
            return self._own(self.inner.train_data())

    def test_data(self) -> Data:
        with self.code.runs():
            return self._own(self.inner.test_data())

    def correct(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return which samples are right: none where the task has metrics in place of `correct`."""
        if not callable(getattr(self.inner, "correct", None)):
            return torch.zeros(len(batch[0]), dtype=torch.bool)
        with self.code.runs():
            right = self.inner.correct(model, self.form.own(batch))
        if not isinstance(right, torch.Tensor) or right.dtype != torch.bool or right.shape != (len(batch[0]),):
            problem = f"correct() returned {_described(right)}; it must return one bool per sample"
            raise self.code.breach(problem, self.inner.correct)
        return right

    def measure(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the values of a batch that the task's metrics are computed from; none where it has no `measure`."""
        measure = getattr(self.inner, "measure", None)
        if not callable(measure):
            return {}
        with self.code.runs():
            values = measure(model, self.form.own(batch))
        if not isinstance(values, dict):
            problem = f"measure() returned {_described(values)}; it must return a dict of tensors"
            raise self.code.breach(problem, measure)
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                problem = f"measure() returned {_described(value)} as {name!r}; it must return tensors"
                raise self.code.breach(problem, measure)
        return values

    def figures(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return each metric by its name, from the means of `measure`'s results."""
        figures = {}
        for metric in self.metrics:
            with self.code.runs():
                figure = figure_of(metric, means)
            if not isinstance(figure, int | float):
                problem = f"the metric {metric.name} is {_described(figure)}, not a number"
                raise self.code.breach(problem, metric.of or self.measure)
            figures[metric.name] = float(figure)
        return figures

    def augment(self, batch: Batch, uniforms: torch.Tensor) -> Batch:
        with self.code.runs():
            augmented = self.inner.augment(self.form.own(batch), uniforms)
        return self.form.plain(augmented, "augment", self.inner.augment)

    def loss_error(self, problem: str, *, adjusted: bool) -> TaskError:
        """Return the error of a loss, or an adjusted one, with which training makes no sense."""
        inner: Any = self.inner
        return self.code.breach(problem, inner.adjusted_loss if adjusted else inner.loss)

    def _scalar(self, loss: object, function: Callable[..., Any]) -> torch.Tensor:
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            name = getattr(function, "__name__", "loss")
            raise self.code.breach(f"{name}() returned {_described(loss)}; it must return a scalar tensor", function)
        return loss

    def _own(self, data: Data) -> Data:
        # The package's own data sets run no code of the user's, and some of them can move to a device.
        return data if type(data).__module__.startswith("peer.") else OwnData(data, self.code, self.form)


class OwnData:
    """A user's data set whose errors are the user's."""

    def __init__(self, data: Data, code: UserCode, form: BatchForm) -> None:
        self._data, self._code, self._form = data, code, form

    def __len__(self) -> int:
        with self._code.runs():
            return len(self._data)

    @property
    def labels(self) -> torch.Tensor:
        with self._code.runs():
            return self._data.labels

    def batch(self, indices: torch.Tensor) -> Batch:
        with self._code.runs():
            batch = self._data.batch(indices)
        return self._form.plain(batch, "batch", self._data.batch)


def inner_task(task: Task) -> Task:
    """Return the task itself, to ask of what kind it is."""
    return task.inner if isinstance(task, OwnTask) else task


def errors_of(task: Task) -> AbstractContextManager[None]:
    """Within this context exceptions are the user's if the task is: for what runs a task's code without calling it, as
    the gradient of its loss does."""
    return task.code.runs() if isinstance(task, OwnTask) else nullcontext()


def criteria_of(task: Task) -> tuple[Criterion, ...]:
    """Return the figures of a task's evaluations, the one that it is judged by first: its metrics, and accuracy where
    it says which samples are right."""
    own = tuple(metric.criterion for metric in metrics_of(task))
    return (*own, ACCURACY) if not own or callable(getattr(inner_task(task), "correct", None)) else own


def checked_batch(batch: object, name: str, function: Callable[..., Any], code: UserCode) -> Batch:
    """Return the batch that a function of the user's returned. Raises TaskError if it is no tuple of tensors."""
    if not isinstance(batch, tuple | list) or not batch:
        raise code.breach(f"{name}() returned {_described(batch)}; it must return a tuple or dict of tensors", function)
    for part in batch:
        if not isinstance(part, torch.Tensor):
            problem = f"{name}() returned a {type(batch).__name__} with {_described(part)} in it"
            raise code.breach(f"{problem}; it must return a tuple or dict of tensors", function)
    return tuple(batch)


def _keys(names: tuple[str, ...]) -> str:
    return f"the keys {', '.join(map(str, names))}" if names else "no keys"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"
