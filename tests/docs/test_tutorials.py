"""Each tutorial, followed to the letter but for the lengths of two runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.walk import ROOT, walk
from tests.links.namespaces import needs_links

TUTORIALS = ROOT / "docs" / "tutorials"
NEEDS_ROOT = {"thin-links", "a-study"}
# From a checkout: the attacks are part of the tests. `PYTHONPATH` leads there.
PAGES = ["first-run", "three-devices", "thin-links", "reading-a-report", "a-study", "a-hostile-member"]

# Shorter runs than those of a reader: they only have to last until a command of the page has found them.
SHORTER = {"first-run": {"--rounds 1000": "--rounds 400"}, "three-devices": {"--rounds 1000": "--rounds 600"}}

# Several processes each, on machines that may be busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("warm_python")]


def marked(name: str) -> object:
    if name not in NEEDS_ROOT:
        return name
    return pytest.param(name, marks=[pytest.mark.root, needs_links])


def test_every_tutorial_is_followed() -> None:
    assert {page.stem for page in TUTORIALS.glob("*.md")} == set(PAGES)


@pytest.mark.parametrize("name", [marked(name) for name in PAGES])
def test_a_tutorial_can_be_followed(name: str, tmp_path: Path) -> None:
    walk(TUTORIALS / f"{name}.md", tmp_path, replace=SHORTER.get(name), timeout_s=800)
