"""The arrows between the rooms of the package. Pure layers see no clock, socket, disk or torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import peer

ROOT = Path(peer.__file__).parent

# Room (a folder of `peer`, or a module beside them) → the rooms that it may import. In the order of the arrows: a room
# imports only from rooms above it.
ROOMS: dict[str, set[str]] = {
    "foreign_text": set(),
    "terminal": {"foreign_text"},
    "errors": {"foreign_text"},
    "foreign_values": {"errors"},
    "native": {"errors"},
    "proto": set(),
    "files": {"errors"},
    "records": set(),
    "protocol": set(),
    "random": {"native"},
    "rate_limits": set(),
    "config": {"errors", "files", "foreign_text", "foreign_values"},
    "links": {"errors", "files"},
    "compress": {"errors", "native", "random"},
    "wire": {"compress", "errors", "foreign_text", "native"},
    "gossip": {"compress", "errors", "foreign_values", "native", "random", "records", "wire"},
    "state": {"config", "errors", "files", "foreign_values", "protocol", "records"},
    "net": {
        "config", "errors", "files", "foreign_text", "foreign_values", "proto", "protocol", "rate_limits",
        "records", "wire",
    },
    "train": {
        "compress", "config", "errors", "files", "foreign_text", "foreign_values", "native", "random",
        "records", "wire",
    },
    "node": {
        "compress", "config", "errors", "gossip", "proto", "protocol", "rate_limits", "records", "state",
        "wire",
    },
    "run": {
        "compress", "config", "errors", "files", "gossip", "native", "net", "node", "random", "records", "state",
        "train", "wire",
    },
    "simulate": {
        "compress", "config", "errors", "gossip", "node", "random", "records", "run", "state", "train",
        "wire",
    },
    "daemon": {
        "compress", "config", "errors", "foreign_text", "foreign_values", "gossip", "net", "node", "proto",
        "protocol", "rate_limits", "records", "run", "state", "terminal", "train", "wire",
    },
    "library": {
        "compress", "config", "daemon", "errors", "files", "gossip", "node", "protocol", "records", "run", "simulate",
        "state", "terminal", "train", "wire",
    },
    "ops": {
        "compress", "config", "errors", "files", "foreign_text", "foreign_values", "gossip", "library", "net", "random",
        "records", "run", "simulate", "state", "terminal", "train", "wire",
    },
    "report": {"config", "errors", "files", "foreign_values", "gossip", "ops", "records", "state", "terminal"},
    "lab": {
        "config", "errors", "files", "foreign_values", "gossip", "links", "ops", "records", "report", "run", "simulate",
        "state", "train",
    },
    "planning": {
        "compress", "config", "errors", "gossip", "lab", "links", "random", "run", "simulate", "train",
        "wire",
    },
    "trackers": {"errors", "records", "report", "state"},
    "watch": {
        "config", "errors", "files", "foreign_text", "foreign_values", "ops", "records", "report", "run", "state",
    },
    "cli": {
        "compress", "config", "daemon", "errors", "files", "foreign_text", "gossip", "lab",
        "library", "links", "net", "ops", "planning", "records", "report", "run", "simulate", "state", "terminal",
        "trackers", "train", "watch",
    },
    "__main__": {"cli"},
}  # fmt: skip

# Folder of a room → what of the same room it imports: modules beside the folders, and folders above it in this table.
# No order is given to the modules beside them: there is no circle between modules.
FOLDERS: dict[str, set[str]] = {
    "daemon.device": set(),
    "daemon.notes": {"daemon.neighbors", "daemon.round_frames", "daemon.runtime"},
    "daemon.members": {
        "daemon.local_peer",
        "daemon.neighbors",
        "daemon.notes",
        "daemon.round_frames",
        "daemon.runtime",
        "daemon.watcher",
    },
    "daemon.operator": {"daemon.members", "daemon.pairs", "daemon.parts", "daemon.rounds"},
    "lab.study": {"lab.description", "lab.grid"},
    "lab.sweep": {"lab.description", "lab.grid"},
    "library.integrations": {
        "library.events",
        "library.here",
        "library.kept_state",
        "library.measured",
        "library.peer",
        "library.place",
    },
    "library.api": {
        "library.events",
        "library.here",
        "library.integrations",
        "library.peer",
        "library.place",
        "library.shares",
        "library.simulation",
    },
}

PURE = (
    "errors", "foreign_text", "foreign_values", "protocol", "random", "rate_limits", "records",
    "compress", "wire", "gossip", "config.precision_choice", "node.delivery", "node.membership_codec",
    "node.statements", "node.told",
    "net.chunks", "net.counters", "net.envelope", "net.handler", "net.hello", "net.inbox", "net.liveness",
    "net.neighbor", "net.offences", "net.outbox", "net.receipts",
)  # fmt: skip
FORBIDDEN_IN_PURE = {
    "asyncio", "socket", "time", "datetime", "logging", "os", "pathlib", "random", "secrets", "torch", "threading",
    "sqlite3", "grpc", "subprocess", "tempfile", "shutil",
}  # fmt: skip

# Imports inside functions: in the command line, so that `sotto --help` answers before torch is loaded, and of packages
# that an installation may lack.
LATE = ("cli", "__main__")
OPTIONAL = {
    "PIL", "distributed", "dp_accounting", "mlflow", "onnx", "onnxruntime", "onnxscript", "prometheus_client",
    "pyarrow", "ray", "tensorboard", "tokenizers", "trackio", "wandb",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One name that a module imports."""

    module: str
    """A module of the package by its whole name; of another package, what stands behind `import` or `from`."""
    line: int
    in_function: bool


@cache
def modules() -> Mapping[str, Path]:
    """Return the files of the package by their dotted names below it, generated ones left out."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "proto":
            found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Return what a module imports, at any depth of its code and for types alone as well."""

    def below(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, in_function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path} uses a relative import"
                assert child.module is not None
                for alias in child.names:
                    name = f"{child.module}.{alias.name}"
                    is_module = name.removeprefix("peer.") in modules()
                    yield Import(name if is_module else child.module, child.lineno, in_function)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from below(child, in_function or function)

    return tuple(below(ast.parse(path.read_text()), False))


def own_imports(module: str) -> Iterator[tuple[str, Import]]:
    """Yield the modules of the package that a module imports, by their names below it; not the version."""
    for each in imports_of(modules()[module]):
        if each.module.startswith("peer."):
            yield each.module.removeprefix("peer."), each


def room_of(module: str) -> str:
    return module.partition(".")[0]


def in_room(room: str) -> list[str]:
    return [module for module in modules() if module == room or module.startswith(f"{room}.")]


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """Return a path that leads back to its beginning; empty where there is none."""
    done = set[str]()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for target in sorted(arrows.get(node, ())):
                if found := walk(target, [*path, node]):
                    return found
            done.add(node)
        return []

    return next(filter(None, (walk(node, []) for node in sorted(arrows))), [])


def test_every_module_is_in_a_room() -> None:
    unknown = {room_of(module) for module in modules()} - ROOMS.keys() - {"__init__"}
    assert not unknown, f"{sorted(unknown)}: say in ROOMS what these may import"
    assert all(in_room(room) or room == "proto" for room in ROOMS), "a room of the table is empty"


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_what_the_table_says(room: str) -> None:
    used = set()
    for module in in_room(room):
        for target, each in own_imports(module):
            if room_of(target) != room:
                used.add(room_of(target))
                assert room_of(target) in ROOMS[room], f"peer.{module}, line {each.line}, imports peer.{target}"
    assert used == ROOMS[room], f"{room} may import {sorted(ROOMS[room] - used)} and does not"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_of_a_room_imports_what_the_table_says(folder: str) -> None:
    room, _, _ = folder.partition(".")
    folders_above = list(FOLDERS)[: list(FOLDERS).index(folder)]
    used = set()
    for module in in_room(folder):
        for target, each in own_imports(module):
            if room_of(target) == room and not target.startswith(f"{folder}."):
                inner = next((other for other in FOLDERS if target.startswith(f"{other}.")), target)
                used.add(inner)
                assert inner in FOLDERS[folder], f"peer.{module}, line {each.line}, imports peer.{target}"
                assert inner not in FOLDERS or inner in folders_above, f"{folder} comes before {inner}"
    assert used == FOLDERS[folder], f"{folder} may import {sorted(FOLDERS[folder] - used)} and does not"


def test_every_folder_of_a_divided_room_is_in_the_table() -> None:
    """A room is divided where the table has a folder of it."""
    divided = {folder.partition(".")[0] for folder in FOLDERS}
    found = {".".join(module.split(".")[:2]) for module in modules() if room_of(module) in divided}
    inside = {each for each in found if "." in each and (ROOT / each.replace(".", "/")).is_dir()}
    assert inside == FOLDERS.keys()


def test_a_room_imports_only_from_rooms_above_it() -> None:
    above = set[str]()
    for room, allowed in ROOMS.items():
        assert allowed <= above, f"{room} comes before {sorted(allowed - above)}"
        above.add(room)


def test_there_is_no_circle_between_modules() -> None:
    arrows = {module: {target for target, _ in own_imports(module)} - {module} for module in modules()}
    assert circle(arrows) == []


@pytest.mark.parametrize("room", sorted(ROOMS.keys() - set(LATE)))
def test_imports_stand_at_the_top(room: str) -> None:
    for module in in_room(room):
        for each in imports_of(modules()[module]):
            late = each.in_function and each.module.partition(".")[0] not in OPTIONAL
            assert not late, f"peer.{module}, line {each.line}, imports {each.module} inside a function"


@pytest.mark.parametrize("room", PURE)
def test_pure_layers_touch_nothing_outside(room: str) -> None:
    assert in_room(room)
    for module in in_room(room):
        roots = {each.module.partition(".")[0] for each in imports_of(modules()[module])}
        assert not roots & FORBIDDEN_IN_PURE, f"peer.{module} imports {roots & FORBIDDEN_IN_PURE}"
        for target, each in own_imports(module):
            pure = any(target == one or target.startswith(f"{one}.") for one in (*PURE, "native", "proto"))
            assert pure, f"peer.{module}, line {each.line}, imports peer.{target}, which is not pure"


def test_nothing_is_ever_pickled() -> None:
    for module, path in modules().items():
        roots = {each.module.partition(".")[0] for each in imports_of(path)}
        assert not roots & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}, module
        text = path.read_text()
        assert "torch.load" not in text, module
        assert "allow_pickle=True" not in text, module
