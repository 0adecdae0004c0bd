"""The size of the house has a budget, which resists: it may fall, and rises only by a commit that says why.

    python -m tests.test_size                       # every number, and its budget
    python -m tests.test_size --lower               # write what is too far below its budget
    python -m tests.test_size --since origin/main   # which raised budgets no commit gives a reason for

Lines are those of code: no comments, docstrings or blank lines. A budget that has to rise is raised in `size.toml` by
hand, and the commit says in a trailer, for each number, by how much and why: `Budget: peer/wire +12, reads two forms`.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import click
import pytest

ROOT = Path(__file__).parents[1]
BUDGETS = ROOT / "tests" / "size.toml"
SLACK_LINES, SLACK = 50, 0.03
"""A budget may be above the number by so many lines, or by this part of it, whichever is more."""
SLACK_EXECUTED = 20
GENERATED = ("peer/proto/",)
RULES = ("C901", "D100", "D101", "D102", "D103", "D104", "D105", "D107", "PLR0912", "PLR0913", "PLR0915")
"""Rules of Ruff whose violations are counted: complexity, missing docstrings, branches, arguments, statements."""
MARKS = {"fmt-skip": "# fmt: " + "skip", "type-ignore": "# type: " + "ignore"}
ROUNDS, MOST_ROUNDS, TOGETHER = 60, 55, 2
"""A function belongs to a round if it is called in most rounds. They are looked at by twos: in the time of one alone a
peer may do what belongs to the one before."""


# -- the numbers -------------------------------------------------------------------------------------------------------


def code_lines(source: str) -> int:
    """Return how many lines of a module hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def modules(*folders: str) -> Iterator[tuple[str, Path]]:
    """Yield (path below the root, path) of every module that somebody wrote."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(GENERATED):
                yield name, path


@cache
def found() -> Mapping[str, int]:
    """Return every number that has a budget and needs no run, by name."""
    lines: Counter[str] = Counter()
    rooms, loose = set(), 0
    for name, path in modules("peer", "tools", "tests"):
        top, *rest = name.split("/")
        if path.name.startswith("test_"):
            continue  # A test more is welcome; what tests are made with is a house of its own.
        number = code_lines(path.read_text("utf-8"))
        if top == "tests":
            lines["tests, other files"] += number
            continue
        lines[top] += number
        if top == "peer":
            loose += len(rest) == 1 and rest[0] != "__init__.py"
            room = f"peer/{rest[0]}" if len(rest) > 1 else "peer/*.py"
            rooms.add(rest[0].removesuffix(".py"))
            lines[room] += number
    counts = {"rooms": len(rooms - {"__init__", "__main__", "proto"}), "modules at the top of peer": loose}
    text = "".join(path.read_text("utf-8") for _, path in modules("peer", "tools", "tests"))
    marks = {name: text.count(mark) for name, mark in MARKS.items()}
    return {**dict(sorted(lines.items())), **counts, **marks, **violations()}


def violations() -> Mapping[str, int]:
    """Return how often the product breaks each of the rules."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--output-format=json"]
    done = subprocess.run(
        [*command, f"--select={','.join(RULES)}", "peer", "--exclude=peer/proto"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    seen = Counter(each["code"] for each in json.loads(done.stdout))
    return {rule: seen[rule] for rule in RULES}


def executed(folder: Path) -> Mapping[str, int]:
    """Return how many functions, in how many files, every round of two real peers calls, training apart.

    A function counts by the stretches of time in which it is called, and not by its calls: beside other work, what
    waits is called often in a few rounds.
    """
    from peer.node.participant import Participant
    from tests.daemon.test_members import Devices

    seen: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    begun = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal begun
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<"):
            _, _, below = code.co_filename.partition(f"{ROOT}/peer/")
            if below and not below.startswith(("train/", "proto/")):
                begun += code is Participant.begin.__code__
                seen[below, code.co_qualname].add(begun // (2 * TOGETHER))

    async def run(devices: Devices) -> None:
        threading.setprofile(count)
        sys.setprofile(count)
        try:
            for peer in (0, 1):
                devices.start(peer)
            assert [await devices.tasks[peer] for peer in (0, 1)] == [0, 0]
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        for daemon in devices.daemons.values():
            daemon.close()

    options = ("algorithm.name=quant-sgp", "graph.kind=directed-ring", "compressor.kind=qsgd", "compressor.bits=8")
    Devices(folder, rounds=ROUNDS, num_peers=2, options=options).run(run)
    steady = [name for name, stretches in seen.items() if len(stretches) * TOGETHER >= MOST_ROUNDS]
    return {"files a round executes": len({file for file, _ in steady}), "functions a round executes": len(steady)}


# -- the budgets -------------------------------------------------------------------------------------------------------


def read_budgets(text: str) -> dict[str, int]:
    return tomllib.loads(text)["budget"]


def problems(numbers: Mapping[str, int], budgets: Mapping[str, int]) -> list[str]:
    """Return a sentence for each number that is over its budget, or too far below it, or has none."""
    sentences = []
    for name, number in numbers.items():
        budget = budgets.get(name)
        if budget is None:
            sentences.append(f"{name!r} = {number} has no budget in {BUDGETS.name}")
        elif number > budget:
            sentences.append(
                f"{name}: {number}, where the budget is {budget}. Look for what has become superfluous; if it must be,"
                f" raise it in {BUDGETS.name}, with the trailer 'Budget: {name} +{number - budget}, WHY' in the commit"
            )
        elif budget - number > slack(name, number):
            sentences.append(f"{name}: {number} only, where the budget is {budget}: python -m tests.test_size --lower")
    return sentences


def slack(name: str, number: int) -> float:
    """Return how far a number may be below its budget. Lines move a little with every commit, and what a round executes
    with the kernels of the processor; other counts do not."""
    if name.endswith("a round executes"):
        return SLACK_EXECUTED
    return max(SLACK_LINES, SLACK * number) if name.startswith(("peer", "tools", "tests")) else 0


def unexplained(before: Mapping[str, int], now: Mapping[str, int], messages: str) -> list[str]:
    """Return a sentence for each budget that is higher than before by another number than the trailers say."""
    said: Counter[str] = Counter()
    for name, more in re.findall(r"^Budget: (.+?) \+(\d+), \S.*$", messages, flags=re.MULTILINE):
        said[name] += int(more)
    raised = {name: number - before.get(name, 0) for name, number in now.items() if number > before.get(name, 0)}
    return [
        f"{name} rises by {more}, and the trailers of the commits give a reason for {said[name]}"
        for name, more in raised.items()
        if said[name] < more
    ]


# -- the tests ---------------------------------------------------------------------------------------------------------


def test_the_house_keeps_to_its_budget() -> None:
    budgets = read_budgets(BUDGETS.read_text("utf-8"))
    assert not problems(found(), budgets)
    gone = budgets.keys() - found().keys() - {"files a round executes", "functions a round executes"}
    assert not gone, f"{sorted(gone)} have a budget in {BUDGETS.name}, and are not there any more"


@pytest.mark.slow
def test_a_round_executes_no_more_than_its_budget(tmp_path: Path) -> None:
    assert not problems(executed(tmp_path / "kits"), read_budgets(BUDGETS.read_text("utf-8")))


def test_only_lines_of_code_count() -> None:
    source = (
        '"""A module."""\n\n# A comment.\nx = 1  # one\n\n\n'
        'def f():\n    """Return\n\n    a list."""\n    return [\n        1,\n    ]\n'
    )
    assert code_lines(source) == 1 + 1 + 3


@pytest.mark.parametrize(
    ("number", "sentence"),
    [(100, None), (101, "raise it in size.toml, with the trailer 'Budget: peer +1, WHY'"), (51, None), (49, "--lower")],
)
def test_a_budget_resists_in_both_directions(number: int, sentence: str | None) -> None:
    assert [*map(bool, problems({"peer": number}, {"peer": 100}))] == [True] * (sentence is not None)
    assert sentence is None or sentence in problems({"peer": number}, {"peer": 100})[0]
    assert problems({"rooms": 9}, {"rooms": 10}), "counts are kept exactly"
    assert "no budget" in problems({"peer/new": 1}, {})[0]


@pytest.mark.parametrize(
    ("messages", "is_explained"),
    [
        ("Read two versions\n\nBudget: peer/wire +12, reads two versions", True),
        ("Budget: peer/wire +5, one\n\nBudget: peer/wire +7, other", True),
        ("Budget: peer/wire +5, one", False),
        ("Budget: peer/wire +12", False),
        ("Budget: peer/net +12, why", False),
        ("", False),
    ],
)
def test_what_rises_has_a_reason_in_a_trailer(messages: str, is_explained: bool) -> None:
    assert unexplained({"peer/wire": 100, "rooms": 3}, {"peer/wire": 112, "rooms": 2}, messages) == (
        []
        if is_explained
        else [
            f"peer/wire rises by 12, and the trailers of the commits give a reason for {5 if '+5' in messages else 0}"
        ]
    )


# -- the program -------------------------------------------------------------------------------------------------------


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _budgets_at(commit: str) -> dict[str, int]:
    """Return the budgets of a commit; none where it had no such file."""
    name = BUDGETS.relative_to(ROOT).as_posix()
    done = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=False)
    return read_budgets(done.stdout) if done.returncode == 0 else {}


@click.command(help=__doc__)
@click.option("--lower", is_flag=True, help="Write the numbers that are too far below their budgets.")
@click.option("--since", metavar="COMMIT", help="Look for the reasons of what rose since a commit.")
def main(lower: bool, since: str | None) -> None:
    budgets = read_budgets(BUDGETS.read_text("utf-8"))
    if since is not None:
        before = _budgets_at(since)
        sentences = unexplained(before, budgets, _git("log", "--format=%B", f"{since}..HEAD")) if before else []
        for sentence in sentences:
            click.echo(sentence)
        sys.exit(bool(sentences))
    with tempfile.TemporaryDirectory() as folder:
        numbers: dict[str, Any] = {**found(), **executed(Path(folder) / "kits")}
    if lower:
        kept = {
            name: number if budgets.get(name, number) - number > slack(name, number) else budgets.get(name, number)
            for name, number in numbers.items()
        }
        head, _, _ = BUDGETS.read_text("utf-8").partition("[budget]")
        rows = (f"{json.dumps(name)} = {number}\n" for name, number in kept.items())
        BUDGETS.write_text(head + "[budget]\n" + "".join(rows), "utf-8")
    for name, number in numbers.items():
        click.echo(f"{name:32} {number:6} {budgets.get(name, '–'):>6}")


if __name__ == "__main__":
    main()
