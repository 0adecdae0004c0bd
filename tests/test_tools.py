"""Tools and stress tests stand outside: they use what the package offers, and are found without edits of `sys.path`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = sorted(
    path
    for folder in ("tools", "tests/stress")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
PRIVATE = re.compile(r"_[a-z]\w*")
EDITS_SYS_PATH = re.compile(r"sys\.path(\[[^]]*\])?\s*(\+?=[^=]|\.(insert|append|extend|remove)\b)|syspath" "_prepend")
NO_MEMBERS = {"_proto"}
"""Words that look like private names: a folder of protoc."""
OPTIONAL = {"tests.stress.fuzz", "tests.stress.fuzz_meaning_guided", "tools.lora_study"}
"""What needs a package that is not among those for development on every machine."""


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every private member that code takes from an object or module that is not its own.

    Members of other packages are theirs to change: only those of `peer` are meant, and of what was made from it.
    """
    foreign = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] not in ("peer", "tools", "tests")
    }
    own = {
        node.attr if isinstance(node, ast.Attribute) else node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            owner: ast.expr = node.value
            is_self = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            is_foreign = isinstance(owner, ast.Name) and owner.id in foreign
            # What a class takes from itself and nothing in this file has made is of a class that it inherits.
            if not is_foreign and not (is_self and node.attr in own):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if PRIVATE.fullmatch(alias.name))
        elif isinstance(node, ast.Constant) and PRIVATE.fullmatch(str(node.value)) and node.value not in NO_MEMBERS:
            # For getattr, setattr, monkeypatch and whatever else takes a name.
            yield node.lineno, str(node.value)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_private_is_used(path: Path) -> None:
    assert list(private_names(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("transport._links", ["_links"]),
        ("transports[0]._links", ["_links"]),
        ("make()._links.x", ["_links"]),
        ("self.transport._links", ["_links"]),
        ("from peer.net.transport import _open_channel", ["_open_channel"]),
        ("monkeypatch.setattr(Session, '_late_box', [])", ["_late_box"]),
        ("getattr(session, '_late_box')", ["_late_box"]),
        ("super()._handle(event)", ["_handle"]),
        ("class A:\n def _b(self): self._c = self._b()", []),
        ("class A(B):\n def c(self): self._b()", ["_b"]),
        ("__name__, x.__class__", []),
        ("import os\nos._exit(0)", []),
        ("import peer.net\npeer.net._x", ["_x"]),
    ],
)
def test_private_members_are_found(code: str, names: list[str]) -> None:
    assert [name for _, name in private_names(ast.parse(code))] == names


def test_no_test_and_no_tool_edits_the_search_path() -> None:
    # A process that stands in for the interpreter sets the path that the interpreter would have.
    files = {*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")} - {ROOT / "tests" / "warm_python.py"}
    assert len(files) > 200
    assert [str(path) for path in files if EDITS_SYS_PATH.search(path.read_text(encoding="utf-8"))] == []
    assert EDITS_SYS_PATH.search("sys.path" + ".insert(0, 'tools')")
    assert EDITS_SYS_PATH.search("sys.path" + "[:0] = ['tools']")


def test_every_tool_can_be_imported() -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in OUTSIDE]
    chosen = [
        name.removesuffix(".__init__")
        for name in modules
        if name not in OPTIONAL and not name.startswith("tools.rivals.hivemind") and not name.endswith("__main__")
    ]
    assert {"tools.bench_wire", "tools.scale", "tests.stress.chaos"} <= {*chosen}
    # In a process of its own: some set what counts only before numpy and gRPC are imported.
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", code, *chosen], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_make_says_what_takes_long_and_where_the_site_is() -> None:
    def said(*words: str) -> list[str]:
        done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        return [line if line.startswith("echo '") else "…" for line in lines if "echo '" in line or "pip" in line]

    first, _, second, _ = said("--what-if=pyproject.toml", "run")
    assert "torch" in first
    assert "takes minutes" in second
    assert "build/site/" in said("docs")[-1]
