"""Each tutorial, followed to the letter but for the lengths of some runs. One script grows from page to page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.walk import ROOT, blocks, patched, walk
from tests.links.namespaces import needs_links

DOCS = ROOT / "docs"
NEEDS_ROOT = {"links"}
# From a checkout: the attacks are part of the tests. `PYTHONPATH` leads there.
PAGES = ["running", "several-devices", "planning", "links", "tutorials/a-hostile-member"]
ELSEWHERE = {
    "own-loop": "tests/examples/test_own_loop.py",
    "tutorials/language-model": "tests/examples/test_language_model.py",
}

# Shorter runs than those of a reader: they only have to last until a command of the page has found them.
SHORTER = {"running": {"--rounds 1000": "--rounds 400"}}
STEPS = {"planning": ("steps=1200", "steps=300")}
"""What stands in the script for its steps, and what is enough of them."""

# Several processes each, on machines that may be busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("warm_python")]


def marked(name: str) -> object:
    if name not in NEEDS_ROOT:
        return name
    return pytest.param(name, marks=[pytest.mark.root, needs_links])


def grown(page: str) -> str:
    """Return the script of the first page, as it is when a reader comes to `page`."""
    (script,) = (block.text for block in blocks(DOCS / "own-loop.md") if block.file == "train.py")
    (lines,) = (block.text for block in blocks(DOCS / "running.md") if block.language == "diff")
    script = re.sub(r" +# new$", "", script, flags=re.MULTILINE)
    return script if page == "running" else patched(script, lines)


def test_every_tutorial_is_followed() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8").partition("\n## Tutorials\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\.md\)", text, re.MULTILINE)
    assert sorted(listed) == sorted([*PAGES, *ELSEWHERE])
    assert all(Path(name).name in (ROOT / test).read_text(encoding="utf-8") for name, test in ELSEWHERE.items())


@pytest.mark.parametrize("name", [marked(name) for name in PAGES])
def test_a_tutorial_can_be_followed(name: str, tmp_path: Path) -> None:
    script, (reader, ours) = grown(name), STEPS.get(name, ("", ""))
    assert reader in script
    (tmp_path / "train.py").write_text(script.replace(reader, ours))
    walk(DOCS / f"{name}.md", tmp_path, replace=SHORTER.get(name), timeout_s=800)
