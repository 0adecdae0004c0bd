"""Executors for many simulations: in this process, in processes of this machine, or on a cluster of Dask or Ray.

Each is an executor of `concurrent.futures`, and nothing else in the package knows which one it was given. A call must
be to a function of a module, with texts, numbers and truth values as arguments and as result: they go to other
machines.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

from peer.errors import ConfigError

Kind: TypeAlias = Literal["local", "dask", "ray"]
_MODULES = {"dask": "distributed", "ray": "ray"}
_LOOK_EVERY_S = 0.5
"""Interval at which a wait looks whether it is over."""

Item = TypeVar("Item")
Key = TypeVar("Key")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class Shard:
    """One of several parts of a sweep or study, each of which is computed somewhere else."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the part that "I/N" names. Raises ConfigError."""
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ConfigError("is not valid", key="--shard", value=text, valid="I/N with I from 0 to N - 1")
        return cls(int(index), int(count))

    def of(self, planned: Sequence[Item]) -> list[Item]:
        """Return the cells of this part: every `count`-th, so that slow contenders are spread."""
        return list(planned[self.index :: self.count])


ALL = Shard()
"""Everything as one part."""


@dataclass(frozen=True)
class Computing:
    """An executor, and how many calls to give it at once."""

    executor: Executor | None
    """None: this process computes."""
    at_once: int

    def results(
        self,
        function: Callable[..., Result],
        calls: Iterable[tuple[Key, tuple[str | int | float | bool, ...]]],
        is_over: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[Key, Result]]:
        """Yield (key, result) of each call as it ends; once `is_over`, only of those that have begun."""
        if self.executor is None:
            for key, arguments in calls:
                if is_over():
                    return
                yield key, function(*arguments)
            return
        following = iter(calls)
        running: dict[Future[Result], Key] = {}
        while True:
            while len(running) < self.at_once and not is_over() and (call := next(following, None)) is not None:
                running[self.executor.submit(function, *call[1])] = call[0]
            if is_over():
                running = {future: key for future, key in running.items() if not future.cancel()}
            if not running:
                return
            done, _ = wait(running, timeout=_LOOK_EVERY_S, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()


@contextmanager
def open_executor(kind: Kind = "local", *, workers: int = 1, address: str | None = None) -> Iterator[Computing]:
    """Offer an executor: `workers` processes of this machine, or those of the cluster at `address`; without an address,
    a cluster of so many processes of this machine.

    A cluster runs as many calls at once as it has processors now. Raises ConfigError where its package is missing, or
    where an address has no meaning.
    """
    if kind == "local":
        if address is not None:
            raise ConfigError(
                "belongs to a cluster", key="--address", value=address, valid="with --executor dask or ray"
            )
        if workers == 1:
            yield Computing(None, 1)
            return
        # Not forked: a process that has threads, as torch's, may leave a lock behind in the fork.
        context = multiprocessing.get_context("spawn")
        # Ctrl-C goes to all processes of a terminal; the first one decides what it means.
        ignored = signal.SIGINT, signal.SIG_IGN
        with ProcessPoolExecutor(workers, mp_context=context, initializer=signal.signal, initargs=ignored) as pool:
            yield Computing(pool, workers)
        return
    if find_spec(_MODULES[kind]) is None:
        raise ConfigError(
            f"needs a package that is not installed; `pip install 'sottovoce[{kind}]'` brings it",
            key="--executor",
            value=kind,
        )
    with (_dask if kind == "dask" else _ray)(workers, address) as computing:
        yield computing


@contextmanager
def _dask(workers: int, address: str | None) -> Iterator[Computing]:
    from distributed import Client

    options: dict[str, Any] = {"address": address}
    if address is None:
        options = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
    # `pure=False`: a call that is asked for twice is computed twice, as with other executors.
    with Client(set_as_default=False, **options) as client, client.get_executor(pure=False) as executor:
        yield Computing(executor, max(1, sum(client.nthreads().values())))


@contextmanager
def _ray(workers: int, address: str | None) -> Iterator[Computing]:
    # Before it is imported: it would report to its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    options: dict[str, Any] = {"address": address}
    if address is None:
        options = {"address": "local", "num_cpus": workers, "include_dashboard": False}
        # Workers can import everything that this process can.
        options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
    ray.init(log_to_driver=False, configure_logging=False, **options)
    try:
        with _Ray() as executor:
            yield Computing(executor, max(1, int(ray.cluster_resources().get("CPU", 1))))
    finally:
        ray.shutdown()


class _Ray(Executor):
    """Tasks of the cluster that this process is connected to. Ray has a pool, but no executor of its own."""

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Return the future of a task on one processor."""
        import ray

        future: Future[Result] = ray.remote(fn).remote(*args, **kwargs).future()
        # Ray does not say when a task begins; a future that was cancelled could not take its result.
        future.set_running_or_notify_cancel()
        return future
