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
    "random": {"native", "compress"},
    "compress": {"native", "random", "errors"},
    "wire": {"compress", "native", "errors"},
    "gossip": {"compress", "wire", "random", "errors"},
    "link": {"errors"},
    "chunks": {"errors", "proto", "envelope"},
    "hello": {"errors", "proto"},
    "config": {"errors", "schema"},
    "metrics": set(),
    "disk": set(),
    "journal": {"disk", "errors"},
    "store": {"disk", "journal", "errors"},
    "notice": {"errors", "gossip", "proto"},
    "state_files": {"disk", "journal", "store", "errors"},
    "durable": {
        "disk",
        "gossip",
        "journal",
        "state_files",
        "store",
        "link",
        "notice",
        "participant",
        "metrics",
        "wire",
        "errors",
    },
    "durable_pair": {"disk", "journal", "state_files", "store", "pair_participant", "errors"},
    "train": {"compress", "gossip", "native", "random", "config", "errors"},
    "revocation": {"errors"},
    "security": {"config", "errors", "revocation"},
    "admission": set(),
    "relay": {"admission", "errors", "proto"},
    "transport": {
        "admission",
        "relay",
        "envelope",
        "chunks",
        "config",
        "errors",
        "hello",
        "proto",
        "security",
        "tcp_info",
    },
    "participant": {"compress", "wire", "gossip", "notice", "errors", "metrics"},
    "pair_participant": {"compress", "wire", "gossip", "errors", "metrics", "participant"},
}

PURE = ("compress", "wire", "gossip", "link", "chunks", "admission")
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
