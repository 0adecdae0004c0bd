"""The precision that a device chose, kept in its state folder, so that it never chooses again.

Rounds of a journal lead to the same bits only in the precision that they were computed in.
"""

from __future__ import annotations

import json

from peer.errors import StateError
from peer.foreign_values import parse_json
from peer.precision_choice import PrecisionChoice
from peer.state.disk import Disk, cannot_be_written, replace

FILE = "precision.json"


def read(disk: Disk) -> PrecisionChoice | None:
    """Return the choice that a state folder holds; None where there is none. Raises StateError for a file that cannot
    be read."""
    if FILE not in disk.names():
        return None
    try:
        return PrecisionChoice.of_document(parse_json(disk.read(FILE)))
    except (OSError, ValueError):
        raise StateError(
            f"{FILE} cannot be read or is damaged, and without it no round can be repeated; restore it, write"
            ' {"precision": "NAME"} with what the log said when the run began, or begin a new run'
        ) from None


def keep(disk: Disk, choice: PrecisionChoice) -> None:
    """Write the choice. Raises StateError."""
    try:
        replace(disk, FILE, [json.dumps(choice.document()).encode()])
    except OSError as error:
        raise cannot_be_written(FILE, error) from None
