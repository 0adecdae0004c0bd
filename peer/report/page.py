"""Pages made from templates of the package, which escape every value set into them.

Two files of the package stand in a page as they are: the style sheet and the script of the charts.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import jinja2

from peer import __version__
from peer.errors import StateError
from peer.files import write_whole
from peer.report.blocks import Block, Section

_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|[kMG]?B)\b|%)|(?<= min) (?=\d\d)|(?<= h) (?=\d\d)")
"""The spaces between numbers and their units, at which no line ends."""


def document(
    title: str, *, kicker: str, heading: str, header: Sequence[Block] = (), sections: Sequence[Section]
) -> str:
    """Return a page in one file. `kicker` names the kind of page."""
    script = own_file("report/charts.js")
    return fill(
        "report/document.html",
        title=title,
        kicker=kicker,
        heading=heading,
        header=header,
        sections=sections,
        style=own_file("report/page.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )


def write_page(file: Path, text: str) -> None:
    """Write a page. Raises StateError."""
    try:
        write_whole(file, text)
    except OSError as error:
        raise StateError(f"{file}: cannot be written: {error.strerror}") from None


def lay_out(block: Block) -> str:
    """Return one block as HTML, for an existing page."""
    macros = _templates().get_template("report/blocks.html").module
    return str(getattr(macros, block.macro)(block))


def fill(template: str, **values: object) -> str:
    """Return a template, named by its path in the package, with values in it."""
    return _templates().get_template(template).render(values)


def own_file(name: str) -> str:
    """Return a file of the package, named by its path in it."""
    return resources.files("peer").joinpath(name).read_text(encoding="utf-8")


@cache
def _templates() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("peer", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["version"] = __version__
    found.filters["unbroken"] = lambda text: _UNIT.sub("\u00a0", text)
    return found
