"""A simulated run whose peers are in several worker processes.

The agenda is worked off in stretches of virtual time in which no event can cause another one, so that all calls of a
stretch can be made at once. Their outcomes are performed in the order of the events: figures, times and bits are those
of a run in one process, whatever the number of workers.

The simulation is built once and then forked, so that every worker has the peers, the data and the graph without a copy
being sent. The agenda, the links and the figures of the run stay in the first process, which tells the workers the
events of their peers and their times. Calls in the same stretch of virtual time concern different peers, or come in
order to the same one, so their outcomes do not depend on the number of workers.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from peer import errors
from peer.config.options import Config
from peer.errors import ConfigError, DivergenceError, LocalProtocolError, SottoError
from peer.gossip.effects import Effects
from peer.records import Progress
from peer.simulate.rounds import Simulator
from peer.simulate.virtual_run import Event, Finished, RunOptions, State, model_of, of_peer, subject
from peer.train.evaluation import Evaluation
from peer.train.local_step import Split

Outcome: TypeAlias = tuple[Effects, Finished | None] | SottoError
"""What a call on a peer asks for, with the round that it finished; or the error that it raised."""


class ParallelSimulator(Simulator):
    """One simulated run that goes in rounds, computed by several processes."""

    def __init__(self, config: Config, base: Path, *, workers: int, **options: Unpack[RunOptions]) -> None:
        """See `VirtualRun`. Raises ConfigError if a call on a peer depends on more than the peer."""
        _refuse(config)
        super().__init__(config, base, **options)
        self._parts = self._divided(workers)
        self._lookahead_s = min(self._network.model.latency_s, *self.step_s)
        """Seconds within which no event causes another one."""
        self._workers: Workers | None = None

    def run(
        self, *, stop: threading.Event | None = None, on_progress: Callable[[Progress], None] | None = None
    ) -> bool:
        with Workers(self._parts, self._answer) as self._workers:
            try:
                is_complete = super().run(stop=stop, on_progress=on_progress)
            except Exception:
                self._take_models()
                raise
            # Not after an interrupt: the answers to the last request would be taken for models.
            self._take_models()
            return is_complete

    def _divided(self, workers: int) -> list[range]:
        """Return the peers of each worker: about as many each, those whose gradients are computed together in one."""
        groups = [range(peer, peer + 1) for peer in range(self.num_peers)]
        if self._rows is not None:
            groups = self._rows.trainer.groups
        count = min(workers, len(groups))
        cuts = [len(groups) * number // count for number in range(count + 1)]
        return [range(groups[first].start, groups[last - 1].stop) for first, last in pairwise(cuts)]

    def _go_on(self) -> None:
        assert self._workers is not None
        stretch = self.agenda.pop_stretch(self._lookahead_s)
        owners = [self._workers.worker_of(subject(event)) for _, event in stretch]
        calls: list[list[tuple[float, Event]]] = [[] for _ in self._parts]
        for owner, timed in zip(owners, stretch, strict=True):
            calls[owner].append(timed)
        outcomes = [iter(own) for own in self._workers.ask("calls", calls)]
        for owner, (now, event) in zip(owners, stretch, strict=True):
            self.now = now
            try:
                outcome = next(outcomes[owner])
                if isinstance(outcome, SottoError):
                    raise outcome
                self._perform(event, *outcome)
            except DivergenceError as error:
                raise of_peer(error, event) from None

    def _evaluate_peers(self, wanted: Sequence[tuple[int, Split]], states: Sequence[State]) -> list[Evaluation]:
        assert self._workers is not None
        owners = [self._workers.worker_of(peer) for peer, _ in wanted]
        asked: list[list[tuple[Any, ...]]] = [[] for _ in self._parts]
        for owner, (peer, split) in zip(owners, wanted, strict=True):
            asked[owner].append((peer, model_of(states[peer]), split))
        found = [iter(own) for own in self._workers.ask("evaluate", asked)]
        return [next(found[owner]) for owner in owners]

    def _take_models(self) -> None:
        """Give the peers of this process the models of those in the workers."""
        assert self._workers is not None
        for part, models in zip(self._parts, self._workers.ask("models", self._parts), strict=True):
            for peer, model in zip(part, models, strict=True):
                algorithm = self.participants[peer].algorithm
                algorithm.x, algorithm.u = model

    # In the workers.

    def _answer(self, request: str, content: Sequence[Any]) -> Sequence[Any]:
        """Answer a request of the first process."""
        if request == "calls":
            return outcomes_of(self._outcome(event, now) for now, event in content)
        if request == "evaluate":
            return [self._evaluate_peer(*each) for each in content]
        algorithms = [self.participants[peer].algorithm for peer in content]
        return [(algorithm.x, algorithm.u) for algorithm in algorithms]


def _refuse(config: Config) -> None:
    """Raise ConfigError if a call on a peer depends on more than the peer."""
    if config.rounds.late == "skip":
        raise ConfigError(
            "cannot be used with --workers, whose peers do not know when a neighbour's frames arrived",
            key="rounds.late",
            valid="wait",
        )
    if config.compressor.budget_kbytes_per_s is not None:
        raise ConfigError("cannot be used with --workers", key="compressor.budget_kbytes_per_s", valid="unset")
    if config.peer.device != "cpu":
        raise ConfigError("cannot be used with --workers", key="peer.device", valid="cpu")


def outcomes_of(calls: Iterable[tuple[Effects, Finished | None]]) -> list[Outcome]:
    """Return the outcomes of all calls, with what the first process performs of them; or those before the first call
    that raised an error of the package, and the error."""
    found: list[Outcome] = []
    try:
        for effects, finished in calls:
            found.append((Effects(frames=effects.frames, wake_at=effects.wake_at), finished))
    except SottoError as error:
        # Rooms derive errors of their own, whose arguments are no text, from those that every process knows by name.
        kind = next(kind for kind in type(error).__mro__ if kind.__name__ in vars(errors))
        found.append(kind(str(error)))
    return found


class Workers:
    """The workers of one simulation; a context manager that ends them."""

    def __init__(self, parts: Sequence[range], answer: Callable[..., Any]) -> None:
        """Fork one worker for each part of the peers. `answer` is called there, with a request and its content. Raises
        ConfigError if processes cannot be forked."""
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigError("needs a system that can fork processes", key="--workers", valid="1")
        self._starts = [part.start for part in parts]
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("fork")
        # Objects that exist by now are left out of the workers' collections, which would copy every page of them.
        gc.freeze()
        for _ in parts:
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(target=_serve, args=(theirs, list(self._connections), answer), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()
        gc.unfreeze()

    def worker_of(self, peer: int) -> int:
        """Return the number of the worker that holds a peer."""
        return bisect_right(self._starts, peer) - 1

    def ask(self, request: str, contents: Sequence[Sequence[Any]]) -> list[Any]:
        """Send each worker the content for it, unless there is none, and return the answers in the same order.

        All processes are forks of one program, so that their values need no format. Raises LocalProtocolError if a
        worker has ended.
        """
        try:
            for connection, content in zip(self._connections, contents, strict=True):
                if content:
                    connection.send((request, content))
            return [
                connection.recv() if content else ()
                for connection, content in zip(self._connections, contents, strict=True)
            ]
        except (EOFError, OSError):
            raise LocalProtocolError("a worker process of the simulation ended; its traceback is above") from None


def _serve(connection: Connection, others: Sequence[Connection], answer: Callable[..., Any]) -> None:
    """Answer requests until the first process closes the pipe or ends."""
    # Ctrl-C goes to all processes of a terminal, and SIGTERM to all of a group or container; the first one decides what
    # it means, and its end ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Inherited ends of pipes would keep them open when the first process is gone.
    for other in others:
        other.close()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            connection.send(answer(*request))
        except BrokenPipeError:
            return
