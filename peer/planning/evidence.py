"""Measurements of the worst peer's accuracy, by option and skew: `evidence.toml`, read and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field

from peer.errors import ConfigError
from peer.lab.description import Table, read_description

FILE = Path(__file__).with_name("evidence.toml")

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""(rounds, accuracy in percent), ascending."""

Rival: TypeAlias = Literal["ddp", "ddp-fp16", "ddp-powersgd", "local-sgd"]


class Option(Table):
    """Something that a plan may recommend."""

    name: str
    title: str
    rival: Rival | None = None
    """Another system; None: a configuration of ours."""
    settings: tuple[str, ...] = ()
    """Settings of our option: section.key=value."""
    every: int = Field(default=1, ge=1)
    """Steps of a peer between two exchanges: of local SGD, and of ours what `training.local_steps` says."""


class Measured(Table):
    """One run, or several runs of which the source gives the figures together."""

    option: str
    skew: float
    """Skew of the labels. A row also stands for smaller skews where those were not measured."""
    worst: Curve
    """Accuracy of the worst peer."""
    seed: int | None = None


class Setting(Table):
    """A task with all that the measurements on it have in common."""

    name: str
    title: str
    source: str
    tasks: tuple[str, ...] = ()
    """Tasks of the product to which it applies."""
    peers: int
    reference: str
    """The option that the others are compared with: it loses nothing to skew."""
    limits: tuple[str, ...] = ()
    """Limits of the measurements."""
    measured: tuple[Measured, ...]

    def curve(self, option: str, skew: float) -> Curve | None:
        """Return the mean curve over seeds at the smallest measured skew that is not below `skew`."""
        skews = sorted({row.skew for row in self.measured if row.option == option and row.skew >= skew})
        if not skews:
            return None
        rows = [dict(row.worst) for row in self.measured if row.option == option and row.skew == skews[0]]
        common = sorted(set.intersection(*(set(row) for row in rows)))
        return tuple((rounds, sum(row[rounds] for row in rows) / len(rows)) for rounds in common)

    def rounds_to(self, option: str, skew: float, accuracy: float) -> float | None:
        """Return after how many rounds the worst peer reaches an accuracy and does not fall below it again, between
        measured points in proportion; None where it does not, or where nothing was measured."""
        curve = self.curve(option, skew)
        if curve is None or curve[-1][1] < accuracy:
            return None
        low = max((index for index, (_, reached) in enumerate(curve) if reached < accuracy), default=None)
        if low is None:
            return float(curve[0][0])
        (start, below), (end, above) = curve[low], curve[low + 1]
        return start + (end - start) * (accuracy - below) / (above - below)


class Evidence(Table):
    """The whole file."""

    options: tuple[Option, ...]
    settings: tuple[Setting, ...]

    def setting(self, name: str) -> Setting:
        """Return a setting by its name. Raises ConfigError."""
        for each in self.settings:
            if each.name == name:
                return each
        valid = ", ".join(each.name for each in self.settings)
        raise ConfigError("there are no such measurements", key="--evidence", value=name, valid=valid)

    def for_task(self, task: str | None) -> Setting:
        """Return the setting of a task, and the first one for tasks that none is named for."""
        return next((each for each in self.settings if task in each.tasks), self.settings[0])


def read(file: Path = FILE) -> Evidence:
    """Return the measurements."""
    return read_description(Evidence, file)
