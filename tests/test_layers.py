"""The arrows between the packages: what each may import. Pure layers see no clock, socket, disk or torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import peer

ROOT = Path(peer.__file__).parent

# Package or module → what it may import from `peer`. Only the daemon and the drivers beside it know everyone.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "native": set(),
    "proto": set(),
    "run_progress": set(),
    "config_schema": set(),
    "random": {"native", "compress"},
    "compress": {"native", "random", "errors"},
    "wire": {"compress", "native", "errors"},
    "gossip": {"compress", "wire", "random", "errors"},
    "config": {"errors", "config_schema"},
    "state": {"errors"},
    "train": {"compress", "native", "random", "config", "errors"},
    "net": {"config", "errors", "proto"},
    "node": {"compress", "wire", "gossip", "state", "config", "proto", "errors"},
    "config_writer": {"config", "config_schema", "net", "errors"},
    "run_setup": {"compress", "wire", "gossip", "random", "train", "node", "config", "errors"},
    "run_summary": {"compress", "gossip", "train", "run_setup", "state", "config"},
    "daemon": {
        "compress", "wire", "gossip", "train", "node", "net", "state", "run_setup", "run_summary", "config", "proto",
        "errors",
    },
    "simulate": {
        "compress", "wire", "gossip", "random", "train", "node", "net", "state", "run_setup", "run_summary",
        "run_progress", "config", "config_writer", "errors",
    },
    "ops": {
        "compress", "wire", "gossip", "random", "train", "net", "state", "simulate", "run_setup", "run_summary",
        "run_progress", "config", "config_schema", "config_writer", "errors",
    },
}  # fmt: skip

PURE = ("compress", "wire", "gossip")
FORBIDDEN_IN_PURE = {"asyncio", "socket", "time", "datetime", "logging", "os", "pathlib", "random", "secrets", "torch",
                     "threading", "sqlite3", "grpc", "subprocess", "tempfile", "shutil"}  # fmt: skip


def modules_of(name: str) -> list[Path]:
    package = ROOT / name
    return sorted(package.rglob("*.py")) if package.is_dir() else [ROOT / f"{name}.py"]


def imports_of(path: Path) -> set[str]:
    """Return the dotted names that a module imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            assert node.module is not None
            if node.module == "peer":
                found |= {f"peer.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_imports_point_toward_the_pure(name: str) -> None:
    for path in modules_of(name):
        for imported in imports_of(path):
            if imported.startswith("peer."):
                target = imported.split(".")[1]
                assert target in ALLOWED[name] | {name, "__version__"}, f"{path.relative_to(ROOT)} imports {imported}"


@pytest.mark.parametrize("name", PURE)
def test_pure_layers_touch_nothing_outside(name: str) -> None:
    for path in modules_of(name):
        roots = {imported.split(".")[0] for imported in imports_of(path)}
        assert not roots & FORBIDDEN_IN_PURE, f"{path.relative_to(ROOT)} imports {roots & FORBIDDEN_IN_PURE}"


def test_nothing_is_ever_pickled() -> None:
    for path in ROOT.rglob("*.py"):
        roots = {imported.split(".")[0] for imported in imports_of(path)}
        assert not roots & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}, path
        text = path.read_text()
        assert "torch.load" not in text, path
        assert "allow_pickle=True" not in text, path
