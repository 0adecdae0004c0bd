"""A simulated run whose peers are in several worker processes.

The agenda is worked off in stretches of virtual time in which no event can cause another one, so that all calls of a
stretch can be made at once. Their outcomes are performed in the order of the events: figures, times and bits are those
of a run in one process, whatever the number of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from peer.compress.payload import FloatArray
from peer.config.options import Config
from peer.errors import ConfigError
from peer.records import Progress
from peer.simulate.calls import pack_calls, pack_outcomes, unpack_calls, unpack_outcomes
from peer.simulate.rounds import Simulator
from peer.simulate.virtual_run import Event, RunOptions, naming, subject
from peer.simulate.workers import Packed, Workers
from peer.train.evaluation import Evaluation
from peer.train.local_step import Split


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
        answers = self._workers.ask([pack_calls(own) if own else None for own in calls])
        outcomes = [unpack_outcomes(values or (), blobs) for values, blobs in answers]
        for owner, (now, event) in zip(owners, stretch, strict=True):
            self.now = now
            with naming(event):
                self._perform(event, *next(outcomes[owner]))

    def _evaluate_peers(self, wanted: Sequence[tuple[int, Split]], models: Sequence[FloatArray]) -> list[Evaluation]:
        assert self._workers is not None
        owners = [self._workers.worker_of(peer) for peer, _ in wanted]
        asked: list[list[tuple[int, Split]]] = [[] for _ in self._parts]
        sent: list[list[memoryview]] = [[] for _ in self._parts]
        for owner, (peer, split) in zip(owners, wanted, strict=True):
            asked[owner].append((peer, split))
            sent[owner].append(models[peer].data.cast("B"))
        requests = [(["evaluate", own], models) if own else None for own, models in zip(asked, sent, strict=True)]
        found = [iter(values or ()) for values, _ in self._workers.ask(requests)]
        return [
            Evaluation(np.array(correct, np.int64), np.array(total, np.int64), loss, metrics)
            for correct, total, loss, metrics in (next(found[owner]) for owner in owners)
        ]

    def _take_models(self) -> None:
        """Give the peers of this process the models of those in the workers."""
        assert self._workers is not None
        answers = self._workers.ask([(["models", [part.start, part.stop]], []) for part in self._parts])
        for part, (weights, blobs) in zip(self._parts, answers, strict=True):
            for peer, u, x in zip(part, weights, blobs, strict=True):
                algorithm = self.participants[peer].algorithm
                algorithm.x, algorithm.u = np.frombuffer(x, algorithm.x.dtype).copy(), u

    # In the workers.

    def _answer(self, values: Any, blobs: Sequence[memoryview]) -> Packed:
        """Answer a request of the first process."""
        request, content = values
        if request == "calls":
            return pack_outcomes(self._outcome(event, now) for now, event in unpack_calls(content, blobs))
        if request == "evaluate":
            found = [
                self._evaluate_peer(peer, np.frombuffer(model, np.float32).copy(), split)
                for (peer, split), model in zip(content, blobs, strict=True)
            ]
            return [[each.correct.tolist(), each.total.tolist(), each.loss, dict(each.metrics)] for each in found], []
        algorithms = [self.participants[peer].algorithm for peer in range(*content)]
        return [algorithm.u for algorithm in algorithms], [algorithm.x.data.cast("B") for algorithm in algorithms]


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
