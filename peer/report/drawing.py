"""A drawing of a graph from a run folder, put into a page so that it takes the page's colours and can do no harm.

Only shapes and text pass, with attributes that place them; style sheets, scripts, links and images do not.
"""

from __future__ import annotations

from xml.etree import ElementTree

_NAMESPACE = "{http://www.w3.org/2000/svg}"
_SHAPES = ("g", "path", "polygon", "circle", "text")
_ATTRIBUTES = frozenset(
    ("class", "transform", "d", "points", "cx", "cy", "r", "x", "y", "stroke-width", "font-size")
)  # fmt: skip


def inline_drawing(svg: bytes, label: str) -> str | None:
    """Return a drawing of `graph_view.svg` as an element of a page; None if the bytes are no such drawing."""
    try:
        root = ElementTree.fromstring(svg)
        width, height = (float(root.get(side, "")) for side in ("width", "height"))
    except (ElementTree.ParseError, ValueError):
        return None
    if root.tag != f"{_NAMESPACE}svg":
        return None
    # On a narrow page it shrinks a little before it scrolls: the text in it stays legible.
    size = {
        "viewBox": f"0 0 {width:g} {height:g}",
        "style": f"width:100%;min-width:{0.7 * width:g}px;max-width:{width:g}px",
    }
    kept = ElementTree.Element("svg", {**size, "role": "img", "aria-label": label})
    _copy(root, kept)
    return ElementTree.tostring(kept, encoding="unicode")


def _copy(source: ElementTree.Element, target: ElementTree.Element) -> None:
    for child in source:
        shape = str(child.tag).removeprefix(_NAMESPACE)
        if shape in _SHAPES:
            attributes = {name: value for name, value in child.attrib.items() if name in _ATTRIBUTES}
            added = ElementTree.SubElement(target, shape, attributes)
            added.text = child.text
            _copy(child, added)
