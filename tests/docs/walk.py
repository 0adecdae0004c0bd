"""Follows a page: writes the files that it shows, runs its commands in one shell, and compares what they print.

- A block of `sh` is run. What is for other machines stands in blocks of `console`, which are not.
- A block of `python` or `toml` is a file if the text before it ends with its name: "Save this as `train.py`:".
- A block of `diff` changes such a file, if the text before it ends with its name.
- A block of `text` is what the commands before it print: each line occurs, in this order. Numbers may differ, and three
  dots stand for anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`(\w+\.(?:py|toml))`:?\s*$")
_MARK = "\x1e"


@dataclass(frozen=True)
class Block:
    """One block of code of a page."""

    language: str
    text: str
    file: str | None
    """The name under which the page asks to save it."""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of code of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        file = _FILE.search(text[: match.start()].rstrip())
        yield Block(match[1], match[2], file[1] if file else None)


def patched(text: str, diff: str) -> str:
    """Return a text with the lines of a diff. Those of each part, of which "@@" separates the next, are in it once."""
    for part in diff.split("@@\n"):
        before, after = ("".join(f"{line[1:]}\n" for line in part.splitlines() if line[:1] != sign) for sign in "+-")
        assert text.count(before) == 1, f"these lines are not in the file:\n{before}"
        text = text.replace(before, after)
    return text


def walk(page: Path, folder: Path, *, replace: Mapping[str, str] | None = None, timeout_s: float = 250.0) -> str:
    """Return all that the commands of a page print, once each of them has succeeded in `folder`.

    `replace` names words that this machine needs others for, such as a number of rounds.
    """
    found = [block for block in blocks(page) if block.language in ("sh", "python", "toml", "text", "diff")]
    script = "set -euo pipefail\n"
    for block in found:
        if block.file:
            file = folder / block.file
            file.write_text(patched(file.read_text(), block.text) if block.language == "diff" else block.text)
        elif block.language == "sh":
            commands = block.text
            for ours, theirs in (replace or {}).items():
                commands = commands.replace(ours, theirs)
            script += f"{commands}\nprintf '\\n{_MARK}'\n"
    for words, there in (replace or {}).items():
        assert any(words in block.text for block in found), f"{page.name} has no {words!r}, for which {there!r} stands"
    printed = _run(script, folder, timeout_s)
    _compare(page, found, printed.split(_MARK))
    return printed


def _run(script: str, folder: Path, timeout_s: float) -> str:
    programs = folder / ".programs"
    programs.mkdir()
    texts = {"sotto": f"{sys.executable} -m tests.docs.sotto", "python": sys.executable, "sudo": ""}
    for name, program in texts.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "peer" / "library" / "api"), str(folder)]),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "TERM": "dumb",
    }
    log = folder / ".printed.txt"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = shell.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            # What the page left in the background ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    printed = log.read_text(encoding="utf-8", errors="replace")
    assert code == 0, f"exit code {code} after:\n{printed}"
    return printed


def _compare(page: Path, found: list[Block], printed: list[str]) -> None:
    outputs, rest = iter(printed), ""
    for block in found:
        if block.language == "sh":
            rest = next(outputs)
        elif block.language == "text":
            for line in filter(str.strip, block.text.splitlines()):
                match = re.search(_pattern(line), rest)
                assert match, f"{page.name} shows {line.strip()!r}, which is not in the rest of the output:\n{rest}"
                rest = rest[match.end() :]


def _pattern(line: str) -> str:
    """Return what finds a line of output, whatever its numbers and blanks are."""
    found = re.findall(r"(?P<number>\d[\d,.]*)|(?P<dots>\s*…)|(?P<blanks>\s+)|(?P<word>\D)", line.strip())
    return "".join(
        r"(?:\d[\d,.]*|–)" if number else r"[^\n]*" if dots else r"\s+" if blanks else re.escape(word)
        for number, dots, blanks, word in found
    )
