"""The interface of every tracker, and the description of a run for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Run:
    """A run's description for a tracker, given before the first figure."""

    name: str
    settings: Mapping[str, str]
    """Dotted key → value."""
    folder: Path
    """An existing folder for its files."""


class Tracker(Protocol):
    """One run in a tracker."""

    def log(self, whose: str, done: int, at: float, figures: Mapping[str, float]) -> None:
        """Take figures of a peer, or of the "average" or of "all" models, after `done` rounds; `at` in Unix seconds."""
        ...

    def flush(self) -> None:
        """Make logged figures visible now."""
        ...

    def close(self) -> None:
        """End the run."""
        ...
