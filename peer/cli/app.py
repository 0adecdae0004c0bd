"""Common behaviour of the command line: errors become one sentence and an exit code, output can be JSON.

Commands raise `SottoError` and let it go; nothing below this module prints an error or exits. A traceback is shown
only under --debug.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections import UserDict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click

from peer.errors import INTERRUPTED, LocalProtocolError, SottoError, StateError, remedy
from peer.foreign_text import finite, printable
from peer.terminal import LineFormatter

BROKEN_PIPE = 141
"""Exit code that a shell reports for a process that died of SIGPIPE."""

EXIT_CODES: dict[int, str] = {
    0: "success",
    1: "an error not covered by the other codes",
    2: "invalid usage, configuration, data or task",
    3: "invalid or missing certificates or keys",
    4: "training diverged and was stopped",
    5: "a state or run folder is damaged, in use, or belongs to another run",
    6: "another peer could not be reached, or refused",
    70: "a bug in sotto",
    INTERRUPTED: "interrupted (Ctrl-C or SIGTERM)",
}

_OF_THE_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EIO}
    | {errno.EACCES, errno.EPERM}
)
"""Refusals of the operating system that can occur anywhere and are nobody's bug."""

COLORS = {"error": "red", "warning": "yellow", "ok": "green"}
"""Level of a finding → the colour in which it is shown."""

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


class SottoCommand(click.Command):
    """A command that also takes the options that every command takes, and prints its help as it was written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(common_options())


class _Commands(UserDict[str, Any]):
    """Commands by name, or where one is imported from when it is first asked for: a module below this package, or
    "module.name" where the two have other names. A peer needs one of them and the memory of none of the others."""

    def __getitem__(self, name: str) -> click.Command:
        if isinstance(place := self.data[name], str):
            module, _, attribute = place.partition(".")
            self.data[name] = getattr(importlib.import_module(f"{__package__}.{module}"), attribute or name)
        command: click.Command = self.data[name]
        return command


class SottoGroup(click.Group):
    """The group that turns any error below it into one sentence on stderr and an exit code."""

    command_class = SottoCommand
    group_class = type

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands: MutableMapping[str, Any] = _Commands(self.commands)
        self.params.extend(common_options())
        self.sections: dict[str, list[str]] = {}
        """Names of commands under headings, in the order of the help text."""
        self._moved: dict[str, SottoGroup] = {}
        """Name of a command that was in this group until 0.2 → the group within this one where it is now."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options of the group, and keep the whole command line for reports."""
        ctx.meta.setdefault("peer.arguments", tuple(args))
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, also one that has moved, which is said on stderr."""
        if (group := self._moved.get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        click.echo(f"sotto: {cmd_name} is `sotto {group.name} {cmd_name}` now; the old name works until 1.0", err=True)
        return group.get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # click would turn it into exit code 1, which means something else here.
            raise _ReaderGone from None

    def add_section(self, heading: str, commands: Mapping[str, str]) -> None:
        """Add commands that the help text lists under a heading of their own: name → where it is imported from."""
        self.commands.update(commands)
        self.sections[heading] = list(commands)

    def add_group(self, heading: str, group: SottoGroup) -> None:
        """Add a group of commands under a heading. They are still found here, where they were until 0.2."""
        self.add_command(group)
        self.sections[heading].append(str(group.name))
        self._moved |= dict.fromkeys(group.commands, group)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help text."""
        ordered = [name for names in self.sections.values() for name in names]
        return ordered + [name for name in super().list_commands(ctx) if name not in ordered]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, each with the whole first sentence of its help."""
        ordered = {name for names in self.sections.values() for name in names}
        rest = [name for name in self.list_commands(ctx) if name not in ordered]
        for heading, names in (*self.sections.items(), ("Commands", rest)):
            rows = [(name, self.commands[name].get_short_help_str(limit=90)) for name in names]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = "sotto", **extra: Any
    ) -> NoReturn:
        """Run the command line and exit."""
        extra["standalone_mode"] = False
        debug = "--debug" in (sys.argv[1:] if args is None else args)
        try:
            result = super().main(args=args, prog_name=prog_name or "sotto", **extra)
            # Flushed here, so that a reader that is gone shows up inside the try.
            sys.stdout.flush()
        except (BrokenPipeError, _ReaderGone):
            # Python flushes stdout once more at exit; let that go nowhere instead of complaining.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(BROKEN_PIPE)
        except (KeyboardInterrupt, click.Abort):
            click.echo("sotto: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except SottoError as error:
            # Under --debug, too, a script and `sotto up` need the exit code.
            _show("".join(traceback.format_exception(error)) if debug else "\n".join(getattr(error, "__notes__", ())))
            bug = isinstance(error, LocalProtocolError)
            _complain(f"this is a bug: {error}{_HOW_TO_REPORT}" if bug else str(error))
            sys.exit(error.exit_code)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _complain(_usage_sentence(error))
            sys.exit(error.exit_code)
        except Exception as error:  # The end of the process: whatever nobody caught is a bug, and told as one.
            if debug:
                _show("".join(traceback.format_exception(error)))
            if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
                where = f"{error.filename}: " if error.filename is not None else ""
                _complain(f"{where}{error.strerror}; {remedy(error)}, and start again")
                sys.exit(StateError.exit_code)
            _complain(f"this is a bug: {type(error).__name__}: {error}{_HOW_TO_REPORT}")
            sys.exit(LocalProtocolError.exit_code)
        sys.exit(result if isinstance(result, int) else 0)


class _ReaderGone(Exception):
    """The reader of our output has ended."""


_HOW_TO_REPORT = " (run the same command with --debug for the traceback, and please report it)"


def common_options() -> list[click.Option]:
    """Return new instances of the options that every command takes; help lists them once, for `sotto` itself."""
    early: dict[str, Any] = {"is_eager": True, "expose_value": False, "hidden": True}
    log_help, debug_help = "Write a log to stderr; -vv logs more.", "Show the traceback of an error."
    return [
        click.Option(["-v", "--verbose"], count=True, callback=_set_verbosity, help=log_help, **early),
        click.Option(["--debug"], is_flag=True, callback=_note_debug, help=debug_help, **early),
    ]


def debug_wanted() -> bool:
    """Return whether the command line that runs now has --debug."""
    return bool(click.get_current_context().find_root().meta.get("peer.debug"))


def verbosity() -> int:
    """Return how often the command line that runs now has -v."""
    return int(click.get_current_context().find_root().meta.get("peer.verbosity", 0))


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Write one JSON document to stdout. Numbers that JSON cannot write (NaN, infinities) become null."""
    click.echo(json.dumps(finite(value), indent=indent, ensure_ascii=False, default=str))


def tell(as_json: bool, document: Any, lines: Iterable[str], *, indent: int | None = 2) -> None:
    """Write what a command found to stdout: a JSON document, or lines for people."""
    if as_json:
        print_json(document, indent=indent)
    else:
        for line in lines:
            click.echo(line)


def is_interactive() -> bool:
    """Return whether a person is watching stderr, where progress goes."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class StopOnSignal:
    """Within this context the first SIGINT or SIGTERM sets `event`, a second one interrupts at once."""

    def __init__(self) -> None:
        import threading

        self.event = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopOnSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # Not the main thread: then somebody else handles signals.
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Sleep until a signal comes, for so long at most; return whether one came.

        Not `event.wait`: a handler that sets the event while this thread is inside would wait for it for ever.
        """
        until = time.monotonic() + seconds
        while not self.event.is_set() and (left := until - time.monotonic()) > 0.0:
            time.sleep(min(left, 0.1))
        return self.event.is_set()

    def _on_signal(self, number: int, frame: object) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        self.event.set()
        click.echo("\nsotto: stopping after this round; a second signal stops at once", err=True)


def raise_log_level() -> None:
    """Log a daemon's actions even without -v: it has no other way to speak."""
    root = logging.getLogger()
    root.setLevel(min(root.level or logging.WARNING, logging.INFO))


def _set_verbosity(context: click.Context, option: click.Parameter, count: int) -> int:
    # Given to the group as well as to the command, the larger counts.
    root = context.find_root()
    count = max(count, root.meta.get("peer.verbosity", 0))
    root.meta["peer.verbosity"] = count
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(count, 2)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger().setLevel(level)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if count else logging.ERROR)
    return count


def _note_debug(context: click.Context, option: click.Parameter, debug: bool) -> bool:
    # Given to the group or to the command, as the verbosity.
    root = context.find_root()
    root.meta["peer.debug"] = debug or root.meta.get("peer.debug", False)
    return debug


def _complain(text: str) -> None:
    # As the last line of a log it has its time, as the other lines have.
    is_logged = logging.getLogger().isEnabledFor(logging.INFO)
    form = LineFormatter("%(asctime)s sotto: error: %(message)s" if is_logged else "sotto: error: %(message)s")
    # Where nothing can be written, not even this, the exit code still says what went wrong.
    with suppress(OSError):
        click.echo(form.format(logging.makeLogRecord({"msg": " ".join(text.split())})), err=True)


def _show(text: str) -> None:
    """Write a traceback or notes to stderr."""
    with suppress(OSError):
        for line in text.splitlines():
            click.echo(printable(line, None), err=True)


def _usage_sentence(error: click.ClickException) -> str:
    sentence = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{sentence} (see {context.command_path} --help)" if context is not None else sentence
