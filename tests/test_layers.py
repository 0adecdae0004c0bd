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
    "errors": {"foreign_text"},
    "foreign_values": {"errors"},
    "foreign_files": {"errors", "foreign_values"},
    "native": {"errors"},
    "own_files": set(),
    "proto": set(),
    "round_record": set(),
    "config_schema": set(),
    "criterion": set(),
    "precision_choice": set(),
    "answers": {"criterion", "foreign_text", "foreign_values"},
    "executors": {"errors"},
    "run_progress": {"criterion"},
    "startup": set(),
    "links": {"own_files", "errors"},
    "random": {"native"},
    "rate_limits": set(),
    "protocol": set(),
    "data_meaning": {"foreign_text"},
    "start_model": {"data_meaning"},
    "config": {"config_schema", "data_meaning", "errors", "foreign_values"},
    "config_writer": {"config", "config_schema", "errors", "own_files"},
    "compress": {"errors", "native", "random"},
    "wire": {"compress", "errors", "native"},
    "gossip": {"compress", "errors", "foreign_values", "native", "random", "round_record", "wire"},
    "state": {
        "criterion", "errors", "foreign_files", "foreign_values", "own_files", "precision_choice", "protocol",
        "round_record",
    },
    "net": {
        "answers", "config", "data_meaning", "errors", "foreign_text", "foreign_values", "own_files", "proto",
        "protocol", "rate_limits", "start_model",
    },
    "train": {
        "compress", "config", "criterion", "data_meaning", "errors", "foreign_values", "native", "own_files",
        "precision_choice", "random", "start_model", "startup",
    },
    "node": {
        "round_record", "compress", "config", "errors", "gossip", "proto", "protocol", "rate_limits", "state", "wire",
    },
    "run_plan": {"compress", "config", "errors", "gossip", "native", "net"},
    "privacy_budget": {"config", "errors", "train"},
    "run_setup": {
        "compress", "config", "criterion", "data_meaning", "errors", "gossip", "node", "precision_choice",
        "privacy_budget", "random", "run_plan", "start_model", "train", "wire",
    },
    "run_summary": {
        "compress", "config", "criterion", "gossip", "native", "precision_choice", "run_plan", "run_setup", "state",
        "train",
    },
    "simulate": {
        "compress", "config", "config_writer", "errors", "foreign_files", "gossip", "node", "own_files",
        "precision_choice", "random", "round_record", "run_plan", "run_progress", "run_setup", "run_summary", "state",
        "train", "wire",
    },
    "daemon": {
        "compress", "config", "criterion", "errors", "foreign_text", "foreign_values", "gossip", "net",
        "node", "precision_choice", "privacy_budget", "proto", "protocol", "rate_limits", "round_record", "run_plan",
        "run_setup", "run_summary", "state", "train", "wire",
    },
    "own_loop": {
        "compress", "config", "daemon", "data_meaning", "errors", "gossip", "node", "protocol", "round_record",
        "run_plan", "run_setup", "simulate", "start_model", "state", "train",
    },
    "adapters": {"errors", "own_loop"},
    "api": {"adapters", "errors", "own_loop", "train"},
    "ops": {
        "answers", "compress", "config", "config_writer", "criterion", "errors", "executors", "foreign_files",
        "foreign_text", "gossip", "net", "own_files", "precision_choice", "random", "round_record", "run_plan",
        "run_progress", "run_setup", "run_summary", "simulate", "start_model", "state", "train",
        "wire",
    },
    "report": {
        "criterion", "errors", "foreign_values", "gossip", "ops", "own_files", "precision_choice", "round_record",
        "run_progress", "state",
    },
    "study": {
        "config", "criterion", "errors", "executors", "foreign_files", "foreign_values", "gossip", "links", "ops",
        "own_files", "report", "round_record", "run_progress", "run_setup", "simulate", "state", "train",
    },
    "sweep": {
        "config", "config_writer", "errors", "executors", "own_files", "precision_choice", "report", "run_plan",
        "simulate", "state", "study",
    },
    "planning": {
        "compress", "config", "errors", "gossip", "links", "random", "run_plan", "run_progress", "run_setup",
        "simulate", "state", "study", "train", "wire",
    },
    "trackers": {"errors", "report", "round_record", "state"},
    "watch": {
        "config", "criterion", "errors", "foreign_text", "foreign_values", "ops", "report", "round_record", "run_plan",
        "state",
    },
    "cli": {
        "compress", "config", "config_writer", "criterion", "daemon", "errors", "executors", "foreign_text",
        "foreign_values", "gossip", "links", "ops", "planning", "report", "run_plan", "run_progress", "run_summary",
        "simulate", "startup", "state", "study", "sweep", "trackers", "train", "watch", "own_files",
    },
    "entry": {"cli"},
    "fork_server": {"own_files", "cli", "daemon", "startup"},
    "__main__": {"entry"},
}  # fmt: skip

PURE = (
    "criterion", "errors", "foreign_text", "foreign_values", "precision_choice", "protocol", "random", "rate_limits",
    "compress", "wire", "gossip", "round_record", "run_progress", "node.delivery", "node.membership_codec",
    "node.statements", "node.told", "data_meaning", "start_model",
    "net.chunks", "net.counters", "net.envelope", "net.handler", "net.hello", "net.inbox", "net.liveness",
    "net.neighbor", "net.offences", "net.outbox", "net.receipts",
)  # fmt: skip
FORBIDDEN_IN_PURE = {
    "asyncio", "socket", "time", "datetime", "logging", "os", "pathlib", "random", "secrets", "torch", "threading",
    "sqlite3", "grpc", "subprocess", "tempfile", "shutil",
}  # fmt: skip

# Imports inside functions: in the command line, so that `sotto --help` answers before torch is loaded, and of packages
# that an installation may lack.
LATE = ("cli", "entry")
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
