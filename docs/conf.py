"""The documentation as a site: `make docs` builds it from the Markdown of the repository into build/site.

The source folder is the root of the repository, so that a link from one page to another leads to the same page here and
on a page that shows the Markdown alone. The navigation is that of docs/index.md: its lists become tables of contents.
"""

from __future__ import annotations

import json
import re
import tomllib
from html import escape
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from docutils import nodes
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
html_static_path = ["site"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
# Two hyphens are those of an option; blocks without a language are no Python.
smartquotes = False
highlight_language = "none"

_LISTED = re.compile(r"^(?:- |\| )\[([^]]+)\]\(([^)#:]+)\.md\)", re.MULTILINE)
_START = """<!doctype html><meta charset="utf-8"><title>Sottovoce</title>
<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">Documentation</a>
"""

_NEW_LINE = re.compile(r"# (new|changed)$")
_NAMED = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer': '<aside aria-label="This page" class="toc-drawer',
    '<th class="head"><p></p></th>': "<td></td>",
}
"""What the theme and the tables leave without a name that a screen reader could say, and what stands there instead."""

_MOVED = tomllib.loads((Path(__file__).parent / "moved.toml").read_text(encoding="utf-8"))
_LEAD = "<script>var to = {moved}[location.hash.slice(1)]{otherwise}; if (to) location.replace(to)</script>"
_STUB = """<!doctype html><meta charset="utf-8"><title>Moved</title>{lead}
<noscript><meta http-equiv="refresh" content="0; url={to}"></noscript><a href="{to}">{to}</a>
"""


def setup(app: Sphinx) -> None:
    """Have Sphinx call what is below."""
    app.connect("source-read", _add_contents)
    app.connect("doctree-read", _mark_new_lines)
    app.connect("html-page-context", _lead_on)
    app.connect("build-finished", _name_parts)
    app.connect("build-finished", _write_start)
    app.connect("build-finished", _write_stubs)


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


def _mark_new_lines(app: Sphinx, tree: nodes.document) -> None:
    """Highlight lines that an example marks as new: their marks may be outside of what is seen."""
    for block in tree.findall(nodes.literal_block):
        lines = block.astext().splitlines()
        if marked := [number for number, line in enumerate(lines, 1) if _NEW_LINE.search(line)]:
            block["highlight_args"] = {**block.get("highlight_args", {}), "hl_lines": marked}


def _name_parts(app: Sphinx, error: Exception | None) -> None:
    """Name the parts of each page for those who hear it."""
    if error is None and app.builder.format == "html":
        for page in Path(app.outdir).rglob("*.html"):
            text = page.read_text(encoding="utf-8")
            for silent, named in _NAMED.items():
                text = text.replace(silent, named)
            page.write_text(text, encoding="utf-8")


def _write_start(app: Sphinx, error: Exception | None) -> None:
    """Lead from the top of the site to its first page."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(_START, encoding="utf-8")


def _lead(page: str, otherwise: str = "") -> str:
    """Return the script that leads from headings that a page had, or from any address of it, to where they are now."""
    moved = {old.partition("#")[2]: _address(page, new) for old, new in _MOVED.items() if old.startswith(f"{page}#")}
    return _LEAD.format(moved=json.dumps(moved), otherwise=f" || {json.dumps(otherwise)}" if otherwise else "")


def _address(page: str, new: str) -> str:
    """Return the address of what is at `new`, as seen from `page`; both are files of the repository."""
    file, mark, heading = new.partition("#")
    return relpath(file, dirname(page) or ".").removesuffix(".md") + ".html" + mark + heading


def _lead_on(app: Sphinx, page: str, template: str, context: dict[str, object], doctree: object) -> None:
    """Lead from headings that a page no longer has."""
    if any(old.startswith(f"{page}.md#") for old in _MOVED):
        context["metatags"] = f"{context.get('metatags', '')}{_lead(f'{page}.md')}"


def _write_stubs(app: Sphinx, error: Exception | None) -> None:
    """Write a page that leads on wherever there was one."""
    if error is None and app.builder.format == "html":
        for old in (old for old in _MOVED if "#" not in old):
            to = _address(old, _MOVED[old])
            stub = Path(app.outdir) / f"{old.removesuffix('.md')}.html"
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(_STUB.format(lead=_lead(old, to), to=escape(to)), encoding="utf-8")
