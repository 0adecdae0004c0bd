"""A graph schedule for people: as text, and as the places of all parts of a drawing, which `graph_view.svg` writes
down.

Peers sit on a circle, arrows run from sender to receiver; an edge in both directions is one line without arrowheads. A
schedule whose graphs take turns is drawn as panels side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peer.gossip.mixing_matrix import MixingMatrix
from peer.gossip.topology import Schedule
from peer.report.page import fill

MAX_LISTED_PEERS = 64
"""Most peers whose receivers `text` lists."""

MAX_LABELLED_EDGES = 48
"""Up to this many edges in a drawing, each shows its weight; with one weight for all, the caption says it instead."""

MAX_PANELS = 12
"""Most graphs of a schedule that are drawn."""

MAX_DRAWN_EDGES = 4096
"""A drawing with more edges than this shows nothing; it keeps the peers and says so."""


def text(schedule: Schedule, *, names: Sequence[str] | None = None) -> str:
    """Return the properties of a schedule, and to whom each peer sends, with what weights."""
    lines = [title(schedule), ""]
    if not schedule.is_time_varying and schedule.diameter is not None and schedule.diameter_is_exact:
        numbers = sorted(len(schedule.receivers(0, peer)) for peer in range(schedule.num_peers))
        others = f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
        rounds = f"{schedule.diameter} round{'s' if schedule.diameter != 1 else ''}"
        lines += [
            f"In each round, every peer sends to {others} of the others; what one of them",
            f"learns reaches all in {rounds}.",
            "`--svg FILE` draws the graph.",
            "",
        ]
    facts = properties(schedule)
    width = max(len(label) for label, _ in facts)
    lines += [f"  {label:<{width}}  {value}" for label, value in facts]
    for number, matrix in enumerate(schedule.matrices[:MAX_PANELS]):
        lines.append("")
        if schedule.is_time_varying:
            lines.append(f"{_turn(schedule, number)}, then every {schedule.cycle_rounds} rounds")
        lines += _receiver_lines(matrix, names)
    if len(schedule.matrices) > MAX_PANELS:
        lines += ["", f"… and {len(schedule.matrices) - MAX_PANELS} more graphs"]
    return "\n".join(lines)


def svg(schedule: Schedule, *, names: Sequence[str] | None = None) -> str:
    """Return the drawing as one SVG document."""
    shown = schedule.matrices[:MAX_PANELS]
    panels = [_panel(schedule, number, matrix, names) for number, matrix in enumerate(shown)]
    columns, side = min(len(panels), 4), round(panels[0].side)
    rows = -(-len(panels) // columns)
    top, bottom, below = 58, 34, 26
    places = [(number % columns * side, top + number // columns * (side + below)) for number in range(len(panels))]
    return fill(
        "report/graph_view.svg",
        title=title(schedule),
        caption=_caption(schedule),
        width=columns * side,
        height=top + rows * (side + below) + bottom,
        panels=[*zip(places, panels, strict=True)],
        more=len(schedule.matrices) - len(panels),
    )


def title(schedule: Schedule) -> str:
    """Return the heading: the graph and its number of peers."""
    peers = "1 peer" if schedule.num_peers == 1 else f"{schedule.num_peers:,} peers"
    return f"{schedule.name}, {peers}"


def properties(schedule: Schedule) -> list[tuple[str, str]]:
    """Return (label, value) of each property that theory or a budget needs."""
    how = schedule.contraction.method.value
    if (residual := schedule.contraction.residual) is not None:
        how = f"{how}, at most; residual {residual:.1g}"
    facts = [
        ("strongly connected", _connection(schedule)),
        ("column stochastic", "yes"),  # A schedule refuses every other matrix.
        ("doubly stochastic", _yes(schedule.is_doubly_stochastic)),
        ("symmetric", _yes(schedule.is_symmetric)),
        ("spectral gap", f"{_number(schedule.spectral_gap)} ({how})"),
    ]
    if schedule.is_symmetric:
        facts.append(("smallest eigenvalue", _number(schedule.smallest_slack_eigenvalue())))
    facts += [
        ("diameter", _diameter(schedule)),
        ("messages a round", _number(schedule.messages_per_round)),
    ]
    if schedule.is_time_varying:
        rounds = "every round" if schedule.period_rounds == 1 else f"every {schedule.period_rounds} rounds"
        facts += [
            ("messages with replicas", str(schedule.replica_messages_per_round)),
            ("changes", f"{rounds}, {len(schedule.matrices)} graphs in turn"),
        ]
    facts.append(("digest", schedule.digest[:16]))
    return facts


def _caption(schedule: Schedule) -> str:
    kind = "doubly stochastic" if schedule.is_doubly_stochastic else "column stochastic"
    weights = sorted({float(weight) for matrix in schedule.matrices for weight in matrix.column_weights.tolist()})
    every = f", all weights {_weight(weights[0])}" if weights[-1] - weights[0] < 1e-9 else ""
    return f"{kind}{every}, spectral gap {_number(schedule.spectral_gap)}"


def _connection(schedule: Schedule) -> str:
    if schedule.is_strongly_connected and not all(matrix.is_strongly_connected for matrix in schedule.matrices):
        return "yes, over the whole cycle (not in every round)"
    return _yes(schedule.is_strongly_connected)


def _diameter(schedule: Schedule) -> str:
    if schedule.diameter is None:
        return "none"
    return str(schedule.diameter) if schedule.diameter_is_exact else f"at most {schedule.diameter}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) > 1e-12 else "0"


def _weight(value: float) -> str:
    """Return a weight as a fraction where it is one with a small denominator, else as a short decimal."""
    for denominator in range(1, 17):
        numerator = round(value * denominator)
        if abs(value * denominator - numerator) < 1e-9:
            return f"{numerator}/{denominator}" if denominator > 1 else str(numerator)
    return f"{value:.3f}".lstrip("0")


def _turn(schedule: Schedule, number: int) -> str:
    """Return the first rounds of a graph of a schedule."""
    first = number * schedule.period_rounds
    last = first + schedule.period_rounds - 1
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def _receiver_lines(matrix: MixingMatrix, names: Sequence[str] | None) -> list[str]:
    lines = []
    for peer in range(min(matrix.num_peers, MAX_LISTED_PEERS)):
        label = f"{peer} {names[peer]}" if names else str(peer)
        receivers = matrix.receivers(peer)
        weights = [_weight(matrix.weight(receiver, peer)) for receiver in receivers[:10]]
        alike = len(set(weights)) == 1
        shown = [f"{r}" if alike else f"{r} ({w})" for r, w in zip(receivers, weights, strict=False)]
        more = f", … {len(receivers)} in all" if len(receivers) > len(weights) else ""
        lines.append(f"  {label} → {', '.join(shown) or 'nobody'}{more}" + (f" ({weights[0]} each)" if alike else ""))
    if matrix.num_peers > MAX_LISTED_PEERS:
        lines.append(f"  … and {matrix.num_peers - MAX_LISTED_PEERS:,} more peers")
    return lines


_Point = tuple[float, float]


@dataclass(frozen=True)
class _Edge:
    """A quadratic curve, and the arrowhead at its end."""

    curve: tuple[float, ...]
    """x and y of start, bend and end."""
    head: tuple[float, ...]
    """x and y of three corners; empty for an edge in both directions."""
    width: float
    label: str
    label_at: _Point


@dataclass(frozen=True)
class _Peer:
    at: _Point
    label: str
    name: str
    name_at: _Point


@dataclass(frozen=True)
class _Panel:
    """One graph, laid out in a square of `side` points, y downwards."""

    side: float
    radius: float
    peers: list[_Peer]
    edges: list[_Edge]
    caption: str


def _panel(schedule: Schedule, number: int, matrix: MixingMatrix, names: Sequence[str] | None) -> _Panel:
    n = matrix.num_peers
    side = 340.0 if n <= 8 else 440.0 if n <= 24 else 640.0
    if schedule.is_time_varying:
        side = min(side, 340.0)
    orbit = side / 2 - (52.0 if names else 34.0)
    # Two neighbours on the circle are 2 orbit sin(π/n) apart; the circles fill at most half of that.
    radius = min(15.0, max(2.0, orbit * math.sin(math.pi / max(n, 2)) * 0.5))
    hub = _hub(matrix)
    around = [peer for peer in range(n) if peer != hub]
    angles = [0.0] * n
    centres = [(side / 2, side / 2)] * n
    for place, peer in enumerate(around):
        angles[peer] = 2 * math.pi * place / len(around) - math.pi / 2
        centres[peer] = (side / 2 + orbit * math.cos(angles[peer]), side / 2 + orbit * math.sin(angles[peer]))
    peers = []
    for peer, (at, angle) in enumerate(zip(centres, angles, strict=True)):
        name_at = at[0] + (radius + 14) * math.cos(angle), at[1] + (radius + 12) * math.sin(angle) + 4
        peers.append(_Peer(at, str(peer), names[peer] if names and n <= 24 else "", name_at))
    caption = _turn(schedule, number) if schedule.is_time_varying else ""
    if matrix.num_edges > MAX_DRAWN_EDGES:
        return _Panel(side, radius, peers, [], f"{matrix.num_edges:,} edges, too many to draw. {caption}".strip())

    weights = [
        (sender, int(receiver), float(weight))
        for sender in range(n)
        for receiver, weight in zip(*matrix.column(sender), strict=True)
        if receiver != sender
    ]
    by_ends = {(sender, receiver): weight for sender, receiver, weight in weights}
    one_weight = len({round(weight, 9) for _, _, weight in weights}) == 1
    labelled = len(weights) <= MAX_LABELLED_EDGES and (not one_weight or _keeps_differ(matrix, weights))
    edges = []
    for (sender, receiver), weight in by_ends.items():
        back = by_ends.get((receiver, sender))
        both = back is not None and abs(back - weight) < 1e-12
        if both and sender > receiver:
            continue
        label = _weight(weight) if labelled else ""
        edges.append(_edge(centres[sender], centres[receiver], radius, n, back is not None, both, weight, label))
    return _Panel(side, radius, peers, edges, caption)


def _hub(matrix: MixingMatrix) -> int | None:
    """Return the peer that belongs in the middle: the hub of a star, or the only one."""
    n = matrix.num_peers
    if matrix.num_edges != 2 * (n - 1):
        return None
    return next((peer for peer in range(n) if len(matrix.receivers(peer)) == len(matrix.senders(peer)) == n - 1), None)


def _keeps_differ(matrix: MixingMatrix, weights: list[tuple[int, int, float]]) -> bool:
    """Whether the weight of the edges is not the one that everybody keeps (then the caption does not say it)."""
    return any(abs(kept - weights[0][2]) > 1e-9 for kept in matrix.diagonal().tolist())


def _edge(
    start: _Point, end: _Point, radius: float, n: int, has_back: bool, both: bool, weight: float, label: str
) -> _Edge:
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy)
    ux, uy = dx / length, dy / length
    # Two different weights need two curves; a single edge stays straight.
    bow = 0.18 * length if has_back and not both else 0.0
    middle = ((start[0] + end[0]) / 2 - uy * bow, (start[1] + end[1]) / 2 + ux * bow)
    leave, arrive = _toward(start, middle, radius), _toward(end, middle, radius + 1)
    stroke = 0.6 + 1.2 * weight if n <= 32 else 0.5
    head: tuple[float, ...] = ()
    if not both:
        size = min(8.0, max(3.0, 0.7 * radius))
        tip = arrive
        arrive = _toward(tip, middle, 0.8 * size)
        hx, hy = tip[0] - arrive[0], tip[1] - arrive[1]
        norm = math.hypot(hx, hy) or 1.0
        hx, hy = hx / norm, hy / norm
        base = (tip[0] - hx * size, tip[1] - hy * size)
        wing_x, wing_y = -hy * size * 0.42, hx * size * 0.42
        head = (*tip, base[0] + wing_x, base[1] + wing_y, base[0] - wing_x, base[1] - wing_y)
    # Straight edges are labelled off their middle, where those of a dense graph cross.
    s = 0.42 if bow == 0.0 and not both else 0.5
    label_at = (
        (1 - s) ** 2 * leave[0] + 2 * s * (1 - s) * middle[0] + s**2 * arrive[0],
        (1 - s) ** 2 * leave[1] + 2 * s * (1 - s) * middle[1] + s**2 * arrive[1],
    )
    return _Edge((*leave, *middle, *arrive), head, stroke, label, label_at)


def _toward(point: _Point, target: _Point, distance: float) -> _Point:
    dx, dy = target[0] - point[0], target[1] - point[1]
    length = math.hypot(dx, dy) or 1.0
    return point[0] + dx / length * distance, point[1] + dy / length * distance
