"""A snapshot as the parts that the page receives, each whole in itself: JSON, and in it charts as HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from peer.foreign_text import finite
from peer.records import ACCURACY, Criterion
from peer.report.blocks import Missing
from peer.report.curves import figure_axis
from peer.report.line_chart import Axis, Line, Points, line_chart
from peer.report.page import lay_out
from peer.watch.events import Event
from peer.watch.figures import Figures
from peer.watch.history import History
from peer.watch.snapshot import DOWN, EdgeView, PeerView, Snapshot

MOST_CURVES = 32
"""Most peers that get a curve each; of more, the middle half and the range are drawn."""

Parts = Mapping[str, str]
"""Name of a part → its JSON."""


class View:
    """Turns snapshots into parts. Charts are drawn again only if their figures changed."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._drawn: dict[str, tuple[object, str]] = {}

    def parts(
        self,
        snapshot: Snapshot,
        *,
        left_s: float | None,
        events: Iterable[Event],
        log: Iterable[tuple[str, str]],
    ) -> Parts:
        """Return all parts."""
        return {
            "run": _json(_run(snapshot, left_s)),
            "peers": _json([_peer(peer) for peer in snapshot.peers]),
            "edges": _json([_edge(edge) for edge in snapshot.edges]),
            "charts": self._charts(snapshot),
            "events": _json([[event.at, event.text, event.is_trouble] for event in events]),
            "log": _json(list(log)),
        }

    def _charts(self, snapshot: Snapshot) -> str:
        name = snapshot.criterion.name
        figure, average = self._figures.curves.get(name), self._figures.averages.get(name)
        worst = None if snapshot.worst is None else snapshot.worst.index
        names = tuple(peer.name for peer in snapshot.peers)
        versions = (figure and figure.version, average and average.version, self._figures.loss.version)
        key = (versions, worst, snapshot.criterion, names if len(names) <= MOST_CURVES else len(names))
        if self._drawn.get("charts", (None, ""))[0] != key:
            self._drawn["charts"] = key, _json(_draw(snapshot, self._figures, figure, average))
        return self._drawn["charts"][1]


def _run(snapshot: Snapshot, left_s: float | None) -> dict[str, Any]:
    peers, worst = snapshot.peers, snapshot.worst
    rates = [peer.rate for peer in peers if peer.rate is not None and peer.state == "running"]
    payload = [peer.payload_bytes for peer in peers if peer.payload_bytes is not None]
    link_rates = [rate for edge in snapshot.edges for rate in edge.rates if rate is not None]
    budgets = [peer.budget for peer in peers if peer.budget is not None]
    return {
        "name": snapshot.name,
        "kind": snapshot.kind,
        "round": snapshot.round,
        "rounds": snapshot.rounds,
        "criterion": snapshot.criterion.name,
        "is_accuracy": snapshot.criterion == ACCURACY,
        "worst": None if worst is None else worst.index,
        "average": snapshot.averaged_figure,
        "distance": snapshot.consensus_distance,
        "running": sum(peer.state in ("running", "averaging", "stopping", "connected") for peer in peers),
        "trouble": sum(peer.state in DOWN for peer in peers),
        "payload": sum(payload) if payload else None,
        "rate": sum(rates) if rates else None,
        "link_rate": max(link_rates, default=None),
        "budget": min(budgets, default=None),
        "left_s": left_s,
        "ended": snapshot.ended,
        "note": snapshot.note,
    }


_SHORT = ("loss", "figure", "rate", "wait_share")
"""Figures of a peer of which the page gets the visible digits."""


def _peer(peer: PeerView) -> list[Any]:
    """Return the values of a peer in the order of its fields, in which `watch.js` reads them."""
    return [_short(value) if name in _SHORT else value for name, value in vars(peer).items()]


def _edge(edge: EdgeView) -> list[Any]:
    if edge.rates == (None, None) and not edge.problem and edge.state != "down":
        # A planned edge of thousands: no more than this is known of it.
        return [edge.a, edge.b, edge.sends[0] + 2 * edge.sends[1], edge.state]
    return [
        edge.a,
        edge.b,
        edge.sends[0] + 2 * edge.sends[1],
        edge.state,
        edge.problem,
        [_short(rate) for rate in edge.rates],
        [_short(seconds) for seconds in edge.lateness_s],
        list(edge.backlog_bytes),
        list(edge.left_out),
        edge.relayed,
    ]


def _short(value: float | None) -> float | None:
    """Return a figure with its visible digits."""
    return None if value is None else float(f"{value:.4g}")


def _json(value: Any) -> str:
    """Return JSON as browsers read it, which know no NaN."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"))


def _draw(snapshot: Snapshot, figures: Figures, figure: History | None, average: History | None) -> dict[str, str]:
    """Return the charts of the figure and of the loss, as HTML."""
    criterion, names = snapshot.criterion, {peer.index: peer.name for peer in snapshot.peers}
    worst = None if snapshot.worst is None else snapshot.worst.index
    # A figure is that after a number of rounds; a loss is that of a round, counted from 0.
    lines = [] if figure is None else _lines(figure, names, worst, criterion, offset=0)
    if average is not None:
        lines.append(Line(label="averaged model", points=average.curve(0), style="mean"))
    rounds = Axis(label="round", unit="count", low=0.0)
    heading = criterion.name[:1].upper() + criterion.name[1:]
    loss = _lines(figures.loss, names, worst, Criterion("loss", "lower"), offset=1)
    charts = {
        "figure": line_chart(heading, lines, rounds, figure_axis(criterion)),
        "loss": line_chart("Training loss", loss, rounds, Axis(label="loss")),
    }
    empty = {"figure": f"No {criterion.name} was measured yet.", "loss": "No round was completed yet."}
    return {name: lay_out(Missing(empty[name]) if chart.plot is None else chart) for name, chart in charts.items()}


def _lines(
    history: History, names: Mapping[int, str], worst: int | None, criterion: Criterion, *, offset: int
) -> list[Line]:
    """Return the curves of some peers, or the spread of many, and the worst peer's over them."""
    lines = []
    if history.num_peers > MOST_CURVES:
        lines += _spread(history, criterion, offset)
    else:
        for peer in range(history.num_peers):
            if peer != worst:
                points = _shifted(history.curve(peer), offset)
                lines.append(Line(label=names.get(peer, f"peer {peer}"), points=points, style="peer", legend="peers"))
    if worst is not None:
        label = f"{names.get(worst, f'peer {worst}')}, the worst peer now"
        lines.append(Line(label=label, points=_shifted(history.curve(worst), offset), style="worst"))
    return lines


def _spread(history: History, criterion: Criterion, offset: int) -> list[Line]:
    """Return the median of all peers with the middle half around it, and the worst of each group of rounds."""
    rounds, means = history.means()
    known = [(end + offset, row[np.isfinite(row)]) for end, row in zip(rounds, means, strict=True)]
    quartiles = [(end, *np.percentile(row, (25, 50, 75)).tolist()) for end, row in known]
    extremes = [(end, float(row.min() if criterion.better == "higher" else row.max())) for end, row in known]
    return [
        Line(
            label="median",
            points=[(end, middle) for end, _, middle, _ in quartiles],
            style="mean",
            legend="median and middle half of the peers",
            band=[(end, low, high) for end, low, _, high in quartiles],
        ),
        Line(label="worst of all peers then", points=extremes, style="bound"),
    ]


def _shifted(points: Points, offset: int) -> Sequence[tuple[float, float]]:
    return [(x + offset, y) for x, y in points] if offset else points
