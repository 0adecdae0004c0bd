"""What `training` is told, apart from it: whoever gives the orders need not load what carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAM = "peer.lab.study.rivals.training"
"""The module that is started with the path of the orders."""


@dataclass(frozen=True, kw_only=True)
class TrainingOrders:
    """What to train."""

    name: str
    settings: dict[str, float | str]
    """See `peer.lab.study.rivals.methods`."""
    overrides: list[str]
    """The configuration, section.key=value. One round is one gradient step."""
    num_workers: int
    folder: str
    """For the workers to find each other, and for the result."""

    @property
    def result_file(self) -> Path:
        """A list of [steps, accuracy of the model that all workers hold, mean training loss since the last]."""
        return Path(self.folder, "result.json")
