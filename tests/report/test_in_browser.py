"""The report in a real browser: on a phone and a laptop, in light and dark, with pointer, finger and keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peer.report.compare_page import compare_page
from peer.report.comparison import contenders
from peer.report.run_data import load_run
from peer.report.run_page import write_report
from peer.state.metrics import Summary
from tests.browser import SIZES, Page
from tests.report.sample_run import write_sample_run
from tests.report.test_comparison import write_run

CHART = "#accuracy svg.plot"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = write_sample_run(tmp_path_factory.mktemp("runs") / "digits")
    summary = Summary.load(run / "summary.json")
    # Names are as long as they come, and try what markup they can.
    summary.peer_names[0] = "<b>the_kitchen_" + "x" * 40
    summary.name = "<script>document.title='gone'</script>"
    summary.commands = ["sotto up --config " + "a/very/long/path" * 12]
    summary.save(run / "summary.json")
    return write_report(run).as_uri()


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wider_than_the_page_or_comes_from_elsewhere(
    chromium: Any, report: str, size: tuple[int, int]
) -> None:
    shown = Page(chromium, report, size=size)
    assert shown.too_wide() == []
    assert shown.requests == [report]
    assert shown.complaints == []
    assert shown.page.title() == "<script>document.title='gone'</script> · Sottovoce"
    shown.close()


def test_contrast_names_and_keyboard_pass_axe_in_light_and_dark(chromium: Any, report: str) -> None:
    shown = Page(chromium, report)
    assert shown.violations() == []
    # The graph is part of the page, and has its colours.
    assert shown.page.locator(".graph svg circle").count() == 4
    light = shown.colours(".graph", ["backgroundColor"]), shown.colours(".graph svg .title", ["fill"])
    shown.page.emulate_media(color_scheme="dark")
    assert shown.violations("color-contrast") == []
    dark = shown.colours(".graph", ["backgroundColor"]), shown.colours(".graph svg .title", ["fill"])
    assert light == ({"backgroundColor": "rgb(255, 255, 255)"}, {"fill": "rgb(28, 35, 41)"})
    assert dark == ({"backgroundColor": "rgb(27, 33, 37)"}, {"fill": "rgb(230, 234, 236)"})
    shown.close()


def test_the_pointer_reads_values_off_a_chart(chromium: Any, report: str) -> None:
    shown = Page(chromium, report)
    chart = shown.page.locator(CHART).first
    box = chart.bounding_box()
    tip = shown.page.locator("#accuracy .tip").first
    # The last evaluation is at the right end of the plot.
    chart.hover(position={"x": box["width"] * 0.94, "y": box["height"] * 0.8})
    words = tip.inner_text().split("\n")
    assert words[0].startswith("round 120")
    place = tip.bounding_box()
    assert box["y"] < place["y"] < box["y"] + box["height"] / 2
    assert box["x"] <= place["x"]
    assert place["x"] + place["width"] < box["x"] + 0.94 * box["width"]
    figures = dict(line.rsplit(" ", 2)[:2] for line in words if "%" in line)
    assert figures["one process, all data, full precision"] == "97.5"
    # Offsets of the sample: the averaged model loses label mod 3, the worst peer three more of each class.
    assert float(figures["averaged model"]) == pytest.approx(100.0, abs=2.6)
    assert float(figures["worst peer"]) < float(figures["averaged model"])
    shown.page.mouse.move(0, 0)
    assert tip.is_hidden()
    shown.close()


def test_the_line_under_the_pointer_is_named_as_text(chromium: Any, report: str) -> None:
    shown = Page(chromium, report)
    chart = shown.page.locator(CHART).first
    chart.scroll_into_view_if_needed()
    spot = chart.evaluate(
        """plot => { const line = plot.querySelector('.line.peer'); const p = line.points[3];
        const at = new DOMPoint(p.x, p.y).matrixTransform(plot.getScreenCTM()); return [at.x, at.y]; }"""
    )
    shown.page.mouse.move(*spot)
    assert "<b>the_kitchen_" in shown.page.locator("#accuracy .tip").first.inner_text()
    assert shown.page.locator(f"{CHART} .line.marked").count() == 1
    assert shown.too_wide() == []
    shown.close()


def test_the_arrow_keys_step_from_value_to_value(chromium: Any, report: str) -> None:
    shown = Page(chromium, report)
    chart, tip = shown.page.locator(CHART).first, shown.page.locator("#accuracy .tip").first
    chart.focus()
    rounds = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End"):
        shown.page.keyboard.press(key)
        rounds.append(tip.inner_text().split("\n")[0])
    assert [int(text.removeprefix("round ")) for text in rounds] == [20, 40, 60, 40, 120]
    shown.page.keyboard.press("Escape")
    assert tip.is_hidden()
    shown.close()


def test_a_finger_reads_values_off_a_chart_on_a_phone(chromium: Any, report: str) -> None:
    shown = Page(chromium, report, size=SIZES[0])
    shown.page.locator(CHART).first.tap()
    tip = shown.page.locator("#accuracy .tip").first
    assert tip.is_visible()
    assert "worst peer" in tip.inner_text()
    assert shown.too_wide() == []
    shown.close()


def test_the_page_is_whole_without_its_script(chromium: Any, tmp_path: Path) -> None:
    file = write_report(write_sample_run(tmp_path / "digits"))
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator("svg.plot polyline").count() > 40
    assert page.locator(".card").count() == 6
    context.close()


def test_runs_beside_each_other_fit_a_phone_and_can_be_told_apart(chromium: Any, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{n}", {20: 0.5, 40: 0.6 + n / 50}, algorithm=f"algorithm-{n}") for n in range(9)]
    file = tmp_path / "comparison.html"
    file.write_text(compare_page(contenders([load_run(run) for run in runs])), encoding="utf-8")
    shown = Page(chromium, file.as_uri(), size=SIZES[0])
    assert shown.too_wide() == []
    assert shown.requests == [file.as_uri()]
    assert shown.violations() == []
    shown.page.emulate_media(color_scheme="dark")
    assert shown.violations("color-contrast") == []
    looks = "e => getComputedStyle(e).stroke + getComputedStyle(e).strokeDasharray"
    lines = shown.page.locator("svg.plot").first.locator("polyline.line")
    assert len({line.evaluate(looks) for line in lines.all()}) == 9
    shown.close()
