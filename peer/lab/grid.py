"""A grid of cells, each of which is computed once and kept: it finds, runs, shares out and merges them.

The owner of a grid decides the meaning of a cell and of its row: a run of real peers on a link, the curve of a
contender, a simulated run. A cell that has a row is not computed again, so every grid can be interrupted and resumed.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from peer.errors import SottoError, StateError
from peer.files import write_whole
from peer.ops.executors import ALL, Shard
from peer.state.foreign_files import read_as

C = TypeVar("C")
R = TypeVar("R")


class Grid(ABC, Generic[C, R]):
    """Cells in their order, and the rows of those that were computed."""

    def __init__(self, cells: Iterable[C]) -> None:
        """The cells may come in any order; the first that is missing is the first that runs."""
        self.cells: Sequence[C] = [*cells]

    @abstractmethod
    def get(self, cell: C) -> R | None:
        """Return the row of a cell; None if it has none yet. Raises StateError where it is damaged."""

    @abstractmethod
    def put(self, cell: C, row: R) -> None:
        """Keep the row of a cell."""

    def has(self, cell: C) -> bool:
        """Whether a cell has a row."""
        return self.get(cell) is not None

    def missing(self, shard: Shard = ALL) -> list[C]:
        """Return the cells of a shard that have no row yet."""
        return [cell for cell in shard.of(self.cells) if not self.has(cell)]

    def rows(self) -> list[tuple[C, R]]:
        """Return the cells that have a row, with it."""
        return [(cell, row) for cell in self.cells if (row := self.get(cell)) is not None]

    def run(
        self,
        outcomes: Iterable[tuple[C, R | SottoError]],
        tell: Callable[[C, R], str],
        say: Callable[[C, str], None],
    ) -> int:
        """Keep the rows as they come, and `say` each outcome in the words of `tell`. Return how many failed."""
        failed = 0
        for cell, outcome in outcomes:
            if isinstance(outcome, SottoError):
                failed += 1
                say(cell, f"failed: {outcome}")
            else:
                self.put(cell, outcome)
                say(cell, tell(cell, outcome))
        return failed


def one_by_one(
    cells: Sequence[C], begin: Callable[[int, C], None], measure: Callable[[C], R]
) -> Iterator[tuple[C, R | SottoError]]:
    """Measure one cell after the other in this process, each after the row before is kept. `begin` is called first,
    with its position."""
    for position, cell in enumerate(cells):
        begin(position, cell)
        try:
            outcome: R | SottoError = measure(cell)
        except SottoError as error:
            outcome = error
        yield cell, outcome


@dataclass(frozen=True, kw_only=True)
class FileRow:
    """A dataclass that has a file of JSON of its own."""

    indent: ClassVar[int | None] = 1

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the row of a file. Raises as `read_as`."""
        return read_as(cls, file, infinite="kept")

    def as_json(self) -> dict[str, Any]:
        """Return one table."""
        return asdict(self)

    def write(self, file: Path) -> None:
        """Write the row; an interruption leaves no partial file."""
        write_whole(file, json.dumps(self.as_json(), indent=self.indent, ensure_ascii=self.indent is not None) + "\n")

    def difference(self, other: Self) -> str | None:
        """Return why this row and another one of its cell cannot both stay; None if they say the same."""
        return None if self == other else "are two measurements of one cell; move one away"


F = TypeVar("F", bound=FileRow)


class Files(Grid[C, F]):
    """A grid with a file for each row. Several processes may work on one folder."""

    def __init__(self, cells: Iterable[C], folder: Path, kind: type[F], name: Callable[[C], str]) -> None:
        """`name` gives the name of a cell's file, without its ending; a cell of another meaning has another name."""
        super().__init__(cells)
        self.folder, self._kind, self._name = folder, kind, name

    def file(self, cell: C) -> Path:
        """Return the file of a cell, whether it exists or not."""
        return self.folder / f"{self._name(cell)}.json"

    def has(self, cell: C) -> bool:
        """See `Grid`, as the following."""
        return self.file(cell).exists()

    def get(self, cell: C) -> F | None:
        """Read the file."""
        return self._kind.read(self.file(cell)) if self.has(cell) else None

    def put(self, cell: C, row: F) -> None:
        """Write the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        row.write(self.file(cell))

    def merge(self, folder: Path) -> int:
        """Take the rows of cells out of another folder; return how many are new. Raises StateError where both have a
        row for a cell, and these differ."""
        new = 0
        for cell in self.cells:
            own, other = self.file(cell), folder / self.file(cell).name
            if not other.exists():
                continue
            content, theirs = other.read_bytes(), self._kind.read(other)
            if not own.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(own, content)
                new += 1
            elif own.read_bytes() != content and (why := self._kind.read(own).difference(theirs)) is not None:
                raise StateError(f"{other} and {own} {why}")
        return new


def aligned(lines: Sequence[Sequence[str]], *, left: bool = False) -> list[str]:
    """Return lines of a terminal whose cells stand below each other, at the right of their columns or at the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if left:
        return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return ["  ".join(map(str.rjust, line, widths)) for line in lines]
