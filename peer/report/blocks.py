"""What pages are built of: values that have been computed and written out, and no word of HTML.

Each class has a macro of its name in `blocks.html`, which lays it out and escapes what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from peer.report.numbers import count

MOST_ROWS = 200
"""Rows of one table; what is left out is said below it."""


class Block:
    """One part of a page."""

    @property
    def macro(self) -> str:
        """Return the name of the macro."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Section:
    """A part of a page with an entry in its table of contents."""

    name: str
    """Its anchor."""
    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class _Words(Block):
    text: str


class Remark(_Words):
    """A sentence about what follows it."""


class Missing(_Words):
    """A sentence in the place of what is not there."""


class Heading(_Words):
    """The heading of a part of a section."""


class Banner(_Words):
    """A sentence that everybody should read."""


class Command(_Words):
    """A line of a shell."""


@dataclass(frozen=True)
class Facts(Block):
    """Short statements in one line."""

    facts: Sequence[str]


@dataclass(frozen=True)
class Cards(Block):
    """Figures in large digits."""

    cards: Sequence[tuple[str, str, str]]
    """(what it is, the figure, a note)."""


@dataclass(frozen=True)
class Table(Block):
    """A table whose first columns are text and the others figures."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    label: str
    """What it is of, for whoever cannot see it."""
    text_columns: int = 1


@dataclass(frozen=True)
class Bar:
    """A piece of a bar."""

    percent: float
    """Of the whole width."""
    style: str | None = None
    """Class of the style sheet."""
    title: str | None = None


@dataclass(frozen=True)
class BarRow:
    """One row of a table of bars."""

    name: str
    bars: Sequence[Bar]
    figures: Sequence[str]
    note: str = ""


@dataclass(frozen=True)
class Bars(Block):
    """A table with a bar in each row, and figures beside it."""

    label: str
    rows: Sequence[BarRow]
    heads: Sequence[str] = ()
    """Of the names, and of the figures."""
    legend: Mapping[str, str] | None = None
    """What a piece of a bar is → its style."""


@dataclass(frozen=True)
class Charts(Block):
    """Charts beside each other, as far as there is room."""

    charts: Sequence[Block]


@dataclass(frozen=True)
class Drawing(Block):
    """A drawing that came from a file; `drawing.py` says what of it is kept."""

    label: str
    width: float
    """In points, as the height."""
    height: float
    shapes: Element


@dataclass(frozen=True)
class Settings(Block):
    """A long text that opens when it is asked for."""

    summary: str
    text: str


@dataclass(frozen=True)
class Definitions(Block):
    """Names and what they stand for."""

    entries: Mapping[str, object]


def left_out(total: int) -> list[Block]:
    """Return how many rows of so many are not shown."""
    return [Remark(f"{count(total - MOST_ROWS)} more are left out.")] if total > MOST_ROWS else []
