"""The documentation as a site: `make docs` builds it from the Markdown of the repository into build/site.

The source folder is the root of the repository, so that a link from one page to another leads to the same page here and
on a page that shows the Markdown alone. The navigation is that of docs/index.md: its lists become tables of contents.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath

from sphinx.application import Sphinx

from peer import __version__

project = "Sottovoce"
author = "The Sottovoce authors"
release = __version__
language = "en"

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md", "docs/**"]
# Folders that are large, and hold Markdown of others.
exclude_patterns = [".*", "build", "runs", "peer", "tests", "tools"]

nitpicky = True
myst_heading_anchors = 4

html_theme = "furo"
html_title = "Sottovoce"
html_copy_source = False
html_show_copyright = False

_LISTED = re.compile(r"^(?:- |\| )\[([^]]+)\]\(([^)#:]+)\.md\)", re.MULTILINE)
_START = """<!doctype html><meta charset="utf-8"><title>Sottovoce</title>
<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">Documentation</a>
"""


def setup(app: Sphinx) -> None:
    """Have Sphinx call what is below."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _write_start)


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Give an index the tables of contents that its lists (or the first column of its table) stand for."""
    if not page.endswith("/index"):
        return
    for section in re.split(r"^(?=## )", source[0], flags=re.MULTILINE):
        entries = [f"{title} </{normpath(join(dirname(page), target))}>" for title, target in _LISTED.findall(section)]
        if entries:
            heading = section.partition("\n")[0].removeprefix("## ") if section.startswith("## ") else ""
            caption = [f":caption: {heading}"] if heading and page == root_doc else []
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", *caption, "", *entries, "```", ""])


def _write_start(app: Sphinx, error: Exception | None) -> None:
    """Lead from the top of the site to its first page."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(_START, encoding="utf-8")
