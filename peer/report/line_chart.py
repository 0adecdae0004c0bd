"""Line charts as inline SVG: no image, colours from the style sheet, so that they follow light and dark.

A chart is for reading values off: few grid lines, labelled axes, a legend. `charts.js` shows the values under the
pointer, a finger or the arrow keys. It finds the limits of the axes in `data-x` and `data-y`, the names of the lines in
their titles, and computes the values from the coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal, TypeAlias

from peer.report.numbers import short, short_duration, short_size, whole

WIDTH, HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 22, 8, 42
_TICKS = 5

Points = Sequence[tuple[float, float]]
Unit: TypeAlias = Literal["number", "count", "percent", "bytes", "seconds"]

_WRITE: Mapping[Unit, Callable[[float], str]] = {
    "number": short,
    "count": whole,
    "percent": lambda value: f"{100 * value:.0f} %",
    "bytes": short_size,
    "seconds": short_duration,
}
"""How the ticks of an axis are written. `charts.js` writes values in the same units."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve."""

    label: str
    points: Points
    style: str
    """Class of the style sheet: peer, worst, mean, baseline, bound, run-0 to run-7."""
    legend: str | None = None
    """Its name in the legend, where that stands for several lines; "" for a line that another one stands for."""
    band: Sequence[tuple[float, float, float]] = ()
    """(x, lowest, highest) of the area that is shaded around the curve."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis. Without limits it spans what is drawn."""

    label: str
    unit: Unit = "number"
    log: bool = False
    low: float | None = None
    high: float | None = None

    def write(self, value: float) -> str:
        """Return a value as its tick says it."""
        return _WRITE[self.unit](value)

    @property
    def whole(self) -> bool:
        """Whether there are only whole numbers."""
        return self.unit == "count"


@dataclass(frozen=True)
class Chart:
    """A finished chart."""

    title: str
    drawing: str
    """A <figure>; empty where there was nothing to draw."""
    note: str = ""
    """A sentence in place of the drawing, where one says it all."""


def line_chart(title: str, lines: Sequence[Line], x: Axis, y: Axis) -> Chart:
    """Return the chart of some lines.

    Points that are not finite, or not positive on a logarithmic axis, are left out.
    """
    lines = [line for line in (_drawable(line, x, y) for line in lines) if line.points]
    if not lines:
        return Chart(title, "")
    to_x = _scale(x, [p[0] for line in lines for p in line.points], _LEFT, WIDTH - _RIGHT)
    heights = [p[1] for line in lines for p in line.points] + [h for line in lines for p in line.band for h in p[1:]]
    to_y = _scale(y, heights, HEIGHT - _BOTTOM, _TOP)
    label = escape(f"{title}: {y.label} against {x.label}", quote=True)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" tabindex="0"'
        f' data-x="{_limits(x, to_x)}" data-y="{_limits(y, to_y)}">'
    ]
    parts.extend(_grid(x, y, to_x, to_y))
    plot = f'x="{_LEFT}" y="{_TOP - 4}" width="{WIDTH - _LEFT - _RIGHT + 4}" height="{HEIGHT - _TOP - _BOTTOM + 8}"'
    # A nested viewport clips curves that leave the limits, without an id that must be unique on the page.
    parts.append(
        f'<svg {plot} viewBox="{_LEFT} {_TOP - 4} {WIDTH - _LEFT - _RIGHT + 4} {HEIGHT - _TOP - _BOTTOM + 8}">'
    )
    parts.extend(_band(line, to_x, to_y) for line in lines if line.band)
    parts.extend(_path(line, to_x, to_y) for line in lines)
    parts.append("</svg></svg>")
    heading = f"<figcaption>{escape(title)}</figcaption>"
    return Chart(title, f'<figure class="chart">{heading}{_legend(lines)}{"".join(parts)}</figure>')


def thin_out(points: Points, most: int) -> list[tuple[float, float]]:
    """Return at most about `most` of the points, evenly chosen, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(index * step)] for index in range(most)]


def smooth(points: Points, buckets: int) -> list[tuple[float, float]]:
    """Return the means of consecutive points in at most `buckets` groups."""
    size = max(1, math.ceil(len(points) / buckets))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    log: bool
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the position of a value in the drawing."""
        if self.log:
            place = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            place = (value - self.low) / (self.high - self.low)
        return self.start + place * (self.end - self.start)


def _drawable(line: Line, x: Axis, y: Axis) -> Line:
    def fits(a: float, *heights: float) -> bool:
        return all(math.isfinite(v) and (v > 0 or not axis.log) for axis, v in ((x, a), *((y, b) for b in heights)))

    return replace(line, points=[p for p in line.points if fits(*p)], band=[p for p in line.band if fits(*p)])


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if axis.log:
        if high / low < 1.5:
            low, high = low / 1.5, high * 1.5
    elif high - low <= 1e-9 * max(abs(high), abs(low)):
        margin = abs(high) / 2 or 1.0
        low, high = low - margin, high + margin
    elif axis.low is None and axis.high is None:
        margin = 0.04 * (high - low)
        # A margin never makes a quantity that cannot be negative look as if it could.
        low, high = (low if low >= 0 and low < margin else low - margin), high + margin
    return _Scale(low, high, axis.log, start, end)


def _grid(x: Axis, y: Axis, to_x: _Scale, to_y: _Scale) -> list[str]:
    parts = []
    for value in ticks(to_y.low, to_y.high, log=y.log, whole=y.whole):
        at = f"{to_y(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 7}" y="{at}" dy="0.32em" text-anchor="end">{escape(y.write(value))}</text>'
        )
    base = HEIGHT - _BOTTOM
    for value in ticks(to_x.low, to_x.high, log=x.log, whole=x.whole):
        at = f"{to_x(value):.1f}"
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{base}" y2="{base + 4}"/>')
        parts.append(
            f'<text class="tick" x="{at}" y="{base + 17}" text-anchor="middle">{escape(x.write(value))}</text>'
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="axis-label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>'
    )
    return parts


def _limits(axis: Axis, scale: _Scale) -> str:
    """Return what the script needs to turn a coordinate into a value."""
    kind = "log" if scale.log else "linear"
    return f"{axis.unit} {kind} {scale.low!r} {scale.high!r} {scale.start} {scale.end} {escape(axis.label, quote=True)}"


def _band(line: Line, to_x: _Scale, to_y: _Scale) -> str:
    corners = [(x, high) for x, _, high in line.band] + [(x, low) for x, low, _ in reversed(line.band)]
    return f'<polygon class="band {line.style}" points="{_coordinates(corners, to_x, to_y)}"/>'


def _coordinates(points: Points, to_x: _Scale, to_y: _Scale) -> str:
    # A hundredth of a point is 0.005 % of an axis: the values that the script computes have three exact digits.
    return " ".join(f"{to_x(a):.2f},{to_y(b):.2f}" for a, b in points)


def _path(line: Line, to_x: _Scale, to_y: _Scale) -> str:
    name = f"<title>{escape(line.label)}</title>"
    if len(line.points) == 1:
        a, b = line.points[0]
        return f'<circle class="dot {line.style}" cx="{to_x(a):.2f}" cy="{to_y(b):.2f}" r="3.5">{name}</circle>'
    points = _coordinates(line.points, to_x, to_y)
    return f'<polyline class="line {line.style}" points="{points}">{name}</polyline>'


def _legend(lines: Sequence[Line]) -> str:
    named = ((line.label if line.legend is None else line.legend, line.style) for line in lines)
    shown = {name: style for name, style in named if name}
    items = [f'<li><i class="{style}"></i>{escape(label)}</li>' for label, style in shown.items()]
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


def ticks(low: float, high: float, *, log: bool = False, whole: bool = False) -> list[float]:
    """Return round numbers between `low` and `high`, about five of them."""
    if log and high / low >= 10:
        return _log_ticks(low, high)
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # Multiplied rather than added up, so that 0.30000000000000004 never is a label; + 0.0 turns −0.0 into 0.0.
    return [round(index * step, 12) + 0.0 for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = last - first
    stride = max(1, math.ceil(decades / 6))
    factors = (1, 2, 5) if decades <= 2 else (1, 3) if decades <= 3 else (1,)
    values = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]
