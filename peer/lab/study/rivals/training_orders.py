"""Orders for `training`, apart from it: their sender need not load the program that carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAM = "peer.lab.study.rivals.training"
"""The module that is started with the path of the orders."""


@dataclass(frozen=True, kw_only=True)
class TrainingOrders:
    """Orders for one training."""

    name: str
    settings: dict[str, float | str]
    """See `peer.lab.study.rivals.methods`."""
    overrides: list[str]
    """The configuration, section.key=value. One round is one gradient step."""
    num_workers: int
    folder: str
    """Folder in which the workers find each other and leave the result."""

    @property
    def result_file(self) -> Path:
        """A list of [steps, accuracy of the model that all workers hold, mean training loss since the last]."""
        return Path(self.folder, "result.json")
