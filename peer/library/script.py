"""A training script as the main program of a process, or of a thread of it, as `python SCRIPT` would run it.

Knows nothing of peers but their names. `sotto` imports it before the configuration is known to be sound: it imports
nothing that is slow.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import TextIO, cast

from peer.errors import ConfigError, TaskError, UsageError
from peer.files import instead_of, missing_module

log = logging.getLogger("sotto")

OF_PEER = "{peer}"
"""In an argument of a script it becomes the name of the peer."""


@dataclass(frozen=True)
class Script:
    """A training script, as a command line names it."""

    name: str
    """Path of the file, or name of the module."""
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    """Arguments of the script's own."""

    @property
    def program_words(self) -> tuple[str, ...]:
        """The part of a command line that names it, without its arguments."""
        return ("-m", self.name) if self.is_module else (self.name,)

    @property
    def words(self) -> tuple[str, ...]:
        """The part of a command line that names it, and its arguments."""
        return (*self.program_words, "--", *self.arguments) if self.arguments else self.program_words

    @property
    def run_name(self) -> str:
        """Name of a run of this script."""
        return self.name.rpartition(".")[2] if self.is_module else Path(self.name).stem

    def refuse_missing(self) -> None:
        """Raise ConfigError where there is no such file or module."""
        if self.is_module and (remedy := missing_module(self.name)) is not None:
            raise ConfigError(f"there is no such module as {self.name}{remedy}", key="-m")
        if not self.is_module and not Path(self.name).is_file():
            raise ConfigError("there is no such script" + instead_of(Path(self.name)), file=self.name)

    def program(self, peer: str, output: TextIO | None = None) -> Program:
        """Return it as the program of a peer of that name. `output`: where it prints; None: as this process does.

        Raises ConfigError where there is no such script, and what reading it raises.
        """
        self.refuse_missing()
        module = ModuleType("__main__")
        if self.is_module:
            code = self._of_module(module)
        else:
            file = Path(self.name).absolute()
            code, module.__file__ = compile(file.read_bytes(), str(file), "exec"), str(file)
        first = module.__file__ if self.is_module else self.name
        arguments = [first or self.name, *(each.replace(OF_PEER, peer) for each in self.arguments)]
        return Program(code, module, arguments, output)

    @property
    def folder(self) -> Path:
        """First folder in which Python looks for modules: that of the file; for a module, the working directory."""
        return Path.cwd() if self.is_module else Path(self.name).absolute().parent

    def _of_module(self, module: ModuleType) -> CodeType:
        name = self.name
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except (ImportError, ValueError):
            spec = None
        code = getattr(spec.loader, "get_code", lambda name: None)(spec.name) if spec is not None else None
        if spec is None or code is None:
            raise ConfigError("there is no such module that can be run", key="-m", value=name)
        module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
        return cast("CodeType", code)


class Program:
    """A script that is ready to run."""

    def __init__(self, code: CodeType, module: ModuleType, arguments: Sequence[str], output: TextIO | None) -> None:
        """`code` of the script, to be run in `module`, with `arguments`; the first is its name."""
        self._code, self._module, self._arguments, self._output = code, module, [*arguments], output

    @contextmanager
    def is_main(self) -> Iterator[None]:
        """Within this context it is the main program of this process."""
        before = sys.modules["__main__"], sys.argv, sys.stdout, sys.stderr
        sys.modules["__main__"], sys.argv = self._module, self._arguments
        if self._output is not None:
            sys.stdout = sys.stderr = self._output
        try:
            yield
        finally:
            # It may have put others there.
            self._arguments = sys.argv
            sys.modules["__main__"], sys.argv, sys.stdout, sys.stderr = before

    def run(self) -> None:
        """Run it to its end, in `is_main`. An exit with success is an end. Raises whatever it raises."""
        try:
            exec(self._code, vars(self._module))
        except SystemExit as error:
            if error.code:
                raise


def log_failure(error: TaskError) -> None:
    """Log the traceback of an error that a script raised, from its first line on: its author needs what led there."""
    cause = error.__cause__
    if cause is None:
        return
    trace = cause.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    log.error("the script failed", exc_info=(type(cause), cause, trace))


def named_script(words: Sequence[str], module: str | None) -> Script | None:
    """Return the script that a command line names, by its first word or by -m; None if it names none. The other words
    are its arguments. Raises UsageError."""
    if module is not None:
        return Script(module, True, tuple(words))
    if not words:
        return None
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]} stands where the script should; name that first, and its arguments after --")
    return Script(words[0], False, tuple(words[1:]))
