from __future__ import annotations

import ast
from pathlib import Path

import peer
from peer.net import rpc


def test_grpc_is_imported_in_one_place_where_its_environment_is_set_first() -> None:
    """It reads its environment when it is imported, whoever imports it first."""
    root = Path(peer.__file__).parent
    importing = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "grpc" for name in names):
                importing.append(path)
                break
    assert importing == [Path(rpc.__file__)]
    source = importing[0].read_text()
    assert source.index('setdefault("GRPC_ENABLE_FORK_SUPPORT"') < source.index("\nimport grpc\n")
