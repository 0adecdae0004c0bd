"""The site, built as `make docs` builds it: a link to a page or heading that does not exist is an error, and so is a
page that no index lists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser import SIZES, Page
from tests.docs.walk import ROOT
from tools.draw_concepts import FOLDER, PICTURES

pytest.importorskip("sphinx", reason="the site needs the extra docs")

PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-c", str(ROOT / "docs")]
    return subprocess.run([*command, str(source), str(site)], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert (built.returncode, built.stderr) == (0, "")
    return folder


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert "url=docs/index.html" in (site / "index.html").read_text()
    for page in PAGES:
        assert (site / page.relative_to(ROOT)).with_suffix(".html").exists()
    # What moved leads on, from pages that are gone and from headings of pages that are there.
    gone = (site / "docs" / "tutorials" / "first-run.html").read_text()
    assert 'url=../running.html"' in gone
    assert '"use-the-model": "../running.html#use-the-model"' in gone
    assert '"before-010": "upgrading.html#what-stays-compatible"' in (site / "docs" / "upgrading.html").read_text()
    # The lists of the index are the navigation of every page.
    navigation = (site / "docs" / "glossary.html").read_text()
    assert {"Tutorials", "How-to guides", "Concepts", "Reference", "Studies"} <= set(
        re.findall(r'class="caption-text">([^<]+)<', navigation)
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", ["index", "own-loop", "commands", "configuration", "studies/race", "concepts/journal"])
def test_a_page_fits_a_phone_and_a_laptop_and_passes_axe_in_light_and_dark(
    chromium: Any, site: Path, page: str
) -> None:
    for size in SIZES:
        shown = Page(chromium, (site / "docs" / f"{page}.html").as_uri(), size=size)
        assert shown.complaints == []
        for scheme in ("dark", "light"):
            shown.page.emulate_media(color_scheme=scheme)
            assert shown.violations() == []
        assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shown.close()


@pytest.mark.slow
def test_lines_that_are_new_are_seen_whole_on_a_laptop_and_what_is_cut_fades(chromium: Any, site: Path) -> None:
    shown = Page(chromium, (site / "docs" / "own-loop.html").as_uri(), size=SIZES[1])
    script = shown.page.locator("pre", has_text="def samples").first
    lines = script.locator(".hll").all_inner_texts()
    assert len(lines) == 6
    assert all("# new" in line for line in lines)
    seen = """pre => [...pre.querySelectorAll('.hll')].every(line => { const words = document.createRange();
      words.selectNodeContents(line);
      return words.getBoundingClientRect().right < pre.getBoundingClientRect().right; })"""
    assert script.evaluate(seen)
    shown.page.set_viewport_size({"width": SIZES[0][0], "height": SIZES[0][1]})
    shown.page.wait_for_selector("pre.cut[tabindex='0']")
    script.evaluate("e => e.scrollTo(e.scrollWidth, 0)")
    shown.page.wait_for_selector("pre:not(.cut)[tabindex='0']")
    shown.close()


def test_a_broken_link_or_a_page_that_nobody_lists_stops_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Index\n\n- [One](one.md)\n")
    (docs / "one.md").write_text("# One\n\n## Part\n\n[good](#part), [no heading](#nothing), [no page](two.md)\n")
    (docs / "three.md").write_text("# Three\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    said = re.findall(r"(\w+\.md)\S*: WARNING: (.*)", built.stderr)
    assert len(said) == 3
    assert any(page == "one.md" and "nothing" in words for page, words in said)
    assert any(page == "one.md" and "two.md" in words for page, words in said)
    assert any(page == "three.md" and "toctree" in words for page, words in said)


def test_the_pictures_are_those_that_the_tool_draws() -> None:
    for name, draw in PICTURES.items():
        assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == draw().svg()
    assert {file.stem for file in FOLDER.glob("*.svg")} == set(PICTURES)


def test_addresses_elsewhere_are_well_formed() -> None:
    """They are not asked: a build needs no network."""
    for page in PAGES:
        for address in re.findall(r"\]\((\w+:[^)\s]*)\)", page.read_text(encoding="utf-8")):
            parts = urlsplit(address)
            assert parts.scheme == "https", f"{page.name}: {address}"
            assert re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", parts.netloc), f"{page.name}: {address}"
