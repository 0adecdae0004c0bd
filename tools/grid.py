"""Common parts of the programs that measure: rows kept as JSON, and tables printed as rows come."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field

from peer.config.options import Config, load
from peer.lab.description import Table, read_description
from peer.lab.grid import C, Grid

Row: TypeAlias = Mapping[str, Any]


class Lines(Grid[C, Row]):
    """A grid whose rows are lines of JSON in one file. A line that is removed is measured anew."""

    def __init__(
        self,
        cells: Iterable[C],
        file: Path,
        key: Callable[[C], Hashable],
        key_of: Callable[[Row], Hashable],
    ) -> None:
        """`key` gives the key of a cell, and `key_of` that of an existing row."""
        super().__init__(cells)
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.kept: list[Row] = [json.loads(line) for line in lines if line.strip()]
        """All rows of the file, those of other cells too."""
        self._file, self._key, self._by_key = file, key, {key_of(row): row for row in self.kept}

    def get(self, cell: C) -> Row | None:
        """Return the last line of a cell."""
        return self._by_key.get(self._key(cell))

    def put(self, cell: C, row: Row) -> None:
        """Append a line."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.kept.append(row)
        self._by_key[self._key(cell)] = row


class Option(Table):
    """An option of a program that is no axis."""

    default: str | int | float | bool | None = None
    kind: Literal["int", "float", "str", "path"] = "str"
    """Type of an option without a default. One whose default is false takes no value."""
    choices: tuple[str, ...] | None = None
    required: bool = False
    help: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for argparse."""
        if self.default is False:
            return {"action": "store_true", "help": self.help}
        kinds: dict[str, type] = {"int": int, "float": float, "str": str, "path": Path}
        kind = kinds[self.kind] if self.default is None else type(self.default)
        others = {"choices": self.choices, "required": self.required, "help": self.help}
        return {"type": kind, "default": self.default, **others}


Values: TypeAlias = tuple[str | int | float, ...]
"""Values of one type, which is also that of the values on the command line."""


class Program(Table):
    """Description of a program in `jobs/NAME.toml`: the job of its runs, the axes of its grid, and other options."""

    job: tuple[str, ...]
    """Overrides that all runs share."""
    axes: Mapping[str, Values] = Field(default_factory=dict)
    """Option → its default values; those of the command line are separated by commas."""
    repeated: Mapping[str, Values] = Field(default_factory=dict)
    """The same for axes whose option may be repeated."""
    closed: tuple[str, ...] = ()
    """Those of them that take no other values."""
    options: Mapping[str, Option] = Field(default_factory=dict)
    settings: str | None = None
    """Help of --set, if there is that option."""

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the description of a program."""
        return read_description(cls, Path(__file__).with_name("jobs") / f"{name}.toml")

    def parse(self, doc: str | None) -> argparse.Namespace:
        """Return the options of the command line; help begins with `doc`."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, values in self.axes.items():
            kind, shown = type(values[0]), ",".join(map(str, values))
            parser.add_argument(f"--{name}", type=partial(split, kind), default=values, help=f"by default {shown}")
        for name, values in self.repeated.items():
            help = f"by default {', '.join(map(str, values))}; may be repeated"
            choices = values if name in self.closed else None
            parser.add_argument(f"--{name}", type=type(values[0]), action="append", choices=choices, help=help)
        for name, each in self.options.items():
            parser.add_argument(f"--{name}", **each.arguments())
        if self.settings is not None:
            parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=self.settings)
        arguments = parser.parse_args()
        for name, values in self.repeated.items():
            setattr(arguments, name, getattr(arguments, name) or values)
        return arguments

    def config(self, *own: str) -> Config:
        """Return the job with overrides of its own. Raises ConfigError."""
        return load(environment={}, overrides=[*self.job, *own])


def split(kind: type[Any], text: str) -> tuple[Any, ...]:
    """Return values that commas separate."""
    return tuple(map(kind, text.split(",")))


def write_rows(rows: Iterable[Any], file: Path | None) -> None:
    """Write dataclasses as JSON to a file, if one is named."""
    if file is not None:
        file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
