"""Line charts for a terminal: braille dots, so that a cell holds two by four points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rich.text import Text

from peer.report.line_chart import Axis, Line, drawable

COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_black", "white")
"""Colours of the first curve, the second, and so on."""
MARKS = "abcdefghijklmnopqrstuvwxyz"
"""The letter that stands in each of them, for those who see no colour."""

_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Row and column in a cell → bit of the braille character."""


def terminal_chart(title: str, lines: Sequence[Line], x: Axis, y: Axis, *, width: int, height: int = 12) -> Text:
    """Return a chart of `width` columns and `height` rows and its axis; empty if there is nothing to draw."""
    lines = [drawable(line, x, y) for line in lines]
    points = [point for line in lines for point in line.points]
    if not points:
        return Text()
    low, high = _limits([_place(b, y) for _, b in points])
    first, last = _limits([_place(a, x) for a, _ in points] + ([] if x.log else [0.0]))
    labels = [y.write(_value(edge, y)) for edge in (high, low)]
    margin = max(map(len, labels)) + 1
    columns = max(8, width - margin - 1)
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    marks: dict[tuple[int, int], str] = {}
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        places = [
            (
                round((_place(a, x) - first) / (last - first) * (2 * columns - 1)),
                round((high - _place(b, y)) / (high - low) * (4 * height - 1)),
            )
            for a, b in line.points
        ]
        dots = _joined(places)
        for column, row in dots:
            at = (row // 4, column // 2)
            bits, _ = cells.get(at, (0, colour))
            cells[at] = (bits | _DOTS[row % 4][column % 2], colour)
        # Each letter at another part of its curve: at their ends many meet.
        if len(lines) > 1 and dots:
            column, row = dots[len(dots) * (number + 1) // (len(lines) + 1)]
            marks[row // 4, column // 2] = MARKS[number % len(MARKS)]
    text = Text(f"{title}\n", style="bold", no_wrap=True)
    for row in range(height):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 else ""
        text.append(f"{label:>{margin - 1}} ┤" if label else " " * margin + "│", style="not bold dim")
        for column in range(columns):
            bits, colour = cells.get((row, column), (0, ""))
            text.append(marks.get((row, column)) or (chr(_BLANK + bits) if bits else " "), style=f"not bold {colour}")
        text.append("\n")
    end = x.write(_value(last, x))
    text.append(" " * margin + "└" + "─" * columns + "\n", style="not bold dim")
    name = f"{x.write(_value(first, x))} {x.label}"
    text.append(" " * (margin + 1) + name + end.rjust(columns - len(name)), style="not bold dim")
    return text


def _joined(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the dots of straight lines between consecutive places."""
    dots = list(places[:1])
    for (a, b), (c, d) in itertools.pairwise(places):
        steps = max(abs(c - a), abs(d - b), 1)
        dots += [(a + round((c - a) * step / steps), b + round((d - b) * step / steps)) for step in range(1, steps + 1)]
    return dots


def _place(value: float, axis: Axis) -> float:
    return math.log10(value) if axis.log else value


def _value(place: float, axis: Axis) -> float:
    value = 10.0**place if axis.log else place
    return float(f"{value:.3g}")


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high - low > 1e-12 else (low - 0.5, high + 0.5)
