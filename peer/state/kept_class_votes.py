"""What the devices of a run voted on the shares of the classes, kept in the state folder.

Rounds of a journal lead to the same bits only with the logit adjustment that follows from the votes, and devices that
join later hear them from those that have them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from peer.errors import StateError
from peer.foreign_values import parse_json
from peer.state.disk import Disk, cannot_be_written, replace

FILE = "class-votes.json"


def read(disk: Disk) -> dict[int, bytes] | None:
    """Return the votes that a state folder holds, as they were told: peer → note; None where there are none. Raises
    StateError for a file that cannot be read."""
    if FILE not in disk.names():
        return None
    try:
        document = parse_json(disk.read(FILE))
        return {int(peer): base64.b64decode(note, validate=True) for peer, note in document.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise damaged() from None


def keep(disk: Disk, votes: Mapping[int, bytes]) -> None:
    """Write the votes. Raises StateError."""
    document = {str(peer): base64.b64encode(note).decode() for peer, note in sorted(votes.items())}
    try:
        replace(disk, FILE, [json.dumps(document).encode()])
    except OSError as error:
        raise cannot_be_written(FILE, error) from None


def damaged() -> StateError:
    """Return the error of a file that does not hold what `keep` wrote."""
    return StateError(
        f"{FILE} cannot be read or is damaged, and without it no round can be repeated; restore it from a copy, or wipe"
        " the folder and let the device take part again"
    )
