"""Lines for the person at a terminal: those of a log, of work that takes long, and commands that can be pasted."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peer.foreign_text import printable

_log = logging.getLogger("sotto")

STARTING_S, TELL_EVERY_S = 3.0, 8.0
"""Interval between lines of a start, whose three parts follow each other, and of other work or a wait: below 10 s, also
where the machine is busy with other things."""


def command(*words: object) -> str:
    """Return a `sotto` command as a shell here takes it: with the path of the program where that is not on the PATH."""
    program, beside = ["sotto"], Path(sys.executable).with_name("sotto")
    if shutil.which("sotto") is None:
        is_below = beside.is_relative_to(Path.cwd())
        program = [str(beside.relative_to(Path.cwd()) if is_below else beside)]
        program = program if beside.exists() else [sys.executable, "-m", "peer"]
    return shlex.join([*program, *map(str, words)])


@contextlib.contextmanager
def telling(
    doing: Callable[[], str | None], say: Callable[[str], object] = _log.info, every_s: float = TELL_EVERY_S
) -> Iterator[None]:
    """Say what is done, and for how long so far, every few seconds within this context, from a thread, so that nobody
    takes long work for a hang. Where `doing` returns None, nothing is said."""
    began, is_over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_over.wait(every_s):
            if (what := doing()) is not None:
                say(f"{what}, {duration(time.monotonic() - began)} so far")

    threading.Thread(target=tell, name="sotto tells", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def duration(seconds: float | None) -> str:
    """Return a duration as "35 ms", "8.3 s", "42 s", "4 min 12 s" or "3 h 05 min", and "–" where it is not known."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class LineFormatter(logging.Formatter):
    """Writes one line for each record, whatever the source of its texts; further lines are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, without escape sequences."""
        return printable(super().formatMessage(record), None)

    def formatException(self, ei: Any) -> str:
        """Return a traceback, whose last line may hold a text of another peer."""
        return "\n".join(f"    {printable(line, None)}" for line in super().formatException(ei).splitlines())
