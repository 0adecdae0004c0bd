"""Charts: what is drawn, where, and that nothing breaks the page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from peer.report.line_chart import BOX, Axis, Chart, Line, line_chart, smooth, thin_out, ticks
from peer.report.page import lay_out

X = Axis(label="round", unit="count")
Y = Axis(label="loss")
LOG = Axis(label="loss", log=True)


def line(*points: tuple[float, float], label: str = "a", style: str = "mean") -> Line:
    return Line(label=label, points=points, style=style)


def drawing(*lines: Line, x: Axis = X, y: Axis = Y, title: str = "t") -> str:
    return lay_out(line_chart(title, lines, x, y))


def parsed(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart)


def drawn(chart: str) -> list[list[tuple[float, float]]]:
    """Return the points of every curve in the drawing."""
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in path.split())]
        for path in re.findall(r'points="([^"]*)"', chart)
    ]


def test_a_chart_is_well_formed_and_labelled() -> None:
    chart = parsed(drawing(line((0, 1), (1, 2)), title="Loss"))
    svg = chart.find("svg")
    assert svg is not None
    assert svg.get("aria-label") == "Loss: loss against round"
    assert [element.text for element in chart.iter("li")] == [None]
    assert "a" in "".join(chart.itertext())


def test_larger_values_are_higher_and_later_ones_further_right() -> None:
    ((start, middle, end),) = drawn(drawing(line((0, 1), (5, 2), (10, 3))))
    assert start[0] < middle[0] < end[0]
    assert start[1] > middle[1] > end[1]
    assert all(0 <= x <= BOX.width and 0 <= y <= BOX.height for x, y in (start, middle, end))


def test_a_logarithmic_axis_spaces_decades_evenly() -> None:
    ((a, b, c),) = drawn(drawing(line((0, 1), (1, 10), (2, 100)), y=LOG))
    assert a[1] - b[1] == pytest.approx(b[1] - c[1], abs=0.2)


def test_values_that_cannot_be_drawn_are_left_out() -> None:
    points = ((0, 1.0), (1, float("nan")), (2, float("inf")), (3, 0.0), (4, -1.0), (5, 2.0))
    assert [len(path) for path in drawn(drawing(line(*points)))] == [4]
    assert [len(path) for path in drawn(drawing(line(*points), y=LOG))] == [2]


def test_a_single_point_is_a_dot() -> None:
    chart = drawing(line((3, 4)))
    assert "<circle" in chart
    assert not drawn(chart)


@pytest.mark.parametrize("lines", [[], [line()], [line((0, float("nan")))]])
def test_nothing_to_draw_is_no_chart(lines: list[Line]) -> None:
    assert line_chart("Loss", lines, X, Y) == Chart("Loss", None)


def test_names_are_escaped() -> None:
    chart = drawing(line((0, 1), (1, 1), label='"><script>alert(1)</script>'), title="<b>&")
    assert "<script" not in chart
    parsed(chart)


@pytest.mark.parametrize(
    ("low", "high", "log", "whole", "expected"),
    [
        (0, 10, False, False, [0, 2, 4, 6, 8, 10]),
        (0, 1000, False, True, [0, 200, 400, 600, 800, 1000]),
        (0, 2, False, True, [0, 1, 2]),
        (0.7, 1.0, False, False, [0.7, 0.8, 0.9, 1.0]),
        (-1, 1, False, False, [-1, -0.5, 0, 0.5, 1]),
        (0.01, 100, True, False, [0.01, 0.1, 1, 10, 100]),
        (0.1, 1, True, False, [0.1, 0.2, 0.5, 1]),
        (1e-12, 1, True, False, [1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, log: bool, whole: bool, expected: list[float]) -> None:
    assert ticks(low, high, log=log, whole=whole) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-9])
def test_a_constant_curve_can_be_drawn(value: float) -> None:
    ((first, last),) = drawn(drawing(line((0, value), (1, value))))
    assert first[1] == last[1]
    assert 0 < first[1] < BOX.height


def test_thinning_keeps_both_ends() -> None:
    points = [(float(i), float(i * i)) for i in range(1000)]
    thin = thin_out(points, 50)
    assert len(thin) == 50
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert thin_out(points[:3], 50) == points[:3]


def test_smoothing_keeps_the_mean() -> None:
    points = [(float(i), float(i % 2)) for i in range(1000)]
    assert all(value == pytest.approx(0.5) for _, value in smooth(points, 100))
    assert len(smooth(points, 100)) == 100
    assert smooth(points, 100)[-1][0] == 999


def test_one_name_in_the_legend_stands_for_many_lines() -> None:
    lines = [
        Line(label=f"peer-{i}", points=((0, i), (1, i)), style="peer", legend="" if i else "each") for i in range(3)
    ]
    chart = parsed(drawing(*lines))
    assert ["".join(item.itertext()) for item in chart.iter("li")] == ["each"]
    assert [title.text for title in chart.iter("title")] == ["peer-0", "peer-1", "peer-2"]


def test_a_range_is_shaded_around_its_curve_and_fits_in() -> None:
    band = Line(label="a", points=((0, 2), (1, 2)), band=((0, 1, 3), (1, 0, 9), (2, float("nan"), 1)), style="mean")
    chart = drawing(band)
    assert 'class="band mean"' in chart
    corners = drawn(chart)[0]
    assert len(corners) == 4
    assert all(0 <= y <= BOX.height for _, y in corners)


def test_the_script_can_turn_coordinates_into_values() -> None:
    chart = parsed(drawing(line((0, 1), (5, 10), (10, 100)), y=LOG))
    svg = chart.find("svg")
    assert svg is not None
    unit, kind, low, high, start, end, label = str(svg.get("data-y")).split(" ")
    assert (unit, kind, label) == ("number", "log", "loss")
    ((_, (_, y), _),) = drawn(drawing(line((0, 1), (5, 10), (10, 100)), y=LOG))
    place = (y - float(start)) / (float(end) - float(start))
    assert float(low) * (float(high) / float(low)) ** place == pytest.approx(10, rel=1e-3)
