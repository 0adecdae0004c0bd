"""The outcome of a run: from the metrics of its peers to the one table at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import numpy as np

from peer import __version__
from peer.compress.payload import FloatArray
from peer.config.options import Config
from peer.config.precision_choice import FASTEST, PrecisionChoice
from peer.gossip.error_feedback import final_rounds_for
from peer.records import ACCURACY, Better
from peer.run.machine import machine_facts
from peer.run.plan import describe_messages
from peer.run.setup import RunSetup
from peer.state.checkpoints import StoredVector
from peer.state.metrics import ConsensusRecord, EvaluationRecord, MetricsStore, Summary, measured
from peer.train.baseline import single_process
from peer.train.evaluation import Evaluation

PeerState: TypeAlias = tuple[FloatArray | StoredVector, float]
"""Numerator x and push-sum weight u of a peer. Vectors in files are read block by block."""
_BLOCK = 1 << 20
"""Numbers of a model that are in memory of each peer at once."""


def describe_run(config: Config, setup: RunSetup, parameters: int, *, command: str = "") -> Summary:
    """Return a summary with the facts known before the first round: of a model of so many `parameters`. `command`
    started the run."""
    names = [peer.name for peer in config.peers] or [f"peer-{index}" for index in range(setup.num_peers)]
    return Summary(
        name=config.run.name,
        algorithm=config.algorithm.name,
        compressor=describe_messages(config),
        graph=setup.schedule.name,
        precision=FASTEST if config.training.precision == FASTEST else setup.trained_in,
        num_peers=setup.num_peers,
        rounds=config.run.rounds,
        seed=config.run.seed,
        parameters=parameters,
        seconds=0.0,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commands=[command] if command else [],
        peer_names=names,
        criteria={criterion.name: criterion.better for criterion in setup.criteria},
        version=__version__,
        machine=machine_facts(),
    )


def note_precisions(summary: Summary, choices: Mapping[str, PrecisionChoice]) -> None:
    """Fill in the devices' choices, by the names of their peers, if each device chooses."""
    summary.chosen_precisions = {name: choice.document() for name, choice in choices.items()}
    chosen = {choice.precision for choice in choices.values()}
    summary.precision = chosen.pop() if len(chosen) == 1 else FASTEST


def evaluation_record(peer: int, done: int, split: str, found: Evaluation) -> EvaluationRecord:
    """Return the record of an evaluation after `done` rounds."""
    return EvaluationRecord(
        peer=peer,
        round=done,
        split=split,
        correct=tuple(int(n) for n in found.correct),
        total=tuple(int(n) for n in found.total),
        loss=found.loss,
        metrics=dict(found.metrics),
    )


def average(states: Sequence[PeerState]) -> FloatArray:
    """Return the averaged model Σ x_i / Σ u_i, in the precision of the first."""
    return Average(states)[:]


class Average:
    """The averaged model, of which slices of consecutive numbers are computed when they are asked for."""

    def __init__(self, states: Sequence[PeerState]) -> None:
        """`states`: those of all peers that have a part in it."""
        first = states[0][0]
        self._states, self.size, self.dtype = states, first.size, first.dtype

    def __getitem__(self, part: slice) -> FloatArray:
        """Return consecutive numbers, in memory of their own."""
        begin, end, _ = part.indices(self.size)
        averaged: FloatArray = np.empty(end - begin, self.dtype)
        weight = sum(u for _, u in self._states)
        for block in _blocks(begin, end):
            total = np.zeros(block.stop - block.start)
            for x, _ in self._states:
                total += x[block]
            averaged[block.start - begin : block.stop - begin] = total / weight
        return averaged


def consensus(done: int, states: Sequence[PeerState]) -> ConsensusRecord:
    """Return the consensus distance (1/n) Σ ‖z_i − z̄‖₂ of the models z = x / u after `done` rounds."""
    squares, square_of_mean = np.zeros(len(states)), 0.0
    for part in _blocks(0, states[0][0].size):
        models = [x[part] / x.dtype.type(u) for x, u in states]
        mean = np.zeros(models[0].size)
        for z in models:
            mean += z
        mean /= len(models)
        away = (z - mean for z in models)
        squares += [float(each @ each) for each in away]
        square_of_mean += float(mean @ mean)
    distance = sum(map(float, np.sqrt(squares))) / len(states)
    return ConsensusRecord(round=done, consensus_distance=distance, model_norm=float(np.sqrt(square_of_mean)))


def _blocks(begin: int, end: int) -> Iterator[slice]:
    return (slice(at, min(at + _BLOCK, end)) for at in range(begin, end, _BLOCK))


def finish_summary(summary: Summary, stores: Sequence[MetricsStore], setup: RunSetup) -> None:
    """Fill in the figures of the metrics."""
    sum_up(summary, stores)
    own = setup.manifest.own_labels is not None
    budgets = [setup.budget_of_privacy(peer) for peer in ([setup.config.peer.index] if own else range(setup.num_peers))]
    spent = [budget.spent(summary.completed_rounds) for budget in budgets if budget is not None]
    summary.epsilon = max(spent, default=None)
    distances = [record for store in stores for record in store.consensus()]
    if distances:
        last = max(distances, key=lambda record: record.round)
        summary.consensus_distance = last.consensus_distance
        contraction = 1.0 - setup.schedule.spectral_gap
        if last.model_norm > 0.0 and 0.0 <= contraction < 1.0:
            summary.rounds_to_consensus = final_rounds_for(last.consensus_distance, contraction, 1e-3 * last.model_norm)


def sum_up(summary: Summary, stores: Sequence[MetricsStore]) -> None:
    """Fill in the figures of the metrics. If `summary.members` names peers, the accuracies are theirs alone."""
    files = [(store.rounds(), store.evaluations()) for store in stores]
    rounds = [record for rows, _ in files for record in rows]
    evaluations = [record for record in measured(files) if record.split == "test"]
    links = [record for store in stores for record in store.links()]
    summary.payload_bytes = sum(record.payload_bytes for record in rounds)
    summary.frame_bytes = sum(record.frame_bytes for record in rounds)
    summary.protobuf_bytes = sum(link.protobuf_bytes for link in links)
    sockets = [link.socket_bytes for link in links]
    packets = [link.packet_bytes for link in links]
    summary.socket_bytes = None if not links or None in sockets else sum(size or 0 for size in sockets)
    summary.packet_bytes = None if not links or None in packets else sum(size or 0 for size in packets)
    values = sum(record.values for record in rounds)
    summary.full_precision_payload_bytes = 4 * values
    summary.bits_per_parameter = 8 * summary.payload_bytes / values if values else None
    sampled = [record for record in rounds if record.entropy_bits]
    if sampled:
        bits, described = sum(r.entropy_bits for r in sampled), sum(r.values for r in sampled)
        summary.entropy_bits_per_parameter = bits / described
    last_of_peer = {record.peer: record for record in rounds}
    summary.repairs = sum(record.repairs for record in last_of_peer.values())
    summary.exchanges = sum(record.exchanges for record in rounds) // 2
    stale = [record.staleness for record in rounds if record.staleness is not None]
    if stale:
        summary.staleness, summary.most_staleness = sum(stale) / len(stale), max(stale)
    summary.reconnects = sum(link.reconnects for link in links)
    summary.completed_rounds = max((record.round + 1 for record in last_of_peer.values()), default=0)
    summary.training_seconds = max((record.time_s for record in last_of_peer.values()), default=0.0)
    summary.seconds_per_round = summary.training_seconds / max(1, summary.completed_rounds)
    newest = {record.peer: record for record in sorted(evaluations, key=lambda record: record.round)}
    own = [newest[peer] for peer in sorted(newest) if peer >= 0 and peer in (summary.members or newest)]
    kept = {record.peer: record for record in measured(files) if record.split == "holdout"}
    holdouts = [kept[peer] for peer in sorted(kept)]
    summary.criteria = _told(summary, own)
    has_accuracy = ACCURACY.name in summary.criteria
    compared = [(figure, record) for record in own if (figure := record.figure(summary.criterion)) is not None]
    if len(compared) < len(own):
        own = [record for _, record in compared]
        summary.members = [record.peer for record in own]
    if has_accuracy:
        summary.peer_accuracy = _known(record.accuracy for record in own)
        summary.holdout_accuracy = _known(record.accuracy for record in holdouts)
    summary.peer_metrics, summary.holdout_metrics = _by_metric(own), _by_metric(holdouts)
    if -1 in newest:
        summary.averaged_accuracy = newest[-1].accuracy if has_accuracy else None
        summary.averaged_metrics = dict(newest[-1].metrics)
    if compared and has_accuracy:
        _, worst = min(compared, key=lambda each: summary.criterion.rank(each[0]))
        summary.class_accuracy = [c / n if n else None for c, n in zip(worst.correct, worst.total, strict=True)]


class _NotWantedError(Exception):
    """Nobody waits for the comparison any more."""


def compare_with_single_process(
    summary: Summary, setup: RunSetup, directory: Path | None, show: Callable[[], None], stop: threading.Event | None
) -> None:
    """Fill in the figures of one process that trains on all data, and leave the summary in `directory`, if given.
    `show` is called after each round. If `stop` is set there are no such figures."""

    def told() -> None:
        show()
        if stop is not None and stop.is_set():
            raise _NotWantedError

    with suppress(_NotWantedError):
        found = train_single_process(setup, told)
        summary.single_process_accuracy = found.accuracy if ACCURACY.name in summary.criteria else None
        summary.single_process_metrics = dict(found.metrics)
        if directory is not None:
            summary.save(directory / "summary.json")


def train_single_process(setup: RunSetup, tell: Callable[[], None] = lambda: None) -> Evaluation:
    """Return the evaluation of a model that one process trains on all data with the same schedule.

    Its batch is that of all peers together, so that it sees as many samples as the whole run; it computes in full
    precision, so that the comparison also shows the cost of bfloat16 or 8 bits.
    """
    config = setup.config
    changes = {"precision": "float32", "batch_size": config.training.batch_size * setup.num_peers}
    return single_process(
        setup.task,
        config.training.model_copy(update=changes),
        rounds=config.run.rounds,
        seed=config.run.seed,
        device=config.peer.device,
        base=setup.base,
        tell=tell,
    )[0]


def _told(summary: Summary, own: Sequence[EvaluationRecord]) -> dict[str, Better]:
    """Return the criteria of which half of the evaluations that have figures have one: a script need not tell all that
    it may. Without any figure, what a script has not declared is left out; accuracy comes first only there."""
    figures = [{c.name for c in summary.all_criteria if each.figure(c) is not None} for each in own]
    known = [names for names in figures if names]
    told = {c.name: c.better for c in summary.all_criteria if 0 < len(known) <= 2 * sum(c.name in n for n in known)}
    untold = {ACCURACY.name: ACCURACY.better} if summary.criterion == ACCURACY else summary.criteria
    return told or untold


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _by_metric(records: Sequence[EvaluationRecord]) -> dict[str, list[float]]:
    """Return the figures of the peers by metric, for metrics that all of them have."""
    names = records[0].metrics if records else ()
    known = [name for name in names if all(name in record.metrics for record in records)]
    return {name: [record.metrics[name] for record in records] for name in known}
