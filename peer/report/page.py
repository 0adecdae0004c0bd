"""The frame of a self-contained HTML page, and what its sections are built of.

A page asks nobody for anything: style sheet and script are inside, and its Content-Security-Policy admits that script
alone, by its digest. Whatever a caller passes as text is escaped here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import resources

from peer import __version__
from peer.report.numbers import count
from peer.report.style import STYLE

MOST_ROWS = 200
"""Rows of one table; what is left out is said below it."""

_SCRIPT = resources.files("peer.report").joinpath("charts.js").read_text(encoding="utf-8")
_SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode("ascii")
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    f"script-src 'sha256-{_SCRIPT_DIGEST}'"
)


def document(title: str, header: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """Return a page. `header` and the last of each section (name, heading, content) are HTML already."""
    contents = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{escape(heading)}</h2>{content}</section>' for name, heading, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · Sottovoce</title><style>{STYLE}</style></head><body>"
        f"<header>{header}</header><nav>{contents}</nav><main>{body}</main>"
        f"<footer>Sottovoce {escape(__version__)}</footer><script>{_SCRIPT}</script></body></html>\n"
    )


def card(label: str, figure: str, note: str) -> str:
    """Return one figure with what it is."""
    return (
        f'<div class="card"><p class="label">{escape(label)}</p><p class="figure">{escape(figure)}</p>'
        f'<p class="note">{escape(note)}</p></div>'
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, label: str, text_columns: int = 1) -> str:
    """Return a table whose first columns are text and the others figures. `label` says what it is of."""

    def cell(tag: str, column: int, text: str) -> str:
        return f"<{tag} class={'text' if column < text_columns else 'number'}>{escape(text)}</{tag}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(heads))
    body = "".join("<tr>" + "".join(cell("td", c, text) for c, text in enumerate(row)) + "</tr>" for row in rows)
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", label=label)


def scrolling(content: str, *, label: str) -> str:
    """Return what may be wider than the page in a box that scrolls, with the keyboard too."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label, quote=True)}">{content}</div>'


def remark(text: str) -> str:
    """Return a sentence about what follows it."""
    return f'<p class="remark">{escape(text)}</p>'


def missing(text: str) -> str:
    """Return a sentence in the place of what is not there."""
    return f'<p class="missing">{escape(text)}</p>'


def left_out(total: int) -> str:
    """Return how many rows of so many are not shown."""
    return remark(f"{count(total - MOST_ROWS)} more are left out.") if total > MOST_ROWS else ""
