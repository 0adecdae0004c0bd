"""What holds for every command: errors, exit codes, signals, pipes, and how fast the help is."""

from __future__ import annotations

import ast
import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from peer import __version__, errors, native
from peer.cli import app, listing
from peer.cli.app import EXIT_CODES, SottoGroup, StopOnSignal
from peer.terminal import LineFormatter, command
from tests.cli.runner import sotto

ROOT = Path(__file__).parents[2]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `sotto lab list graphs` raise `error`."""

    def broken(what: str) -> list[dict[str, object]]:
        raise error

    monkeypatch.setattr(listing, "_listed", broken)


def all_errors(kind: type[errors.SottoError] = errors.SottoError) -> list[type[errors.SottoError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_has_an_exit_code_that_the_help_explains(
    kind: type[errors.SottoError], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = errors.DeclaredLost("the reason", incarnation=1) if kind is errors.DeclaredLost else kind("the reason")
    fail_with(monkeypatch, error)
    result = sotto("lab", "list", "graphs")
    assert result.exit_code == kind.exit_code
    assert kind.exit_code in EXIT_CODES
    assert "the reason" in result.stderr
    assert result.stderr.count("\n") == 1
    assert f"{kind.exit_code:>3}  {EXIT_CODES[kind.exit_code]}" in sotto("--help").stdout


def test_a_bug_is_one_line_that_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ZeroDivisionError("division by\nzero"))
    result = sotto("lab", "list", "graphs")
    assert result.exit_code == 70
    assert result.stderr.startswith("sotto: error: this is a bug: ZeroDivisionError: division by zero (")
    assert "--debug" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_full_disk_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "runs/graph.svg"))
    result = sotto("lab", "list", "graphs")
    assert result.exit_code == 5
    assert result.stderr == (
        "sotto: error: runs/graph.svg: No space left on device; make room on that disk, and start again\n"
    )
    fail_with(monkeypatch, OSError(errno.EBADF, "Bad file descriptor"))
    assert sotto("lab", "list", "graphs").exit_code == 70


@pytest.mark.parametrize("arguments", [("--debug", "lab", "list", "graphs"), ("lab", "list", "graphs", "--debug")])
@pytest.mark.parametrize(("error", "code"), [(ZeroDivisionError(), 70), (errors.DivergenceError("too far"), 4)])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    arguments: tuple[str, ...], error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, error)
    result = sotto(*arguments)
    first, *_, last = result.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last.startswith("sotto: error: ")
    assert result.exit_code == code


def test_texts_of_others_can_neither_forge_a_line_of_the_log_nor_move_the_cursor() -> None:
    try:
        raise ValueError("bad \x1b[31m text\n2026-01-01 INFO all is well")
    except ValueError as error:
        record = logging.LogRecord(
            "sotto", logging.INFO, "", 1, "%s says %s", ("ben\r", "\x1b[2J\nforged"), (ValueError, error, None)
        )
    first, *traceback = LineFormatter("%(levelname)s %(message)s").format(record).splitlines()
    assert first == "INFO ben  says  [2J forged"
    assert traceback == ["    ValueError: bad  [31m text", "    2026-01-01 INFO all is well"]


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        (".venv/bin/python", ".venv/bin/sotto export 'my run'"),
        ("elsewhere/python", "{here}/elsewhere/python -m peer export 'my run'"),
    ],
)
def test_a_command_that_is_advised_can_be_pasted(
    python: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/sotto").touch()
    assert command("export", Path("my run")) == "sotto export 'my run'"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / python))
    assert command("export", Path("my run")) == expected.format(here=tmp_path)


def test_an_error_that_quotes_another_peer_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, errors.SottoError("it says \x1b[2J\nand more"))
    assert sotto("lab", "list", "graphs").stderr == "sotto: error: it says  [2J and more\n"


def test_an_interrupt_is_quiet_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    result = sotto("lab", "list", "graphs")
    assert result.exit_code == 130
    assert result.stderr.strip() == "sotto: interrupted"


def test_the_first_signal_asks_and_the_second_insists() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopOnSignal() as stop:
        assert not stop.event.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.event.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_waiting_ends_at_a_signal_whenever_it_comes() -> None:
    """With `Event.wait` in place of this, the handler waits for ever for the thread that it interrupts."""
    command = [sys.executable, "-c", _WAITS_UNDER_SIGNALS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "5000\n"), result.stderr


_WAITS_UNDER_SIGNALS = """
import random
import signal
from peer.cli.app import StopOnSignal

random.seed(0)
stop = StopOnSignal()
signal.signal(signal.SIGALRM, lambda number, frame: stop.event.set())
for _ in range(5000):
    # One signal at a time, about when the wait begins.
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-4))
    while not stop.wait(0.0):
        pass
    stop.event.clear()
print(5000)
"""


def test_a_reader_that_went_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "peer", "lab", "list", "graphs"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert result.returncode == app.BROKEN_PIPE
    assert result.stderr == b""


def loaded_by(*arguments: str) -> set[str]:
    """Return the slow packages that a command line has loaded by the time it ends."""
    code = (
        "import sys, peer.cli\n"
        f"sys.argv = ['sotto', *{arguments}]\n"
        "try: peer.cli.main()\n"
        "except SystemExit: pass\n"
        "print(*{'torch', 'numpy', 'pydantic', 'grpc', 'rich'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [("--help",), ("up", "--help"), ("up", "--round", "5"), ("trian",)])
def test_help_and_wrong_options_load_nothing_that_is_slow(arguments: tuple[str, ...]) -> None:
    assert loaded_by(*arguments) == set()


@pytest.mark.parametrize("command", ["run", "up", "validate", "simulate"])
def test_a_wrong_configuration_is_refused_before_torch_is_loaded(command: str) -> None:
    found = loaded_by(command, "--config", "/nowhere/peer.toml")
    assert "pydantic" in found
    assert not found & {"torch", "grpc"}


@pytest.mark.parametrize(
    "words",
    [
        "version -v",
        "lab list tasks",
        "lab list models",
        "lab list algorithms",
        "lab list compressors",
        "lab list graphs",
        "lab graph --peers 4",
        "lab plan",
        "lab plan --model resnet20 --peers 8 --link 1mbit",
        "lab validate --peers 4",
        "data list",
        "lab shape list",
        "lab study list",
        "lab study run nothing",
        "lab study report nothing",
        "lab sweep run nothing.toml",
        "lab sweep merge nothing.toml",
        "export nothing",
        "report nothing",
        "lab compare nothing",
        "lab metrics nothing -o figures.csv",
        "lab track nothing --to tensorboard",
        "watch nothing",
        "status --run nothing",
        "stop --run nothing",
        "lab replay nothing",
        "doctor",
    ],
)
def test_what_only_prints_or_finds_nothing_loads_no_torch(words: str) -> None:
    assert "torch" not in loaded_by(*words.split())


def test_a_command_that_has_moved_says_where_to_and_answers_as_before() -> None:
    before, now = sotto("list", "graphs", "--json"), sotto("lab", "list", "graphs", "--json")
    assert before.stdout == now.stdout
    assert "list is `sotto lab list` now" in before.stderr
    assert not now.stderr
    assert (
        sotto("validate", "-s", "run.rounds").exit_code == sotto("lab", "validate", "-s", "run.rounds").exit_code == 2
    )
    listed = sotto("--help").stdout
    assert all(f"\n  {name} " not in listed for name in ("list", "validate", "reload"))


def test_without_arguments_the_help_is_shown() -> None:
    result = sotto()
    assert result.exit_code == 2
    assert "Try it on this machine" in result.stderr


@pytest.mark.parametrize("arguments", [("-v", "version"), ("version", "-vv"), ("version", "--verbose", "--debug")])
def test_every_command_takes_the_common_options(arguments: tuple[str, ...]) -> None:
    assert sotto(*arguments).exit_code == 0


def test_the_version_names_what_results_and_speed_depend_on() -> None:
    assert json.loads(sotto("version", "--json").stdout) == {"version": __version__}
    found = json.loads(sotto("version", "-v", "--json").stdout)
    assert found["kernels"] == native.tier()
    assert found.keys() == {"version", "processor", "kernels", "system", "python", "numpy", "torch"}
    assert f"kernels: {native.tier()}" in sotto("version", "-v").stdout.splitlines()


def test_json_has_no_numbers_that_json_cannot_read(capsys: pytest.CaptureFixture[str]) -> None:
    app.print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": "x"}


def test_a_group_keeps_the_commands_that_it_is_made_with() -> None:
    command = click.Command("some")
    assert SottoGroup(commands={"some": command}).commands["some"] is command


def test_an_error_among_lines_with_their_times_has_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of a container is its log. A person who calls a command reads one sentence."""
    monkeypatch.chdir(tmp_path)
    assert sotto("status").stderr.startswith("sotto: error: ")
    for words in (["run"], ["status", "-v"]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:]{8},\d{3} sotto: error: .*peer.toml.*\n", sotto(*words).stderr)


_DESTROYS = re.compile(r"\b(delete|erase|wipe|remove (its|the) (file|folder|state|volume)|rm -r|--force|--volumes)\b")
_COMES_LAST = re.compile(r"\b(or|only)\b", re.IGNORECASE)


def test_no_advice_begins_with_what_destroys_data() -> None:
    """Whoever follows a sentence word by word loses nothing: what cannot be undone comes after what can."""
    found = []
    for file in (*ROOT.glob("peer/**/*.py"), ROOT / "deploy" / "container.py"):
        for text in _sentences(ast.parse(file.read_text())):
            advised = _DESTROYS.search(text)
            if advised and not _COMES_LAST.search(text[: advised.start()]):
                found.append(f"{file.name}: {text}")
    assert found == []


def _sentences(node: ast.AST, inside: bool = False) -> Iterator[str]:
    """Yield the texts with a space in them that code raises or hands on, each whole."""
    inside = inside or isinstance(node, (ast.Raise, ast.Call, ast.Return))
    if isinstance(node, ast.JoinedStr):
        yield ast.unparse(node)
    elif isinstance(node, ast.Constant):
        if inside and isinstance(node.value, str) and " " in node.value.strip():
            yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _sentences(child, inside)
