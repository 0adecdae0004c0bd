"""Common part of runs with and without rounds on the virtual clock: the agenda, links, evaluations and records."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Generic, NotRequired, TypeAlias, TypedDict, TypeVar

import numpy as np

from peer.compress.payload import FloatArray
from peer.config.options import Config
from peer.errors import ConfigError, DivergenceError
from peer.gossip.effects import OutgoingFrame
from peer.gossip.shared_copies import SharedCopies
from peer.node.divergence_guard import reason_to_stop
from peer.node.evaluation_cadence import is_evaluated
from peer.node.local_steps import LocalSteps
from peer.node.pair_participant import PairParticipant
from peer.node.participant import Participant
from peer.records import PeerProgress, Progress, RoundRecord
from peer.run.plan import refuse_own_data
from peer.run.setup import PeerTrainer, RunSetup
from peer.run.summary import average, consensus, evaluation_record
from peer.simulate.network import Agenda, LinkModel, VirtualNetwork
from peer.simulate.rows import StackedRows
from peer.state.metrics import ConsensusRecord, EvaluationRecord, LinkRecord, MetricsStore
from peer.train.evaluation import Evaluation
from peer.train.local_step import Split, Trainer
from peer.train.threads import use_one_thread

log = logging.getLogger("sotto")

MODELS_EVALUATED_MAX = 64
"""Most peers that are evaluated one by one, evenly spread (besides the averaged model)."""

PROGRESS_EVERY_S = 0.25
"""Seconds between reports of a run's progress."""

AnyParticipant = TypeVar("AnyParticipant", Participant, PairParticipant)
State: TypeAlias = tuple[FloatArray, float]
"""x and u of a peer."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A peer's local step is over."""

    peer: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame has arrived."""

    receiver: int
    sender: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class Timer:
    """A peer's timer is due."""

    peer: int


Event: TypeAlias = StepDone | Arrival | Timer


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A completed round of a peer, for the run's own use."""

    record: RoundRecord
    done: int
    """Rounds that the peer has completed."""
    reason: str | None
    """Why the run should stop after it."""
    state: tuple[FloatArray, float] | None
    """(x, u) if models are evaluated after this round."""


class RunOptions(TypedDict):
    """Arguments of all kinds of simulated runs (`VirtualRun`)."""

    num_peers: int
    metrics: NotRequired[MetricsStore | None]
    links: NotRequired[LinkModel | None]
    step_s: NotRequired[float]
    slow: NotRequired[Mapping[int, float] | None]
    stacked: NotRequired[bool]


class VirtualRun(ABC, Generic[AnyParticipant]):
    """Common part of simulated runs with and without rounds: peers, virtual links, evaluation, progress."""

    has_rounds: ClassVar[bool] = True

    def __init__(
        self,
        config: Config,
        base: Path,
        *,
        num_peers: int,
        metrics: MetricsStore | None = None,
        links: LinkModel | None = None,
        step_s: float = 0.0,
        slow: Mapping[int, float] | None = None,
        stacked: bool = False,
        after_round: Callable[[AnyParticipant, RoundRecord], None] | None = None,
        after_evaluation: Callable[[EvaluationRecord], None] | None = None,
        loops: Sequence[PeerTrainer] = (),
    ) -> None:
        """`step_s`: virtual seconds of a local step; `slow`: peer → factor of its step time; `stacked`: train all peers
        as one batch (equal to one by one within float32 rounding). `after_round` is called for every completed round of
        every peer, `after_evaluation` for each evaluation of a peer's model. `loops`: trainer of each peer, if there is
        no task. Raises ConfigError for `stacked` without rounds, and for a faulty configuration."""
        if stacked and not self.has_rounds:
            raise ConfigError(
                f"{config.algorithm.name} has no rounds, so its peers cannot be trained as one batch",
                key="--stacked",
            )
        self.config, self.num_peers = config, num_peers
        if not loops:
            use_one_thread()
            refuse_own_data(config)
        if loops:
            setup = RunSetup.of_loop(config, base, criteria=loops[0].criteria)
        else:
            setup = RunSetup.open(config, base, num_peers)
        self.setup = self._prepared(replace(setup, shared_copies=SharedCopies()))
        if not loops and (problem := self.setup.short_shard(range(num_peers))) is not None:
            log.warning("%s", problem)
        self._criterion = self.setup.criterion
        self._metrics = metrics
        self._after_round: Callable[[AnyParticipant, RoundRecord], None] | None = after_round
        self._after_evaluation: Callable[[EvaluationRecord], None] | None = after_evaluation
        self._network = VirtualNetwork(links or LinkModel())
        self.step_s = [step_s * (slow or {}).get(peer, 1.0) for peer in range(num_peers)]
        self._trainers: list[PeerTrainer] = [*loops]
        """One trainer for each peer; only that of peer 0 if all train as one batch."""
        if not loops:
            first = self.setup.trainer(0)
            first.try_own_task()
            self._trainers = [first, *(self.setup.trainer(peer) for peer in range(1, 1 if stacked else num_peers))]
        self.trainer = self._trainers[0]
        self._x0 = self.trainer.initial_vector()
        self._rows = StackedRows(self.setup) if stacked else None
        self.participants: list[AnyParticipant] = []
        for peer in range(num_peers):
            steps: LocalSteps = self._trainers[peer] if self._rows is None else self._rows.row(peer)
            self.participants.append(self._make_participant(peer, steps))
        self.agenda: Agenda[Event] = Agenda()
        self._snapshots: dict[int, dict[int, tuple[FloatArray, float]]] = {}
        """Evaluation round → peer → (x, u), until all peers have reached it."""
        self._links: dict[tuple[int, int], list[int]] = {}
        """(sender, receiver) → frames, payload bytes, frame bytes."""
        self.totals = [PeerProgress(name=f"peer-{peer}") for peer in range(num_peers)]
        self.now = 0.0
        self.averaged_figure: float | None = None
        self.last_consensus: float | None = None
        self._built()

    def _built(self) -> None:
        """Prepare a subclass's needs besides the peers, which exist by then."""

    def _prepared(self, setup: RunSetup) -> RunSetup:
        """Return the setup of the peers; a subclass may change it before they are made."""
        return setup

    @abstractmethod
    def _make_participant(self, peer: int, steps: LocalSteps) -> AnyParticipant:
        """Return one peer, ready to start."""

    @abstractmethod
    def _start(self) -> None:
        """Put the first events on the agenda."""

    @abstractmethod
    def _handle(self, event: Event) -> None:
        """Let an event happen."""

    @abstractmethod
    def _ready_for_step(self, peer: int, now: float) -> None:
        """Let a peer begin its next round."""

    def _finish(self) -> None:
        """Do the remaining work when no events are left."""

    def run(
        self, *, stop: threading.Event | None = None, on_progress: Callable[[Progress], None] | None = None
    ) -> bool:
        """Run to the last round; return whether it was reached (False: `stop` was set). Raises DivergenceError."""
        started = shown = time.monotonic()
        self._start()
        while self.agenda:
            self._go_on()
            if stop is not None and stop.is_set():
                return False
            if on_progress is not None and time.monotonic() - shown > PROGRESS_EVERY_S:
                shown = time.monotonic()
                on_progress(self.progress(shown - started))
        self._finish()
        if on_progress is not None:
            on_progress(self.progress(time.monotonic() - started))
        return True

    def _go_on(self) -> None:
        """Let the next event happen."""
        self.now, event = self.agenda.pop()
        try:
            self._handle(event)
        except DivergenceError as error:
            raise of_peer(error, event) from None

    def progress(self, elapsed_s: float) -> Progress:
        """Return the progress of the run."""
        shown = range(self.num_peers) if self.num_peers <= 64 else range(0, self.num_peers, self.num_peers // 32)
        return Progress(
            phase="simulating",
            rounds=self.config.run.rounds,
            elapsed_s=elapsed_s,
            virtual_s=self.now,
            criterion=self._criterion,
            averaged_figure=self.averaged_figure,
            consensus_distance=self.last_consensus,
            peers=tuple(
                replace(each, state="training" if each.round < self.config.run.rounds else "finished")
                for each in (self.totals[peer] for peer in shown)
            ),
        )

    def put_links(self) -> None:
        """Write the totals of every link to the metrics."""
        if self._metrics is None:
            return
        self._metrics.put(
            *(
                LinkRecord(peer=sender, neighbor=receiver, frames=frames, payload_bytes=payload, frame_bytes=size)
                for (sender, receiver), (frames, payload, size) in sorted(self._links.items())
            )
        )
        self._metrics.flush()

    def averaged_model(self) -> FloatArray:
        """Return Σ x_i / Σ u_i, float32[n]."""
        return average([(p.algorithm.x, p.algorithm.u) for p in self._counting()])

    def _counting(self) -> Sequence[AnyParticipant]:
        """Return the peers whose x and u count in averages."""
        return self.participants

    def deliver(self, sender: int, frames: Sequence[OutgoingFrame]) -> None:
        """Put the frames of a peer on its links. A subclass may change them."""
        if not frames:
            return
        sizes = [(outgoing.receiver, len(outgoing.frame)) for outgoing in frames]
        for outgoing, arrival in zip(frames, self._network.arrivals(sender, sizes, self.now), strict=True):
            total = self._links.setdefault((sender, outgoing.receiver), [0, 0, 0])
            total[0] += 1
            total[1] += outgoing.payload_bytes
            total[2] += len(outgoing.frame)
            self.agenda.add(arrival, Arrival(outgoing.receiver, sender, outgoing.frame))

    def _finished(self, participant: AnyParticipant, record: RoundRecord) -> Finished:
        """Return the facts that the run needs of a round that a peer has completed."""
        done, state, algorithm = participant.round, None, participant.algorithm
        if self._is_evaluated(done):
            # Stacked peers wait for each other after each round: nobody's model changes before the last one is there.
            x = algorithm.x if self._rows is not None else algorithm.x.copy()
            state = x, algorithm.u
        is_misled = participant.reaches.is_misled(record.round)
        reason = reason_to_stop(self.config.guard, record, participant.model(), is_misled=is_misled)
        return Finished(record=record, done=done, reason=reason, state=state)

    def _finish_round(self, finished: Finished) -> None:
        """Note a completed round, evaluate when it is the last peer's, and let the peer go on."""
        record, done = finished.record, finished.done
        self.totals[record.peer] = self.totals[record.peer].after(record)
        if self._metrics is not None:
            self._metrics.put(record)
        if finished.reason is not None:
            raise DivergenceError(finished.reason)
        if self._after_round is not None:
            self._after_round(self.participants[record.peer], record)
        if finished.state is not None:
            snapshots = self._snapshots.setdefault(done, {})
            snapshots[record.peer] = finished.state
            if len(snapshots) == self.num_peers:
                self._evaluate(done, [snapshots[peer] for peer in range(self.num_peers)])
                del self._snapshots[done]
        if done < self.config.run.rounds:
            self._ready_for_step(record.peer, self.now)

    def _is_evaluated(self, done: int) -> bool:
        return is_evaluated(self.config.evaluation, done, self.config.run.rounds)

    def _evaluate(self, done: int, states: list[State]) -> None:
        averaged = average(states)
        record = consensus(done, states)
        self.last_consensus = record.consensus_distance
        of_average = self._evaluate_average(averaged)
        averaged_record = evaluation_record(-1, done, "test", of_average)
        self._criterion = averaged_record.compared_by(self.setup.criteria)
        self.averaged_figure = averaged_record.figure(self._criterion)
        records: list[EvaluationRecord | ConsensusRecord] = [record, averaged_record]
        step = max(1, -(-self.num_peers // MODELS_EVALUATED_MAX))
        wanted: list[tuple[int, Split]] = [(peer, "test") for peer in range(0, self.num_peers, step)]
        if self._rows is None:
            wanted += [(peer, "holdout") for peer in range(self.num_peers) if len(self.setup.manifest.holdout[peer])]
        others = [each for each in wanted if not self._is_average(*each, states, averaged)]
        evaluated = dict(zip(others, self._evaluate_peers(others, states), strict=True))
        for peer, split in wanted:
            found = evaluated.get((peer, split), of_average)
            own = evaluation_record(peer, done, split, found)
            if split == "test":
                self.totals[peer] = replace(self.totals[peer], figure=own.figure(self._criterion))
                if self._after_evaluation is not None:
                    self._after_evaluation(own)
            records.append(own)
        if self._metrics is not None:
            self._metrics.put(*records)
            self._metrics.flush()

    def _is_average(self, peer: int, split: Split, states: Sequence[State], averaged: FloatArray) -> bool:
        """Return whether a peer's evaluation is that of the averaged model: if all hold one model, and no peer has
        statistics of norms of its own."""
        trainer = self.trainer
        is_function_of_model = isinstance(trainer, Trainer) and next(trainer.model.buffers(), None) is None
        return is_function_of_model and split == "test" and np.array_equal(model_of(states[peer]), averaged)

    def _evaluate_average(self, model: FloatArray) -> Evaluation:
        if isinstance(self.trainer, Trainer):
            return self.trainer.evaluate(model, averaged=True)
        return self.trainer.evaluate(model)

    def _evaluate_peers(self, wanted: Sequence[tuple[int, Split]], states: Sequence[State]) -> list[Evaluation]:
        """Return the evaluations of some peers' models on a split."""
        return [self._evaluate_peer(peer, model_of(states[peer]), split) for peer, split in wanted]

    def _evaluate_peer(self, peer: int, model: FloatArray, split: Split) -> Evaluation:
        """Return the evaluation of a peer's model on a split; only its own trainer has its statistics of norms."""
        if self._rows is not None:
            return self._rows.trainer.evaluate_one(peer, model)
        return self._trainers[peer].evaluate(model, split)


def of_peer(error: DivergenceError, event: Event) -> DivergenceError:
    """Return an error that names the peer at which it was found."""
    return DivergenceError(f"peer {subject(event)}: {error}")


def subject(event: Event) -> int:
    """Return the peer to which an event happens."""
    return event.receiver if isinstance(event, Arrival) else event.peer


def model_of(state: State) -> FloatArray:
    """Return z = x / u, computed on demand: 100,000 models at once would take twice the memory."""
    x, u = state
    z: FloatArray = x / x.dtype.type(u)
    return z
