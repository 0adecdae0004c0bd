"""The page as it is before anything is known: headings, empty places, and words for whoever has no script.

It is the same for every run, so that anybody may read it; whatever a run says comes later and is set as text.
"""

from __future__ import annotations

from html import escape
from importlib import resources

from peer import __version__
from peer.report.page import scrolling
from peer.report.style import STYLE

_FILES = resources.files("peer.watch")
SCRIPT = _FILES.joinpath("watch.js").read_text(encoding="utf-8")
CHARTS = resources.files("peer.report").joinpath("charts.js").read_text(encoding="utf-8")
STYLE_SHEET = STYLE + _FILES.joinpath("watch.css").read_text(encoding="utf-8")

_CARDS = (
    ("round", "Round"),
    ("left", "Time left"),
    ("worst", "Worst peer"),
    ("average", "Averaged model"),
    ("sent", "Sent"),
    ("running", "Peers"),
)
_PEER_HEADS = ("peer", "state", "round", "loss", "figure", "sent", "per second", "waits")
_LINK_HEADS = ("link", "state", "per second", "late by", "unconfirmed", "way")


def page(*, operate: bool) -> str:
    """Return the document. `operate`: with what an operator needs to act."""
    sections = (
        ("graph", "Graph", _GRAPH),
        ("curves", "Curves", '<div class="charts"><div id="figure"></div><div id="loss"></div></div>'),
        ("peers", "Peers", _table("peers", (*_PEER_HEADS, *(["actions"] if operate else [])), "Peers")),
        ("links", "Links", _table("links", _LINK_HEADS, "Links")),
        ("events", "Events", scrolling('<div role="log"><ol id="event-list"></ol></div>', label="Events")),
        ("log", "Log", scrolling('<ol id="log-list"></ol>', label="Log of the peers")),
    )
    contents = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{heading}</h2>{content}</section>' for name, heading, content in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        '<title>Sottovoce</title><link rel="stylesheet" href="/watch.css">'
        '<script src="/charts.js" defer></script><script src="/watch.js" defer></script></head>'
        f'<body data-operate="{"yes" if operate else "no"}"><header><p class="kicker" id="kind">Live</p>'
        '<h1 id="name">…</h1><p class="facts" id="facts"></p>'
        '<p class="connection" id="connection" role="status">Connecting…</p>'
        '<p class="banner" id="banner" role="alert" hidden></p>'
        '<noscript><p class="banner">This page needs JavaScript. sotto status shows the same figures.</p></noscript>'
        f'</header><nav>{contents}</nav><main><section id="now"><h2>Now</h2>{_cards()}'
        f"{_STOP_ALL if operate else ''}</section>{body}</main>"
        f"<footer>Sottovoce {escape(__version__)}</footer>{_DIALOG if operate else ''}</body></html>\n"
    )


def _cards() -> str:
    cards = "".join(
        f'<div class="card"><p class="label">{label}</p><p class="figure" id="{name}">–</p>'
        f'<p class="note" id="{name}-note"></p></div>'
        for name, label in _CARDS
    )
    return (
        f'<div class="cards">{cards}</div>'
        '<progress id="progress" max="1" value="0" aria-label="Rounds completed by all peers"></progress>'
    )


def _table(name: str, heads: tuple[str, ...], label: str) -> str:
    cells = "".join(f'<th scope="col" id="{name}-head-{n}">{head}</th>' for n, head in enumerate(heads))
    content = f'<table><thead><tr>{cells}</tr></thead><tbody id="{name}-rows"></tbody></table>'
    return f'{scrolling(content, label=label)}<p class="remark" id="{name}-note"></p>'


_GRAPH = (
    '<div class="graph live" id="drawing"></div><ul class="legend" id="graph-legend">'
    '<li><i class="is-up"></i>running</li><li><i class="is-over"></i>ended</li>'
    '<li><i class="is-down"></i>down or unreachable</li><li><i class="is-worst"></i>worst peer</li>'
    '<li><i class="is-awaited"></i>awaited</li><li><i class="is-relayed"></i>through a relay</li></ul>'
    '<p class="remark" id="waiting"></p>'
)

_STOP_ALL = '<p class="operate"><button type="button" id="stop-all">Stop all peers…</button></p>'

_DIALOG = (
    '<dialog id="dialog" aria-labelledby="dialog-title"><h2 id="dialog-title"></h2><fieldset id="choices">'
    '<legend>What should it do?</legend></fieldset><p id="typed"><label for="confirm-name"></label>'
    '<input id="confirm-name" autocomplete="off" spellcheck="false"></p><p id="said" role="status"></p>'
    '<p class="operate"><button type="button" id="cancel">Cancel</button> '
    '<button type="button" id="confirm" class="risky">Confirm</button></p></dialog>'
)
