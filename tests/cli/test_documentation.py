"""Help texts and the reference pages that are rendered from them."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import sottovoce

from peer.cli import cli
from tests.cli.runner import sotto
from tools import render_docs

ROOT = Path(__file__).resolve().parents[2]

PRIVATE = re.compile(
    r"^[ \t>.]*(?:from peer(?:\.\w+)* import|import peer\b)|`peer\.(?:errors|library|train)\b", re.MULTILINE
)
"""What a user would copy: an import of the package `peer`, or the full name of something in it."""
PUBLIC = ast.parse((ROOT / "peer/library/api/sottovoce/__init__.py").read_text("utf-8"))

COMMANDS = {path: command for path, command, _ in render_docs.walk()}


def test_all_commands_are_found() -> None:
    expected = "init, init cluster, run, up, status, stop, export, simulate, report, version, lab graph, admin sign"
    assert {f"sotto {name}" for name in expected.split(", ")} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_explains_itself_with_examples(path: str) -> None:
    result = sotto(*path.split()[1:], "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert path in result.stdout
    command = COMMANDS[path]
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{path} {parameter.opts}"


@pytest.mark.parametrize("path", COMMANDS)
def test_examples_parse(path: str) -> None:
    """Each example names an existing command, and only options that it has."""
    for line in (COMMANDS[path].help or "").splitlines():
        words = (
            line.split("  ")[0].split() if line.strip().startswith("sotto ") else line.strip().split("  ")[0].split()
        )
        if "sotto" not in words:
            continue
        words = words[words.index("sotto") + 1 :]
        words = words[: words.index(">")] if ">" in words else words
        command: click.Command = cli
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-") and word != "-"} <= known, line


@pytest.mark.parametrize("path", COMMANDS)
def test_the_first_sentence_of_a_help_text_fits_into_the_list_of_commands(path: str) -> None:
    assert not COMMANDS[path].get_short_help_str(limit=90).endswith("..."), path


def test_every_command_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    for path in COMMANDS:
        assert f"\n## {path}\n" in page


def test_the_rendered_pages_are_up_to_date() -> None:
    assert render_docs.stale_pages() == []


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "commands.md").write_text("old")
    assert render_docs.stale_pages(tmp_path) == [
        "docs/commands.md is out of date",
        "docs/configuration.md is missing",
        "docs/api.md is missing",
    ]


def test_pages_and_examples_import_only_what_is_public() -> None:
    """Help texts and docstrings of public names are on pages too."""
    assert PRIVATE.search("this:\n    from peer.train.tasks import digits")
    assert PRIVATE.search(">>> import peer.train.tasks")
    assert PRIVATE.search("the layers of `peer.train.layers`")
    assert not PRIVATE.search("they differ\nfrom peer to peer: `peer.step()`, `peer.device`, `peer/train/layers.py`")
    pages = [ROOT / "README.md", *(ROOT / "tests/examples").glob("own_*.py"), *(ROOT / "docs").rglob("*.md")]
    pages += (ROOT / "docs/examples").glob("*.py")
    assert len(pages) > 40
    assert [str(page.relative_to(ROOT)) for page in pages if PRIVATE.search(page.read_text("utf-8"))] == []


def test_texts_that_the_program_writes_import_only_what_is_public() -> None:
    """Such as the card of a model. Docstrings are for those who change the code."""
    for path in (ROOT / "peer").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert not PRIVATE.search(node.value), f"{path}:{node.lineno}"


def test_every_public_name_is_what_its_types_say_and_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    imports = [node for node in ast.walk(PUBLIC) if isinstance(node, ast.ImportFrom)]
    found = {alias.name: node.module for node in imports for alias in node.names if (node.module or "")[:5] == "peer."}
    assert sorted(found) == sorted(sottovoce.__all__)
    for name, module in found.items():
        assert getattr(sottovoce, name) is getattr(importlib.import_module(module or ""), name)
        assert f"\n### sottovoce.{name}\n" in page or f"\n| `{name}` |" in page, name
    with pytest.raises(AttributeError, match="'sottovoce' has no attribute 'joined'"):
        _ = sottovoce.joined


def test_a_task_that_imports_the_package_leaves_out_what_no_task_needs() -> None:
    code = """import sys, sottovoce
assert {"join", "RMSE"} <= set(dir(sottovoce))
print(sottovoce.RMSE.name, *sys.modules)"""
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "peer.train.metrics" in listed
    assert [name for name in listed if name.startswith(("peer.library", "peer.simulate"))] == []
