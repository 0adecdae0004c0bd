"""The blocks of pages: values that have been computed and written out, and no word of HTML.

Each class has a macro of its name in `blocks.html`, which lays it out and escapes its content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from peer.report.numbers import count

MOST_ROWS = 200
"""Most rows of one table; a sentence below it counts the others."""


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
    """A sentence about the following block."""


class Missing(_Words):
    """A sentence in the place of missing content."""


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
    """(name, figure, note)."""


@dataclass(frozen=True)
class Table(Block):
    """A table whose first columns are text and the others figures."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    label: str
    """Subject of the table, for readers who cannot see it."""
    text_columns: int = 1


@dataclass(frozen=True)
class Bar:
    """A piece of a bar."""

    percent: float
    """Part of the whole width."""
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
    """Heads of the column of names and of those of figures."""
    legend: Mapping[str, str] | None = None
    """Meaning of a piece of a bar → its style."""


@dataclass(frozen=True)
class Charts(Block):
    """Charts beside each other, as far as there is room."""

    charts: Sequence[Block]


@dataclass(frozen=True)
class Drawing(Block):
    """A drawing from a file, as `drawing.py` filters it."""

    label: str
    width: float
    """Width in points; the height too."""
    height: float
    shapes: Element


@dataclass(frozen=True)
class Settings(Block):
    """A long text that opens on request."""

    summary: str
    text: str


@dataclass(frozen=True)
class Definitions(Block):
    """Names and their meanings."""

    entries: Mapping[str, object]


def left_out(total: int) -> list[Block]:
    """Return a remark on the number of rows that are not shown, if any."""
    return [Remark(f"{count(total - MOST_ROWS)} more are left out.")] if total > MOST_ROWS else []
