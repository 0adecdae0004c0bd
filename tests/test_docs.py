"""What README and docs/ tell people to type exists, and so do the files that they point to."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from peer import __version__, gossip
from peer.cli import cli
from peer.cli.app import EXIT_CODES
from peer.compress import COMPRESSORS
from peer.config import options as config
from peer.gossip.graphs import FAMILIES
from peer.lab.description import read_description
from peer.lab.sweep.sweep import Sweep, cells
from peer.library.peer import Peer
from tests.test_layers import ROOMS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "deploy" / "README.md",
]


def command_lines(page: Path) -> list[str]:
    """Return every line of a block of code that calls sotto."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("sotto ")]


LINES = [pytest.param(line, id=f"{page.name}: {line}") for page in PAGES for line in command_lines(page)]


def parsed(line: str) -> tuple[click.Command, list[str]]:
    """Return the command that a line calls, and its words after that; comments, redirections and the arguments of a
    training script are cut off."""
    # docs/commands.md puts an explanation beside some examples, two blanks away.
    words = shlex.split(re.split(r"\s{2,}| > | -- | \[OPTIONS\]", line)[0], comments=True)[1:]
    command: click.Command = cli
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def test_there_is_something_to_test() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize("line", LINES)
def test_a_command_that_the_documentation_shows_exists(line: str) -> None:
    command, words = parsed(line)
    assert command is not cli or not words or words[0].startswith("-") or words[0] == "COMMAND", line
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("-") and word != "-"} <= known


@pytest.mark.parametrize("line", LINES)
def test_the_values_that_it_shows_exist(line: str) -> None:
    _, words = parsed(line)
    names = {"--algorithm": gossip.ALGORITHMS, "--compressor": COMPRESSORS, "--graph": (*FAMILIES, "file")}
    for option, value in itertools.pairwise(words):
        if option in names:
            assert value in names[option]
        if option in ("--set", "-s"):
            section, key = value.partition("=")[0].split(".")[:2]
            assert key in config.SECTIONS[section].model_fields


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_that_are_named_exist(page: Path) -> None:
    sections = "|".join(config.SECTIONS)
    for section, key in re.findall(rf"`({sections})\.(\w+)", page.read_text(encoding="utf-8")):
        # `peer.wire` is a module of the package, `security.py` a file, `peer.step` a method in a training script.
        is_other = section == "peer" and (is_module(key) or hasattr(Peer, key))
        if key not in ("toml", "pem", "key", "py", "safetensors") and not is_other:
            assert key in config.SECTIONS[section].model_fields, f"{section}.{key}"


CONFIGURATIONS = [
    pytest.param(text, id=f"{page.name}: {text.splitlines()[0]}")
    for page in PAGES
    for text in re.findall(r"^```toml\n(\[.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]
"""What begins with a section is part of a peer's file; studies and sweeps begin with a name."""


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_a_configuration_that_it_shows_is_valid(text: str, tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_text(text)
    shown = config.load(tmp_path / "peer.toml", environment={})
    assert shown != config.load(environment={})


def test_there_are_configurations_to_check() -> None:
    assert len(CONFIGURATIONS) >= 8


def test_the_sweep_that_is_shown_has_its_cells(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "links.md").read_text(encoding="utf-8")
    (grid,) = re.findall(r"^```toml\n([^`]*?\[axes\].*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "grid.toml").write_text(grid)
    assert len(cells(read_description(Sweep, tmp_path / "grid.toml"))) == 2 * 2 * 2 * 3


def test_the_features_list_every_algorithm_and_compressor() -> None:
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    for name in (*gossip.ALGORITHMS, *COMPRESSORS):
        assert f"`{name}`" in text


def test_the_readme_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "", prose))) <= 350


def test_troubleshooting_has_every_exit_code_and_no_message_that_no_code_writes() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    codes = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE))
    assert codes == {str(code): meaning.replace(" in sotto", " in `sotto`") for code, meaning in EXIT_CODES.items()}
    written = " ".join(" ".join(strings(file)) for file in sorted((ROOT / "peer").rglob("*.py")))
    messages = re.findall(r"^\| `([^`]*[a-z]{3} [^`]*)` \|", text, re.MULTILINE)
    assert len(messages) > 20
    for message in messages:
        for words in message.split("…"):
            assert words.strip(" :") in written, message


def test_the_citation_is_valid_and_names_this_release() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format"]
    subprocess.run([*command, str(ROOT / "CITATION.cff")], check=True, capture_output=True)
    assert f"version: {__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()


def strings(file: Path) -> Iterator[str]:
    """Yield the texts of a module; what an f-string fills in is left out."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_architecture_lists_each_room_below_those_that_it_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("\n| room |")[2].partition("\n\n")[0]
    listed = [room for row in table.splitlines()[2:] for room in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert set(listed) == set(ROOMS) - {"__main__"}
    for room in listed:
        assert ROOMS[room] <= set(listed[: listed.index(room)]), room


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_tools_and_tests_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"\b(?:tools|tests)/[\w/-]+(?:\.py|\.sh|\.toml)?", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:tools|tests)[\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_module(name: str) -> bool:
    return (ROOT / "peer" / name).is_dir() or (ROOT / "peer" / f"{name}.py").is_file()
