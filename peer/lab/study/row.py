"""One cell as it is kept in a file, and the row of results that is computed from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from peer.foreign_values import as_kind
from peer.lab.grid import FileRow
from peer.lab.study.cell import CellResult
from peer.state.foreign_files import read_as


@dataclass(frozen=True, kw_only=True)
class Cell(FileRow):
    """One measurement and the conditions under which it was made."""

    contender: str
    profile: str
    seed: int
    step_s: float
    peers: int
    commit: str
    load: float
    """Load average at the end."""
    others_cpus: float
    """Processors that other work kept busy during the measurement."""
    result: CellResult

    def as_json(self) -> dict[str, Any]:
        """Return one flat table."""
        own = {name: value for name, value in asdict(self).items() if name != "result"}
        return own | asdict(self.result)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the table of `as_json`."""
        own = read_as(dict[str, Any], file, infinite="kept")
        own["result"] = {each.name: own.pop(each.name) for each in fields(CellResult) if each.name in own}
        return as_kind(cls, own, file)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell with the figures that are computed for it."""

    cell: Cell
    rounds_to_target: int | None = None
    simulated_round_s: float | None = None
    """Duration of a round by the simulator; None for a rival."""
    predicted_round_s: float | None = None
    """Measured duration without link limits, plus the simulator's addition for links."""
    predicted_link_share: float | None = None

    @property
    def seconds_for_100_rounds(self) -> float:
        return 100 * self.cell.result.round_s

    @property
    def seconds_to_target(self) -> float | None:
        return None if self.rounds_to_target is None else self.rounds_to_target * self.cell.result.round_s

    @property
    def bytes_to_target(self) -> float | None:
        return None if self.rounds_to_target is None else self.rounds_to_target * self.cell.result.interface_bytes

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.predicted_round_s is None else self.predicted_round_s / self.cell.result.round_s - 1

    def as_json(self) -> dict[str, object]:
        """Return one flat table with all figures."""
        computed = (
            "rounds_to_target", "simulated_round_s", "predicted_round_s", "predicted_link_share",
            "seconds_for_100_rounds", "seconds_to_target", "bytes_to_target", "error",
        )  # fmt: skip
        return self.cell.as_json() | {name: getattr(self, name) for name in computed}


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A prediction for another number of peers."""

    contender: str
    profile: str
    peers: int
    round_s: float
