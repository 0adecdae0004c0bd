"""Pages are laid out by templates, which escape: whatever a run says is text on the report, the comparison and the live
page, and nobody puts HTML together."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest

import peer
from peer.records import Criterion
from peer.report import blocks
from peer.report.blocks import Bar, BarRow, Block, Section
from peer.report.compare_page import compare_page
from peer.report.comparison import Contender
from peer.report.line_chart import Axis, Line, line_chart
from peer.report.page import document, fill, lay_out
from peer.report.run_data import RunData, load_run
from peer.report.run_page import render
from peer.watch.figures import Figures
from peer.watch.snapshot import PeerView, Snapshot
from peer.watch.view import View
from tests.report.sample_run import evaluation, write_sample_run

ROOT = Path(peer.__file__).parent
EVIL = """<script>alert(1)</script> '"><img src=x onerror=alert(1)> {{ 7 * 7 }} {% raw %} &lt; </style> -->"""
HARMLESS = "(harmless)"


class Structure(HTMLParser):
    """The elements of a page with the names of their attributes, and its text and the values of its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.values: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, *(name for name, _ in attrs)))
        self.values += [value or "" for _, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self.elements.append((f"/{tag}",))

    def handle_comment(self, data: str) -> None:
        self.elements.append(("comment",))

    def handle_data(self, data: str) -> None:
        self.values.append(data)


def saying(text: str, value: Any, kept: tuple[str, ...] = ()) -> Any:
    """Return a copy of a value in which every string is `text`; not those in the fields that are `kept`."""
    if isinstance(value, str):
        return text
    if isinstance(value, Mapping):
        return {f"{text}{number}": saying(text, each, kept) for number, each in enumerate(value.values())}
    if isinstance(value, list | tuple):
        return type(value)(saying(text, each, kept) for each in value)
    if isinstance(value, Element):
        found = Element(value.tag, saying(text, {}) | dict.fromkeys(value.attrib, text))
        found.text = text
        found.extend(saying(text, each) for each in value)
        return found
    if is_dataclass(value) and not isinstance(value, type):
        told = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: saying(text, each, kept) for name, each in told.items() if name not in kept})
    return value


def assert_all_is_text(evil: str, harmless: str, *, at_least: int) -> None:
    """Check that a page that says `EVIL` has the elements of one that says `HARMLESS`, and says it in full."""
    page, other = Structure(evil), Structure(harmless)
    assert page.elements == other.elements
    said = sum(value.count(EVIL) for value in page.values)
    assert said == sum(value.count(HARMLESS) for value in other.values)
    assert said >= at_least


CHART = line_chart("a", [Line(label="b", points=[(0, 1), (1, 2)], style="mean")], Axis(label="c"), Axis(label="d"))
DRAWN = fromstring("<svg><g class='e'><text x='1'>f</text></g></svg>")
SAMPLES = (
    *(kind("a") for kind in (blocks.Remark, blocks.Missing, blocks.Heading, blocks.Banner, blocks.Command)),
    blocks.Facts(["a", "b"]),
    blocks.Cards([("a", "b", "c")]),
    blocks.Table(["a", "b"], [["c", "d"]], "e"),
    blocks.Bars("a", [BarRow("b", [Bar(7.0, "c", "d")], ["e"], "f")], ["g", "h"], {"i": "j"}),
    blocks.Charts([CHART]),
    blocks.Drawing("a", 9.0, 9.0, DRAWN),
    blocks.Settings("a", "b"),
    blocks.Definitions({"a": "b"}),
    CHART,
)


def kinds(base: type[Block] = Block) -> Iterator[type[Block]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_kind_of_block_is_tried() -> None:
    assert {type(sample) for sample in SAMPLES} == {kind for kind in kinds() if not kind.__name__.startswith("_")}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_block_escapes_all_that_it_says(sample: Block) -> None:
    evil, harmless = (lay_out(saying(text, sample)) for text in (EVIL, HARMLESS))
    assert_all_is_text(evil, harmless, at_least=1)


def test_a_document_escapes_all_that_it_says() -> None:
    evil, harmless = (
        document(text, kicker=text, heading=text, sections=[Section(text, text, saying(text, SAMPLES))])
        for text in (EVIL, HARMLESS)
    )
    assert_all_is_text(evil, harmless, at_least=30)
    assert evil.count("<script") == 1


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return load_run(write_sample_run(tmp_path_factory.mktemp("runs") / "digits"))


def told(text: str, run: RunData) -> RunData:
    """Return a run every string of which is `text`."""
    assert run.summary is not None
    summary = saying(text, replace(run.summary, peer_states={}), kept=("criteria",))
    summary.criteria = {f"{text}2": "lower", f"{text}3": "higher"}
    summary.peer_states = dict.fromkeys(summary.peer_names, text)
    metrics = dict.fromkeys(summary.criteria, 0.5)
    return replace(
        run,
        directory=Path(text),
        summary=summary,
        config=f"{text} = {text}\n",
        notes=[text],
        evaluations=[replace(evaluation(peer, 20, "test", offset=0), metrics=metrics) for peer in range(4)],
    )


def test_a_report_says_everything_as_text(sample: RunData) -> None:
    evil, harmless = (render(told(text, sample)) for text in (EVIL, HARMLESS))
    assert_all_is_text(evil, harmless, at_least=100)


def test_a_comparison_says_everything_as_text(sample: RunData) -> None:
    def page(text: str) -> str:
        runs = [told(f"{text}{number}", sample) for number in range(2)]
        return compare_page([Contender(f"{text}{n}", (run,), {text: f"{text}{n}"}) for n, run in enumerate(runs)])

    assert_all_is_text(page(EVIL), page(HARMLESS), at_least=20)


def test_charts_of_the_live_page_say_everything_as_text() -> None:
    def drawn(text: str, *, figures: Figures) -> Mapping[str, str]:
        peers = [PeerView(index=index, name=f"{text}{index}", state="running", figure=0.5) for index in range(2)]
        shown = Snapshot(name=text, kind="run", at=0.0, rounds=9, criterion=Criterion(text, "higher"), peers=peers)
        charts = json.loads(View(figures).parts(shown, left_s=None, events=(), log=())["charts"])
        return {name: str(chart) for name, chart in charts.items()}

    def known(text: str) -> Figures:
        figures = Figures()
        figures.put_rounds([(peer, t, 0.1, 1.0, 1, 1, 0.0) for peer in range(2) for t in range(3)])
        for index in (-1, 0, 1):
            figures.put_evaluations([replace(evaluation(index, 2, "test", offset=0), metrics={text: 0.5})])
        return figures

    for name, at_least in (("figure", 4), ("loss", 2)):
        evil, harmless = (drawn(text, figures=known(text))[name] for text in (EVIL, HARMLESS))
        assert_all_is_text(evil, harmless, at_least=at_least)
    evil, harmless = (drawn(text, figures=Figures())["figure"] for text in (EVIL, HARMLESS))
    assert_all_is_text(evil, harmless, at_least=1)


def test_the_live_page_is_whole_and_says_nothing_of_a_run() -> None:
    for operate in (False, True):
        page = Structure(fill("watch/page.html", operate=operate))
        names = [value for value in page.values if value.startswith("#")]
        assert names == ["#curves", "#graph", "#peers", "#links", "#events", "#log"]
        assert (("/dialog",) in page.elements) == operate


def test_nobody_puts_html_together() -> None:
    """Markup is in templates, where nothing that they are given is taken for it."""
    names = (
        "a b body br circle div dl figure g h1 h2 h3 i img li line p path pre script span style svg table td text th tr"
    )
    tag = re.compile(rf"</|/>|<!|<({names.replace(' ', '|')})[ >]")
    makers = set()
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        texts = (
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        if any(tag.search(text) for text in texts):
            makers.add(path.relative_to(ROOT).as_posix())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {"html", "markupsafe"}, path
        # The card of a model is Markdown.
        assert ("jinja2" in imported) == (path.name in ("page.py", "model_card.py")), path
    # One of the tokens that may end a document.
    assert makers == {"train/datasets/tokens.py"}


def test_templates_take_nothing_for_markup_but_files_of_the_package() -> None:
    safe = {}
    for path in (*ROOT.rglob("*.html"), *ROOT.rglob("*.svg")):
        text = path.read_text("utf-8")
        assert "autoescape" not in text, path
        safe[path.name] = re.findall(r"\{\{ (\w+) \| safe \}\}", text)
        assert len(re.findall(r"\bsafe\b", text)) == len(safe[path.name]), path
    assert {name: found for name, found in safe.items() if found} == {"document.html": ["style", "script"]}


def test_the_wheel_holds_every_template_script_and_style_sheet() -> None:
    """And whatever else of the package is read as a file."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["peer"]
    held = {path for pattern in patterns for path in ROOT.glob(pattern)}
    read = {path for path in ROOT.rglob("*") if path.suffix in {".html", ".svg", ".css", ".js", ".toml", ".gz", ".md"}}
    assert read <= held


def test_only_who_makes_a_page_waits_for_templates() -> None:
    program = (
        "import sys\n"
        "import peer.daemon.process, peer.simulate, peer.cli.up, peer.report.live\n"
        "print('jinja2' in sys.modules)\n"
        "import peer.report.run_page\n"
        "print('jinja2' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
