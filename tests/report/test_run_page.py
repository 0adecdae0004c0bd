"""The page about a run: complete, self-contained, and unimpressed by missing data and hostile names."""

from __future__ import annotations

import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from peer.config.options import load
from peer.config.writer import write_peer_file
from peer.errors import StateError
from peer.foreign_values import parse_toml
from peer.records import ACCURACY
from peer.report.comparison import settings
from peer.report.curves import figure_charts, worst_figure
from peer.report.run_data import RunData, load_run
from peer.report.run_page import render, write_report
from peer.state.metrics import LinkRecord, Summary
from tests.report.sample_run import evaluation, round_record, write_sample_run

VOID = {"meta", "img", "link", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order; collects headings, text and every address that the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "data", "action"}]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(self.text).replace("\u00a0", " ")


SECTIONS = [
    "Key figures",
    "Accuracy",
    "Training loss",
    "Worst peer, class by class",
    "Peers",
    "Health of the gossip",
    "Where the time goes",
    "Traffic",
    "Links",
    "Graph",
    "Configuration",
    "Machine",
]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_run(tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "digits"))


def test_the_page_is_complete(run: Path) -> None:
    assert write_report(run) == run / "report.html"
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.headings == SECTIONS
    assert text.count("<polyline") > 40
    for figure in ("95.0 %", "97.2 %", "128×", "55×", "peer-3", "directed-ring", "Some CPU", "learning_rate = 0.1"):
        assert figure in page.words
    assert "Not recorded" not in page.words


def test_the_page_says_what_each_device_chose_to_train_in(run: Path) -> None:
    summary = Summary.load(run / "summary.json")
    step_s = {"float32": 0.002, "int8": 0.001}
    summary.chosen_precisions = {name: {"precision": "int8", "step_s": step_s} for name in ("<b>ada", "ben")}
    summary.precision = "int8"
    summary.save(run / "summary.json")
    page = Page(render(load_run(run)))
    assert "trained in 8 bits (int8 products), the fastest here" in page.words
    assert "<b>ada in int8: 1 ms a step, float32 2.00×" in page.words
    assert "ben in int8" in page.words


def test_the_page_needs_nothing_else(run: Path) -> None:
    text = render(load_run(run))
    page = Page(text)
    assert not page.tags & {"link", "img", "iframe", "object"}
    assert all(address.startswith("#") for address in page.addresses)
    assert {address.removeprefix("#") for address in page.addresses if address.startswith("#")} <= set(page.ids)
    # The name of a format is no address that anybody would ask.
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 1, "http-equiv only"
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize(
    ("missing", "phrase"),
    [
        (["summary.json"], "still going on"),
        (["config.toml"], "holds no config.toml"),
        (["graph.svg"], "holds no graph.svg"),
        (["metrics.sqlite"], "Key figures"),
        (["peers"], "No peer has recorded a round"),
        (["config.toml", "graph.svg", "peers", "metrics.sqlite"], "No links were recorded"),
        (["summary.json", "config.toml", "graph.svg", "metrics.sqlite"], "The machine was not recorded"),
    ],
)
def test_what_is_missing_is_said_and_does_no_harm(missing: list[str], phrase: str, run: Path) -> None:
    for name in missing:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    page = Page(render(load_run(run)))
    assert page.headings == SECTIONS
    assert phrase in page.words


def test_settings_that_a_short_file_of_a_device_leaves_out_are_shown(run: Path) -> None:
    whole = load_run(run).config
    config = load(run / "config.toml", environment={})
    (run / "config.toml").unlink()
    write_peer_file(run / "peer-0" / "peer.toml", config)
    found = settings(load_run(run))
    assert found["training.learning_rate"] == "0.1"
    assert parse_toml(load_run(run).config or "") == parse_toml(whole or "")


def test_names_from_the_run_are_text_not_markup(run: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    summary = Summary.load(run / "summary.json")
    summary.name = summary.algorithm = summary.graph = summary.ended = evil
    summary.peer_names = [evil] * 4
    summary.machine = {evil: evil}
    summary.save(run / "summary.json")
    (run / "config.toml").write_text(f"[run]\nname = '{evil}'\n")
    (run / "graph.svg").write_text(f"<svg>{evil}</svg>")
    assert "no drawing of a graph" in render(load_run(run))
    text = render(load_run(run))
    page = Page(text)
    assert text.count("<script>") == 1
    assert "onerror=alert(1)>" not in text
    assert evil in page.words


def test_a_run_that_ended_early_says_so(run: Path) -> None:
    summary = Summary.load(run / "summary.json")
    summary.ended = "diverged: the loss is not finite"
    summary.save(run / "summary.json")
    assert "Ended early: diverged: the loss is not finite" in Page(render(load_run(run))).words


def test_figures_of_a_simulation_leave_the_socket_out(run: Path) -> None:
    summary = Summary.load(run / "summary.json")
    summary.socket_bytes = summary.packet_bytes = None
    summary.simulated = True
    summary.save(run / "summary.json")
    page = Page(render(load_run(run)))
    assert "On the network" not in page.words
    assert "107×" in page.words
    assert "Time to simulate" in page.words
    assert "virtual time, which the curves show: 4.9 s" in page.words
    assert "virtual seconds" in page.words


def test_the_page_says_when_and_how_the_run_was_started(run: Path) -> None:
    words = Page(render(load_run(run))).words
    assert "22 Nov 2026, 10:05 UTC" in words
    assert "sotto up --peers 4 --name 'my run'" in words
    assert "41.0 ms a round; 41 s with the start of the peers and the end" in words


def test_what_is_saved_is_saved_against_something_that_is_named(run: Path) -> None:
    words = Page(render(load_run(run))).words
    assert "saved against whole float32 models in every round: 144 kB, their numbers alone" in words
    # 2 · 3 hops of 38,440 bytes in each of 120 rounds, against 144,000 bytes.
    assert "Local SGD, mean every 8 rounds exact mean of all models by a ring of float32 messages 3.46 MB 24×" in words
    assert "Local SGD sends as much as this run with a mean every 192 rounds." in words


def test_a_run_without_messages_saves_nothing(run: Path) -> None:
    summary = Summary.load(run / "summary.json")
    summary.algorithm = "local"
    summary.payload_bytes = summary.frame_bytes = summary.full_precision_payload_bytes = 0
    summary.socket_bytes = None
    summary.save(run / "summary.json")
    words = Page(render(load_run(run))).words
    assert "Model updates 0 B" in words
    assert "saved against whole float32" not in words
    assert "Local SGD sends as much" not in words


def test_a_figure_that_never_changed_is_a_sentence(run: Path) -> None:
    data = load_run(run)
    rows = [replace(row, push_weight=1.0, replica_error=0.0, error_norm=None) for row in data.rounds]
    text = render(replace(data, rounds=rows))
    assert "Push-sum weight u was 1.00 throughout. Replica error was 0.00 throughout." in text
    assert "Norm of the error memory" not in text, "what was not recorded is left out"


def test_a_number_and_its_unit_stay_on_one_line(run: Path) -> None:
    summary = Summary.load(run / "summary.json")
    summary.training_seconds = 64.0
    summary.save(run / "summary.json")
    assert ">1\u00a0min\u00a004\u00a0s<" in render(load_run(run))


def test_curves_stay_on_their_axis_and_members_that_left_are_no_worst_peer(run: Path) -> None:
    data = load_run(run)
    assert data.summary is not None
    rest = [row for row in data.evaluations if row.peer not in (-1, 3) or row.round < 60]
    early = replace(rest[0], peer=3, round=20, correct=[0] * len(rest[0].correct))
    data.evaluations = [*(row for row in rest if row.peer != 3), early]
    data.summary.members = [0, 1, 2]
    worst = worst_figure(data, ACCURACY)
    assert worst[0] == (20, 0.0)
    assert worst[-1][0] == 120
    chart = figure_charts(data, ACCURACY)[0]
    assert chart.plot is not None
    assert all(
        float(point.split(",")[1]) <= chart.plot.box.bottom for c in chart.plot.curves for point in c.points.split()
    )
    assert "peer-3 after" not in Page(render(data)).words


def test_only_shapes_of_a_drawing_get_into_the_page(run: Path) -> None:
    inside = "<style>*{display:none}</style><script>alert(1)</script><image href='http://a/b'/><a href='x'/>"
    kept = "<text onclick='alert(1)' x='1'>peer</text>"
    drawing = f"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'>{inside}{kept}</svg>"
    (run / "graph.svg").write_text(drawing)
    text = render(load_run(run))
    assert '<text x="1">peer</text></svg>' in text
    assert "alert(1)" not in text
    assert "display:none" not in text.split("</style>")[1]
    assert "onclick" not in text


def test_a_drawing_that_is_nested_without_end_does_no_harm(run: Path) -> None:
    nested = "<g>" * 20_000 + "<text>deep</text>" + "</g>" * 20_000
    (run / "graph.svg").write_text(
        f"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'>{nested}<text>flat</text></svg>"
    )
    text = render(load_run(run))
    assert ("<text>flat</text>" in text, "deep" in text) == (True, False)


def test_many_peers_are_drawn_in_part_and_listed_in_part(tmp_path: Path) -> None:
    peers = range(250)
    data = RunData(
        tmp_path,
        rounds=[round_record(peer, number, 20) for number in range(20) for peer in peers],
        evaluations=[evaluation(peer, 20, "test", offset=0) for peer in peers],
        links=[LinkRecord(peer=peer, neighbor=(peer + 1) % 250, frames=20) for peer in peers],
    )
    text = render(data)
    page = Page(text)
    assert "32 of 250 peers are drawn one by one" in page.words
    assert "50 more are left out" in page.words
    assert len(text) < 1_000_000


def test_a_page_that_cannot_be_written_is_an_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be written"):
        write_report(run, tmp_path / "nowhere" / "report.html")


def test_what_a_budget_chose_is_drawn_only_where_it_chose(run: Path) -> None:
    data = load_run(run)
    assert "Fraction sent" not in render(data)
    data = replace(data, rounds=[replace(row, fraction=0.02 if row.round < 60 else 0.01) for row in data.rounds])
    assert "Fraction sent" in render(data)
    assert "Bits of each number" not in render(data)
