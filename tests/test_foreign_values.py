"""JSON and TOML of others are read within bounds, and nothing in the package reads any without."""

from __future__ import annotations

import ast
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import peer
from peer.errors import StateError
from peer.foreign_values import parse_json, parse_toml
from peer.state.foreign_files import read_as

ROOT = Path(peer.__file__).parent

OWN = {
    "cli/fork_server.py": 1,
    "ops/peer_processes.py": 1,
    "ops/profile.py": 2,
    "ops/tune.py": 1,
    "lab/sweep/folder.py": 2,
    "links/measure.py": 2,
    "links/profiles.py": 1,
    "lab/study/race.py": 1,
    "lab/study/rival_cell.py": 1,
    "lab/study/rivals/training.py": 1,
    "lab/study/rivals/worker.py": 1,
    "ops/hub_folder.py": 2,
    "library/kept_state.py": 1,
    "train/model_file.py": 1,
}
"""Files that parse what the command itself, or a process that it started, has written a moment ago, how often; in
`kept_state`, as deep as a script's values are."""


def test_nothing_is_parsed_without_bounds() -> None:
    """Every use of `json.load`, `json.loads`, `tomllib.load` and `tomllib.loads` is in the list, or in the one module
    that holds the bounds."""
    found: Counter[str] = Counter()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in ("json", "tomllib") and node.attr in ("load", "loads", "JSONDecoder"):
                    found[file.relative_to(ROOT).as_posix()] += 1
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in ("json", "tomllib"), f"{file}: import the module, so that this test sees it"
    assert found.pop("foreign_values.py") == 2
    assert dict(found) == OWN


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 600 + "]" * 600, "nested too deeply"),
        ("[" * 50 + "]" * 50, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 40 + "0" + "}" * 40, "nested too deeply"),
        ('{"numbers": {"a": Infinity}}', "not finite"),
        ("[NaN]", "not finite"),
        ("[-1e999]", "not finite"),
        ("1" + "0" * 60, "too large"),
        ("1" * 5000, "digits"),
        ("[" + "0," * ((1 << 20) + 1) + "0]", "more than 1,048,576 values"),
        ('"' + "x" * (4 << 20) + '"', "longer than"),
        ('"\\ud800"', "surrogates"),
        ('{"\\udfff": 1}', "surrogates"),
        ("{", "Expecting"),
        ("", "Expecting"),
    ],
)
def test_json_beyond_the_bounds_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_json_within_the_bounds_is_what_it_was() -> None:
    value = {"a": [1, -2.5, None, True, "ä\n"], "b": {"c": [[[[]]]]}, "d": 1 << 127}
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json("[NaN, Infinity]", infinite="none") == [None, None]
    assert parse_json("[Infinity]", infinite="kept") == [float("inf")]


def test_toml_that_is_nested_too_deeply_is_refused() -> None:
    assert parse_toml("a.b = [inf]") == {"a": {"b": [float("inf")]}}
    for text in ("a = " + "[" * 3000 + "]" * 3000, ".".join("a" * 500) + " = 1"):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_toml(text)


@dataclass(frozen=True)
class Pair:
    name: str
    values: tuple[float, ...] = ()


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"name": 3}', '{"name": "a", "values": 3}', '{"name": "a", "values": ["b"]}']
)
def test_a_file_of_another_kind_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "pair.json"
    file.write_text('{"name": "a", "values": [1, 2.5], "later": {}}', encoding="utf-8")
    assert read_as(Pair, file) == Pair("a", (1.0, 2.5))
    file.write_text(text, encoding="utf-8")
    with pytest.raises(StateError, match=r"pair\.json: is damaged, or another kind of file: "):
        read_as(Pair, file)
