"""Line charts: the places of all parts of a drawing, which `blocks.html` writes down as inline SVG.

A chart is for reading values off: few grid lines, labelled axes, a legend. Its colours are those of the style sheet,
which follow light and dark. `charts.js` shows the values under the pointer, a finger or the arrow keys. It finds the
limits of the axes in `data-x` and `data-y`, the names of the lines in their titles, and computes the values from the
coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from peer.report.blocks import Block
from peer.report.numbers import short, short_duration, short_size

_TICKS = 5

Points = Sequence[tuple[float, float]]
Unit: TypeAlias = Literal["number", "count", "percent", "bytes", "seconds"]

_WRITE: Mapping[Unit, Callable[[float], str]] = {
    "number": short,
    "count": "{:,.0f}".format,
    "percent": lambda value: f"{100 * value:.0f} %",
    "bytes": short_size,
    "seconds": short_duration,
}
"""Unit of an axis → writer of its ticks. `charts.js` writes values in the same units."""


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
    """One axis. Without limits it spans the drawn lines."""

    label: str
    unit: Unit = "number"
    log: bool = False
    low: float | None = None
    high: float | None = None

    def write(self, value: float) -> str:
        """Return a value as written at its tick."""
        return _WRITE[self.unit](value)


@dataclass(frozen=True)
class Box:
    """The edges of the plot in a drawing, in its points from the upper left corner."""

    width: int = 440
    """Width of the whole drawing; the height likewise."""
    height: int = 250
    left: int = 52
    right: int = 418
    top: int = 8
    bottom: int = 208


BOX = Box()


@dataclass(frozen=True)
class DrawnAxis:
    """An axis in the drawing."""

    name: str
    limits: str
    """Limits with which the script turns a coordinate into a value."""
    ticks: Sequence[tuple[str, str]]
    """(place, label)."""


@dataclass(frozen=True)
class Curve:
    """A drawn line."""

    label: str
    style: str
    points: str
    """Points in the form of SVG: x,y x,y."""
    dot: tuple[str, str] | None
    """The place of the only point, which is no line."""


@dataclass(frozen=True)
class Plot:
    """A drawing: coordinates and words."""

    label: str
    legend: Mapping[str, str]
    """Name → style."""
    x: DrawnAxis
    y: DrawnAxis
    bands: Sequence[tuple[str, str]]
    """(style, corners) of the shaded areas."""
    curves: Sequence[Curve]
    box: Box = BOX


@dataclass(frozen=True)
class Chart(Block):
    """A finished chart."""

    title: str
    plot: Plot | None
    """None where there was nothing to draw."""
    note: str = ""
    """A sentence in place of the drawing, where one says it all."""


def line_chart(title: str, lines: Sequence[Line], x: Axis, y: Axis) -> Chart:
    """Return the chart of some lines.

    Points that are not finite, or not positive on a logarithmic axis, are left out.
    """
    lines = [line for line in (drawable(line, x, y) for line in lines) if line.points]
    if not lines:
        return Chart(title, None)
    heights = [p[1] for line in lines for p in line.points] + [h for line in lines for p in line.band for h in p[1:]]
    to_x = _scale(x, [p[0] for line in lines for p in line.points], BOX.left, BOX.right)
    to_y = _scale(y, heights, BOX.bottom, BOX.top)
    named = ((line.label if line.legend is None else line.legend, line.style) for line in lines)
    return Chart(
        title,
        Plot(
            f"{title}: {y.label} against {x.label}",
            {name: style for name, style in named if name},
            _drawn(x, to_x),
            _drawn(y, to_y),
            [(line.style, _coordinates(_corners(line), to_x, to_y)) for line in lines if line.band],
            [_curve(line, to_x, to_y) for line in lines],
        ),
    )


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
    """Turns the values of an axis into places in the drawing."""

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


def drawable(line: Line, x: Axis, y: Axis) -> Line:
    """Return a line without the points that are not finite, or not positive on a logarithmic axis."""

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


def _drawn(axis: Axis, to_place: _Scale) -> DrawnAxis:
    kind = "log" if to_place.log else "linear"
    limits = f"{axis.unit} {kind} {to_place.low!r} {to_place.high!r} {to_place.start} {to_place.end} {axis.label}"
    values = ticks(to_place.low, to_place.high, log=axis.log, whole=axis.unit == "count")
    return DrawnAxis(axis.label, limits, [(f"{to_place(value):.1f}", axis.write(value)) for value in values])


def _corners(line: Line) -> Points:
    return [(x, high) for x, _, high in line.band] + [(x, low) for x, low, _ in reversed(line.band)]


def _curve(line: Line, to_x: _Scale, to_y: _Scale) -> Curve:
    points = _coordinates(line.points, to_x, to_y)
    across, _, down = points.partition(",")
    return Curve(line.label, line.style, points, (across, down) if len(line.points) == 1 else None)


def _coordinates(points: Points, to_x: _Scale, to_y: _Scale) -> str:
    # A hundredth of a point is 0.005 % of an axis: the values that the script computes have three exact digits.
    return " ".join(f"{to_x(a):.2f},{to_y(b):.2f}" for a, b in points)


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
