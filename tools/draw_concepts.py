"""Draws the pictures of docs/concepts; with --check, only verifies that they are up to date.

Where a picture shows numbers, they are computed here by the equations that the page states.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images" / "concepts"
BLUE, ORANGE, GREEN, GREY, INK = "#2563a8", "#c2571a", "#3f7d44", "#b9bec6", "#24292f"
COLORS = (BLUE, ORANGE, GREEN)
DARK = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.93) hue-rotate(180deg) } }</style>"


class Picture:
    """An SVG of a given size in pixels, on white; on a dark page its lightness is turned round, and its hues stay."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title = (width, height), title
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, *, size: int = 13, anchor: str = "middle", color: str = INK) -> None:
        """Write a line around, from or to a point."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{words}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, *, fill: str = "#eef2f7", line: str = INK) -> None:
        """Draw a box with round corners."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" stroke="{line}"/>'
        )

    def bar(self, x: float, bottom: float, height: float, color: str) -> None:
        """Draw a bar of 22 pixels around x that stands on `bottom`."""
        self._parts.append(
            f'<rect x="{x - 11:g}" y="{bottom - height:.1f}" width="22" height="{height:.1f}" fill="{color}"/>'
        )

    def dot(self, x: float, y: float, color: str, *, radius: float = 5) -> None:
        """Draw a dot."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{color}"/>')

    def line(self, points: Iterable[tuple[float, float]], color: str = INK, *, dashed: bool = False) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float], color: str = INK) -> None:
        """Draw an arrow."""
        (x, y), length = end, math.dist(start, end)
        along = ((end[0] - start[0]) / length, (end[1] - start[1]) / length)
        self.line([start, (x - 7 * along[0], y - 7 * along[1])], color)
        corners = ((0.0, 0.0), (-10.0, 5.0), (-10.0, -5.0))
        head = " ".join(
            f"{x + a * along[0] - b * along[1]:.1f},{y + a * along[1] + b * along[0]:.1f}" for a, b in corners
        )
        self._parts.append(f'<polygon points="{head}" fill="{color}"/>')

    def svg(self) -> str:
        """Return the file."""
        width, height = self._size
        place = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {place} role="img" font-family="system-ui, sans-serif">'
        ground = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{self._title}</title>", DARK, ground, *self._parts, "</svg>", ""])


def push_sum() -> Picture:
    """Return the course of x and x/u on a directed graph of three peers."""
    # W[i][j]: peer j gives this share of its mass to peer i. Columns sum to 1, rows do not.
    mixing = ((1 / 3, 0.0, 1 / 2), (1 / 3, 1 / 2, 0.0), (1 / 3, 1 / 2, 1 / 2))
    x, u = [9.0, 3.0, 0.0], [1.0, 1.0, 1.0]
    history = [(x, u)]
    for _ in range(8):
        x, u = _mixed(mixing, x), _mixed(mixing, u)
        history.append((x, u))
    picture = Picture(640, 250, "Push-sum: x alone does not agree, x divided by u agrees on the mean.")
    nodes = [(90, 70), (40, 180), (140, 180)]
    for a, b in ((0, 1), (0, 2), (1, 2), (2, 0)):
        _between(picture, nodes[a], nodes[b], offset=5 if (a, b) in ((0, 2), (2, 0)) else 0)
    for index, (px, py) in enumerate(nodes):
        picture.dot(px, py, COLORS[index], radius=15)
        picture.text(px, py + 5, "ABC"[index], color="#ffffff")
    picture.text(90, 30, "messages go one way")
    for left, title, values in (
        (220, "x: the sum stays 12, but who gets it?", [state[0] for state in history]),
        (440, "x / u: all agree on 4", [[a / b for a, b in zip(*state, strict=True)] for state in history]),
    ):
        picture.text(left + 85, 30, title)
        _curves(picture, left, 45, 170, 160, values, top=9.0)
        picture.text(left + 85, 230, "rounds", size=11)
    return picture


def error_feedback() -> Picture:
    """Return three rounds in which the largest of four numbers is sent and the others are kept."""
    changes = ((4.0, 2.5, 1.0, 0.5), (1.0, 2.0, 1.0, 0.5), (1.0, 0.5, 1.5, 0.5))
    memory = [0.0] * 4
    picture = Picture(640, 240, "Error feedback: what was not sent is kept and grows until it is the largest.")
    for round_, change in enumerate(changes):
        left, bottom = 40 + 200 * round_, 180
        picture.text(left + 70, 28, f"round {round_ + 1}", size=14)
        wanted = [kept + new for kept, new in zip(memory, change, strict=True)]
        sent = max(range(4), key=wanted.__getitem__)
        for index in range(4):
            x = left + 15 + 37 * index
            picture.bar(x, bottom, 26 * wanted[index], ORANGE if index == sent else GREY)
            if memory[index]:
                picture.line([(x - 11, bottom - 26 * memory[index]), (x + 11, bottom - 26 * memory[index])], INK)
            picture.text(x, bottom + 17, f"{wanted[index]:g}", size=12)
        memory = [0.0 if index == sent else wanted[index] for index in range(4)]
        picture.line([(left - 5, bottom), (left + 145, bottom)])
    picture.text(
        320, 225, "orange: sent in this round; grey: kept for later; below the black line: kept from before", size=12
    )
    return picture


def replicas() -> Picture:
    """Return a replica that follows a number of which a rounded difference is sent in each round."""
    xs = [3.0 * (1 - math.exp(-t / 9)) + 0.25 * math.sin(t / 1.7) for t in range(31)]
    copy, copies = 0.0, []
    for x in xs:
        # C(d): half of the difference, rounded to steps of 0.4. The rest is in the next difference.
        copy += 0.4 * round(0.5 * (x - copy) / 0.4)
        copies.append(copy)
    picture = Picture(640, 250, "A replica follows the model of its owner by rounded differences.")
    left, bottom, across, up = 60, 205, 18.0, 50.0
    picture.line([(left + across * t, bottom - up * x) for t, x in enumerate(xs)], BLUE)
    steps = [point for t, c in enumerate(copies) for point in ((t, c), (t + 1, c))]
    picture.line([(left + across * t, bottom - up * c) for t, c in steps if t <= 30], ORANGE)
    picture.line([(left, 25), (left, bottom), (left + across * 30.5, bottom)])
    picture.text(375, 140, "x: the number at its owner", anchor="start", color=BLUE, size=12)
    picture.text(375, 158, "x̂: its copy at every neighbour", anchor="start", color=ORANGE, size=12)
    picture.text(375, 176, "and at the owner: the same bits", anchor="start", color=ORANGE, size=12)
    picture.text(left + across * 15, 232, "rounds", size=12)
    return picture


def modulo_codes() -> Picture:
    """Return a number line on which the receiver's own number selects among all numbers of a code."""
    picture = Picture(640, 190, "Modulo codes: of all numbers with the code, one is near the receiver's own.")
    left, across, y = 50, 90.0, 100
    sent, own, width = 3.7, 3.4, 0.5
    picture.box(left + across * (own - width), y - 26, across * 2 * width, 52, fill="#dceaf8", line=BLUE)
    picture.line([(left - 20, y), (left + across * 6.3, y)])
    for whole in range(7):
        picture.line([(left + across * whole, y - 6), (left + across * whole, y + 6)])
        picture.text(left + across * whole, y + 22, str(whole), size=12)
    for whole in range(6):
        value = whole + sent % 1
        picture.dot(left + across * value, y, ORANGE if value == sent else GREY)
    picture.dot(left + across * own, y, BLUE)
    picture.text(left + across * own, y - 48, "receiver's own number: 3.4, and θ = 0.5 around it", color=BLUE)
    picture.arrow((left + across * own, y - 43), (left + across * own, y - 9), BLUE)
    picture.text(left + across * sent, y + 62, "sent: the code .7, so it is 3.7", color=ORANGE)
    picture.arrow((left + across * sent, y + 46), (left + across * sent, y + 9), ORANGE)
    picture.text(12, 182, "grey: the other numbers with the same code", size=12, anchor="start")
    return picture


def journal() -> Picture:
    """Return the content of the disk when a peer is killed, and the actions of the peer after that."""
    picture = Picture(640, 230, "The journal: checkpoint, records of rounds, a kill, and the way back.")
    picture.text(20, 32, "on disk", anchor="start", size=14)
    for x, width, words, fill in (
        (20, 120, "checkpoint 100", "#dceaf8"),
        (150, 90, "round 101", "#eef2f7"),
        (250, 90, "round 102", "#eef2f7"),
        (350, 90, "round 103", "#eef2f7"),
    ):
        picture.box(x, 45, width, 38, fill=fill)
        picture.text(x + width / 2, 69, words)
    picture.text(395, 102, "written before", size=11)
    picture.text(395, 116, "anything is sent", size=11)
    picture.line([(462, 40), (482, 90)], ORANGE)
    picture.line([(482, 40), (462, 90)], ORANGE)
    picture.text(472, 32, "kill", color=ORANGE)
    picture.text(20, 152, "after the start", anchor="start", size=14)
    for x, width, words in (
        (20, 120, "load 100"),
        (150, 290, "repeat 101 to 103, with what had arrived"),
        (480, 140, "continue: 104"),
    ):
        picture.box(x, 165, width, 38, fill="#e4f1e5", line=GREEN)
        picture.text(x + width / 2, 189, words)
    for start, end in ((140, 150), (440, 480)):
        picture.arrow((start, 184), (end, 184), GREEN)
    picture.text(540, 222, "the same bits as without the kill", size=11)
    return picture


def _mixed(mixing: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    return [sum(weight * value for weight, value in zip(row, values, strict=True)) for row in mixing]


def _between(picture: Picture, start: tuple[float, float], end: tuple[float, float], *, offset: float) -> None:
    """Draw an arrow from the rim of one node to that of another, a little to its right."""
    length = math.dist(start, end)
    dx, dy = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    right = (-dy * offset, dx * offset)
    picture.arrow(
        (start[0] + 17 * dx + right[0], start[1] + 17 * dy + right[1]),
        (end[0] - 17 * dx + right[0], end[1] - 17 * dy + right[1]),
    )


def _curves(
    picture: Picture,
    left: float,
    top_y: float,
    width: float,
    height: float,
    values: Sequence[Sequence[float]],
    *,
    top: float,
) -> None:
    bottom = top_y + height
    for index in range(len(values[0])):
        points = [
            (left + width * t / (len(values) - 1), bottom - height * state[index] / top)
            for t, state in enumerate(values)
        ]
        picture.line(points, COLORS[index])
    picture.line([(left, top_y), (left, bottom), (left + width, bottom)])


PICTURES: Mapping[str, Callable[[], Picture]] = {
    "push-sum": push_sum,
    "error-feedback": error_feedback,
    "replicas": replicas,
    "modulo-codes": modulo_codes,
    "journal": journal,
}


def main() -> int:
    """Return the exit code: 0, or 1 if --check found a stale picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a picture is stale")
    check, stale = parser.parse_args().check, 0
    for name, draw in PICTURES.items():
        file, svg = FOLDER / f"{name}.svg", draw().svg()
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(svg, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != svg:
            print(f"{file} is out of date; run tools/draw_concepts.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
