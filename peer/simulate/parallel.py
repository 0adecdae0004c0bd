"""A simulated run whose peers are in several worker processes.

The agenda is worked off in stretches of virtual time in which no event can cause another one, so that all calls of a
stretch can be made at once. Their outcomes are performed in the order of the events: figures, times and bits are those
of a run in one process, whatever the number of workers. Calls on peers go to the workers as messages, and outcomes come
back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from peer import errors
from peer.config.options import Config
from peer.errors import ConfigError, DivergenceError, SottoError
from peer.gossip.effects import Effects, OutgoingFrame
from peer.records import Progress, RoundRecord
from peer.simulate.rounds import Simulator
from peer.simulate.virtual_run import (
    Arrival,
    Event,
    Finished,
    RunOptions,
    State,
    StepDone,
    Timer,
    model_of,
    of_peer,
    subject,
)
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
            try:
                self._perform(event, *next(outcomes[owner]))
            except DivergenceError as error:
                raise of_peer(error, event) from None

    def _evaluate_peers(self, wanted: Sequence[tuple[int, Split]], states: Sequence[State]) -> list[Evaluation]:
        assert self._workers is not None
        owners = [self._workers.worker_of(peer) for peer, _ in wanted]
        asked: list[list[tuple[int, Split]]] = [[] for _ in self._parts]
        sent: list[list[memoryview]] = [[] for _ in self._parts]
        for owner, (peer, split) in zip(owners, wanted, strict=True):
            asked[owner].append((peer, split))
            sent[owner].append(model_of(states[peer]).data.cast("B"))
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


def pack_calls(timed: Sequence[tuple[float, Event]]) -> Packed:
    """Return events with their times as a request."""
    calls: list[list[Any]] = []
    frames: list[bytes] = []
    for now, event in timed:
        if isinstance(event, Arrival):
            # Once for all receivers in a row.
            is_new = not frames or frames[-1] is not event.frame
            calls.append([now, "arrival", event.receiver, event.sender, is_new])
            if is_new:
                frames.append(event.frame)
        else:
            calls.append([now, "step" if isinstance(event, StepDone) else "timer", event.peer])
    return ["calls", calls], frames


def unpack_calls(calls: Sequence[Sequence[Any]], frames: Sequence[memoryview]) -> Iterator[tuple[float, Event]]:
    """Yield the arguments of `pack_calls`."""
    following, frame = iter(frames), b""
    for now, kind, peer, *more in calls:
        if kind == "arrival":
            sender, is_new = more
            if is_new:
                frame = bytes(next(following))
            yield now, Arrival(peer, sender, frame)
        else:
            yield now, StepDone(peer) if kind == "step" else Timer(peer)


def pack_outcomes(outcomes: Iterable[tuple[Effects, Finished | None]]) -> Packed:
    """Return outcomes as an answer: all, or those before the first call that raised an error of the package, and the
    error."""
    packed: list[Any] = []
    blobs: list[bytes | memoryview] = []
    try:
        for effects, finished in outcomes:
            frames, last = [], None
            for each in effects.frames:
                is_new = each.frame is not last
                frames.append([each.receiver, each.payload_bytes, is_new])
                if is_new:
                    last = each.frame
                    blobs.append(last)
            packed.append([frames, effects.wake_at, None if finished is None else _packed(finished, blobs)])
    except SottoError as error:
        # Rooms derive errors of their own from those that every process knows by name.
        kind = next(kind for kind in type(error).__mro__ if kind.__name__ in vars(errors))
        packed.append([kind.__name__, str(error)])
    return packed, blobs


def unpack_outcomes(
    outcomes: Sequence[Sequence[Any]], blobs: Sequence[memoryview]
) -> Iterator[tuple[Effects, Finished | None]]:
    """Yield the outcomes given to `pack_outcomes`; raise the error, if there was one, in its place."""
    following = iter(blobs)
    for outcome in outcomes:
        if len(outcome) == 2:
            raise _raised(*outcome)
        listed, wake_at, packed = outcome
        frames, frame = [], b""
        for receiver, payload_bytes, is_new in listed:
            if is_new:
                frame = bytes(next(following))
            frames.append(OutgoingFrame(receiver=receiver, frame=frame, payload_bytes=payload_bytes))
        finished = None
        if packed is not None:
            record, done, reason, u, dtype = packed
            state = None if u is None else (np.frombuffer(next(following), dtype), u)
            finished = Finished(record=RoundRecord(**record), done=done, reason=reason, state=state)
        yield Effects(frames=frames, wake_at=wake_at), finished


def _packed(finished: Finished, blobs: list[bytes | memoryview]) -> list[Any]:
    u, dtype = None, None
    if finished.state is not None:
        x, u = finished.state
        dtype = x.dtype.str
        blobs.append(x.data.cast("B"))
    return [asdict(finished.record), finished.done, finished.reason, u, dtype]


def _raised(name: str, text: str) -> SottoError:
    """Return an error of the package that a worker raised."""
    error: SottoError = getattr(errors, name)(text)
    return error
