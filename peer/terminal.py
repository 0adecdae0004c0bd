"""Lines for the person at a terminal: those of a log, and commands that can be pasted."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from peer.foreign_text import printable


def command(*words: object) -> str:
    """Return a `sotto` command as a shell here takes it: with the path of the program where that is not on the PATH."""
    program, beside = ["sotto"], Path(sys.executable).with_name("sotto")
    if shutil.which("sotto") is None:
        is_below = beside.is_relative_to(Path.cwd())
        program = [str(beside.relative_to(Path.cwd()) if is_below else beside)]
        program = program if beside.exists() else [sys.executable, "-m", "peer"]
    return shlex.join([*program, *map(str, words)])


class LineFormatter(logging.Formatter):
    """Writes one line for each record, whatever the source of its texts; further lines are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, without escape sequences."""
        return printable(super().formatMessage(record), None)

    def formatException(self, ei: Any) -> str:
        """Return a traceback, whose last line may hold a text of another peer."""
        return "\n".join(f"    {printable(line, None)}" for line in super().formatException(ei).splitlines())
