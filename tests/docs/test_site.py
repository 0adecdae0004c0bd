"""The site, built as `make docs` builds it: a link to a page or heading that does not exist is an error, and so is a
page that no index lists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.walk import ROOT
from tools.draw_concepts import FOLDER, PICTURES

pytest.importorskip("sphinx", reason="the site needs the extra docs")

PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-c", str(ROOT / "docs")]
    return subprocess.run([*command, str(source), str(site)], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert (built.returncode, built.stderr) == (0, "")
    assert "url=docs/index.html" in (tmp_path / "index.html").read_text()
    for page in PAGES:
        assert (tmp_path / page.relative_to(ROOT)).with_suffix(".html").exists()
    # What moved leads on, from pages that are gone and from headings of pages that are there.
    gone = (tmp_path / "docs" / "tutorials" / "first-run.html").read_text()
    assert 'url=../running.html"' in gone
    assert '"use-the-model": "../running.html#use-the-model"' in gone
    assert '"before-010": "upgrading.html#from-01"' in (tmp_path / "docs" / "upgrading.html").read_text()
    # The lists of the index are the navigation of every page.
    navigation = (tmp_path / "docs" / "glossary.html").read_text()
    assert {"Tutorials", "How-to guides", "Concepts", "Reference", "Studies"} <= set(
        re.findall(r'class="caption-text">([^<]+)<', navigation)
    )


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
