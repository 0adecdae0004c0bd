"""The curves of a report, from the rows of a run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from peer.records import ACCURACY, Criterion, RoundRecord
from peer.report.line_chart import Axis, Chart, Line, line_chart, smooth, thin_out
from peer.report.numbers import significant
from peer.report.run_data import RunData, grouped, mean

MOST_POINTS = 200
"""Points of one curve: more than the chart has room for."""

LOSS_POINTS = 80
"""Points of a loss curve: single batches are noise, so that more rounds go into each."""

MOST_PEERS = 32
"""Most peers drawn one by one; of more, this many evenly spread ones."""

Reading = Callable[[RoundRecord], float | None]


@dataclass(frozen=True)
class Against:
    """One measure of the progress of a run."""

    name: str
    axis: Axis
    of_round: Callable[[int, int], float]
    """(peer, completed rounds) → position on the axis."""
    of_all: Callable[[int], float]
    """Completed rounds → position for curves that belong to no single peer."""


def drawn_peers(data: RunData) -> list[int]:
    """Return the peers that get a thin curve of their own."""
    peers = data.peers
    if len(peers) <= MOST_PEERS:
        return peers
    return [peers[round(i * (len(peers) - 1) / (MOST_PEERS - 1))] for i in range(MOST_PEERS)]


def measures(data: RunData) -> list[Against]:
    """Return rounds, bytes and seconds as horizontal axes; the latter two only where they were recorded."""
    result = [Against("round", Axis(label="round", unit="count", low=0.0), lambda _, done: done, lambda done: done)]
    if any(record.frame_bytes for record in data.rounds):
        axis = Axis(label="bytes sent by a peer", unit="bytes", low=0.0)
        result.append(_cumulative(data, "bytes", axis, lambda record: record.frame_bytes, running=False))
    if any(record.time_s for record in data.rounds):
        simulated = data.summary is not None and data.summary.simulated
        axis = Axis(label="virtual seconds" if simulated else "seconds", unit="seconds", low=0.0)
        result.append(_cumulative(data, "time", axis, lambda record: record.time_s, running=True))
    return result


def worst_figure(data: RunData, criterion: Criterion) -> list[tuple[int, float]]:
    """Return (completed rounds, figure of the worst peer) on the common test set."""
    own = _test_figures(data, criterion)
    own.pop(-1, None)
    by_round = grouped(point for points in own.values() for point in points)
    # A round that only some of its members have finished says nothing about the worst of all.
    gone = gone_peers(data)
    spans = [(one[0][0], one[-1][0] if peer in gone else math.inf) for peer, one in own.items()]
    count = {done: sum(first <= done <= last for first, last in spans) for done in by_round}
    return [(done, criterion.worst(values)) for done, values in sorted(by_round.items()) if len(values) == count[done]]


def gone_peers(data: RunData) -> set[int]:
    """Return the peers that took part, and were no members any more when the run ended."""
    members = data.summary.members if data.summary is not None else []
    return set(data.peers) - set(members) if members else set()


def averaged_figure(data: RunData, criterion: Criterion) -> list[tuple[int, float]]:
    """Return (completed rounds, figure of the averaged model) on the common test set."""
    return _test_figures(data, criterion).get(-1, [])


def mean_loss(data: RunData) -> list[tuple[int, float]]:
    """Return (completed rounds, training loss, mean of all peers), smoothed: single batches are noise."""
    smoothed = _smoothed(data, _loss, LOSS_POINTS)
    return [(done, mean(smoothed[done])) for done in sorted(smoothed)]


def figure_axis(criterion: Criterion, low: float | None = None) -> Axis:
    """Return the vertical axis of a figure; that of accuracies ends at 100 %, and begins at `low` where it is given."""
    if criterion != ACCURACY:
        return Axis(label=criterion.name)
    return Axis(label="accuracy", unit="percent", low=low, high=None if low is None else 1.0)


def figure_charts(data: RunData, criterion: Criterion) -> list[Chart]:
    """Return accuracy, or another figure, on the common test set against each measure."""
    own, worst = _test_figures(data, criterion), worst_figure(data, criterion)
    averaged = own.pop(-1, [])
    single = data.summary.single_process(criterion) if data.summary is not None else None
    vertical = figure_axis(criterion, _accuracy_floor([value for one in (*own.values(), averaged) for _, value in one]))
    charts = []
    for measure in measures(data):
        lines = [
            Line(label=data.peer_name(peer), points=_at(measure, peer, own[peer]), style="peer", legend="")
            for peer in drawn_peers(data)
            if peer in own
        ]
        lines.append(Line(label="worst peer", points=_at(measure, None, worst), style="worst"))
        lines.append(Line(label="averaged model", points=_at(measure, None, averaged), style="mean"))
        ends = [x for line in lines for x, _ in line.points]
        if single is not None and ends:
            level = [(0.0, single), (max(ends), single)]
            lines.append(Line(label="one process, all data, full precision", points=level, style="baseline"))
        name = criterion.name[:1].upper() + criterion.name[1:]
        charts.append(line_chart(f"{name} by {measure.name}", lines, measure.axis, vertical))
    return charts


def _test_figures(data: RunData, criterion: Criterion) -> dict[int, list[tuple[int, float]]]:
    """Return peer (−1: the averaged model) → (completed rounds, figure) on the common test set."""
    tested = [row for row in data.evaluations if row.split == "test"]
    known = [(row, value) for row in tested if (value := row.figure(criterion)) is not None and math.isfinite(value)]
    return grouped((row.peer, (row.round, value)) for row, value in known)


def loss_charts(data: RunData) -> list[Chart]:
    """Return training loss against each measure, smoothed: single batches are noise."""
    charts = []
    for measure in measures(data):
        lines = _peer_lines(data, _loss, measure, most=LOSS_POINTS)
        lines += _mean_and_worst(data, _loss, measure, most=LOSS_POINTS, worst="highest of all peers")
        charts.append(line_chart(f"Training loss by {measure.name}", lines, measure.axis, Axis(label="loss", log=True)))
    return charts


def health_charts(data: RunData) -> list[Chart]:
    """Return the curves of the health of gossip itself."""
    rounds = measures(data)[0]
    whole = [(float(record.round), record.consensus_distance) for record in data.consensus]
    consensus = [Line(label="all models", points=thin_out(whole, MOST_POINTS), style="mean")]
    consensus += _peer_lines(
        data, lambda record: record.neighbor_distance, rounds, legend="each peer, to its neighbours"
    )
    charts = [line_chart("Consensus distance", consensus, rounds.axis, Axis(label="distance", log=True))]
    for title, reading, log in _HEALTH:
        values = _values(data, reading)
        if len(values) == 1:
            charts.append(Chart(title, None, f"{title} was {significant(values.pop())} throughout."))
            continue
        charts.append(_each_peer(data, title, reading, rounds, Axis(label=title, log=log)))
    bound = _over_peers(data, lambda r: r.entropy_bits / r.values if r.values and r.entropy_bits else None)
    least = Line(label="entropy bound", points=smooth(bound, MOST_POINTS), style="bound")
    charts.append(_each_peer(data, "Bits a parameter", _bits, rounds, Axis(label="bits", low=0.0), least))
    for title, reading in _CHOSEN:
        # Of interest only where a bandwidth budget chose it.
        if len(_values(data, reading)) > 1:
            charts.append(_each_peer(data, title, reading, rounds, Axis(label=title, low=0.0)))
    if any(record.staleness is not None for record in data.rounds):
        # Only the peers of asynchronous runs have one.
        axis = Axis(label="exchanges between read and step", low=0.0)
        charts.append(_each_peer(data, "Staleness", lambda record: record.staleness, rounds, axis))
    return charts


_HEALTH: tuple[tuple[str, Reading, bool], ...] = (
    ("Push-sum weight u", lambda record: record.push_weight, False),
    ("Norm of the error memory", lambda record: record.error_norm, True),
    ("Replica error", lambda record: record.replica_error, True),
)


_CHOSEN: tuple[tuple[str, Reading], ...] = (
    ("Fraction sent", lambda record: record.fraction),
    ("Bits of each number", lambda record: record.bits),
)


def _each_peer(data: RunData, title: str, reading: Reading, rounds: Against, axis: Axis, *others: Line) -> Chart:
    """Return the chart of a figure by round: that of each peer, their mean, and other lines."""
    lines = _peer_lines(data, reading, rounds, legend="each peer") + _mean_and_worst(data, reading, rounds)
    return line_chart(title, [*lines, *others], rounds.axis, axis)


def _values(data: RunData, reading: Reading) -> set[float]:
    """Return the different values that a figure had."""
    return {value for record in data.rounds if (value := reading(record)) is not None}


def _loss(record: RoundRecord) -> float | None:
    return record.loss


def _bits(record: RoundRecord) -> float | None:
    return 8 * record.payload_bytes / record.values if record.values else None


def _peer_lines(
    data: RunData, reading: Reading, measure: Against, *, legend: str | None = None, most: int = MOST_POINTS
) -> list[Line]:
    lines = []
    for number, peer in enumerate(drawn_peers(data)):
        points = [(measure.of_round(peer, done), value) for done, value in _smooth_peer(data, peer, reading, most)]
        # One entry stands for all the thin lines.
        name = legend if legend is not None and number == 0 else ""
        lines.append(Line(label=data.peer_name(peer), points=points, style="peer", legend=name))
    return lines


def _mean_and_worst(
    data: RunData, reading: Reading, measure: Against, *, worst: str | None = None, most: int = MOST_POINTS
) -> list[Line]:
    smoothed = _smoothed(data, reading, most)
    rounds = sorted(smoothed)
    lines = []
    if worst is not None:
        # The highest of the smoothed curves: the highest of single batches would be the noise of them all.
        highest = [(measure.of_all(done), max(smoothed[done])) for done in rounds]
        lines.append(Line(label=worst, points=highest, style="worst"))
    means = [(measure.of_all(done), mean(smoothed[done])) for done in rounds]
    lines.append(Line(label="mean of all peers", points=means, style="mean"))
    return lines


def _smoothed(data: RunData, reading: Reading, most: int) -> dict[int, list[float]]:
    """Return completed rounds → values of the peers' smoothed curves there."""
    return grouped(point for peer in data.peers for point in _smooth_peer(data, peer, reading, most))


def _smooth_peer(data: RunData, peer: int, reading: Reading, most: int) -> list[tuple[int, float]]:
    points = [(r.round + 1, value) for r in data.rounds_of(peer) if (value := reading(r)) is not None]
    return [(int(done), value) for done, value in smooth(points, most)]


def _over_peers(data: RunData, reading: Reading) -> list[tuple[int, float]]:
    """Return (completed rounds, mean of the peers)."""
    values = grouped((r.round + 1, value) for r in data.rounds if (value := reading(r)) is not None)
    return [(done, mean(values[done])) for done in sorted(values)]


def _at(measure: Against, peer: int | None, points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    place = measure.of_all if peer is None else (lambda done: measure.of_round(peer, done))
    return thin_out([(place(done), value) for done, value in points], MOST_POINTS)


def _cumulative(
    data: RunData, name: str, axis: Axis, reading: Callable[[RoundRecord], float], *, running: bool
) -> Against:
    """Return a measure that is read from the rows: a running total already (`running`), or to be summed up."""
    rounds: dict[int, list[int]] = {}
    totals: dict[int, list[float]] = {}
    for peer in data.peers:
        rows = data.rounds_of(peer)
        rounds[peer] = [row.round for row in rows]
        values = [float(reading(row)) for row in rows]
        totals[peer] = values if running else list(accumulate(values))

    def of_round(peer: int, done: int) -> float:
        place = bisect_left(rounds.get(peer, []), done)
        return totals[peer][place - 1] if place else 0.0

    cache: dict[int, float] = {}

    def of_all(done: int) -> float:
        if done not in cache:
            cache[done] = mean([of_round(peer, done) for peer in data.peers])
        return cache[done]

    return Against(name, axis, of_round, of_all)


def _accuracy_floor(values: Sequence[float]) -> float:
    """Return the start of the accuracy axis: a whole tenth below all that is drawn."""
    return max(0.0, int(10 * min(values, default=0.0) - 0.5) / 10)
