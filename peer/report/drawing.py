"""A drawing of a graph from a run folder, put into a page so that it takes the page's colours and can do no harm.

Only shapes and text pass, with attributes that place them; style sheets, scripts, links and images do not.
"""

from __future__ import annotations

from xml.etree import ElementTree

from peer.report.blocks import Drawing

_NAMESPACE = "{http://www.w3.org/2000/svg}"
_SHAPES = ("g", "path", "polygon", "circle", "text")
_ATTRIBUTES = frozenset(
    ("class", "transform", "d", "points", "cx", "cy", "r", "x", "y", "stroke-width", "font-size")
)  # fmt: skip


_DEPTH = 8
"""Deepest nesting of shapes; a drawing of a graph has two levels."""


def inline_drawing(svg: bytes, label: str) -> Drawing | None:
    """Return the permitted parts of a drawing of `graph_view.svg`; None if the bytes are no such drawing."""
    try:
        root = ElementTree.fromstring(svg)
        width, height = (float(root.get(side, "")) for side in ("width", "height"))
    except (ElementTree.ParseError, ValueError):
        return None
    if root.tag != f"{_NAMESPACE}svg":
        return None
    kept = ElementTree.Element("svg")
    _copy(root, kept, _DEPTH)
    return Drawing(label, width, height, kept)


def _copy(source: ElementTree.Element, target: ElementTree.Element, depth: int) -> None:
    for child in source if depth else ():
        shape = str(child.tag).removeprefix(_NAMESPACE)
        if shape in _SHAPES:
            attributes = {name: value for name, value in child.attrib.items() if name in _ATTRIBUTES}
            added = ElementTree.SubElement(target, shape, attributes)
            added.text = child.text
            _copy(child, added, depth - 1)
