"""Entry point of the command `sotto`, also `python -m peer`: it runs before any slow import."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys

_PLAIN = str.maketrans(
    {"→": "->", "←": "<-", "–": "-", "—": "-", "−": "-", "…": "...", "“": '"', "”": '"', "≥": ">=", "≤": "<="}
)


def main() -> None:
    """Run the command line and exit."""
    _open_streams()
    # One thread computes: NumPy's second one would sum in another order, and wait for the first by spinning.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Ctrl-C in the moment before the command line can deal with it just ends the process, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from peer.cli import main as run

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    run()


def _open_streams() -> None:
    """Give this process the three standard streams. If one is closed, the next file or socket would get its number, and
    with it all output. A terminal that lacks a character shows another one: no result is lost for an arrow."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    codecs.register_error("plain", _in_plain_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "backslashreplace"):
            stream.reconfigure(errors="plain")


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    """Handle an error of encoding as `codecs.register_error` wants it."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(each if each.isascii() else "?" for each in found), error.end


if __name__ == "__main__":
    main()
