"""The precision that a peer trains in where `training.precision` is "fastest": measured once, then kept."""

from __future__ import annotations

import logging
from collections.abc import Callable

from peer.errors import ConfigError
from peer.precision_choice import FASTEST, PrecisionChoice
from peer.state import kept_precision
from peer.state.disk import Disk

log = logging.getLogger("sotto")


def settle_chosen(measure: Callable[[], PrecisionChoice], disk: Disk) -> PrecisionChoice:
    """Return the precision of the run that a state folder belongs to. Before the first round, `measure` decides, and it
    is on disk before anything is computed in it. Raises ConfigError for a run that began with another setting, and
    StateError."""
    choice = kept_precision.read(disk)
    if choice is None:
        if any(name.startswith(("checkpoint-", "journal-")) for name in disk.names()):
            raise ConfigError(
                f"cannot be set in a run that began without it, or that lost {kept_precision.FILE}: its rounds cannot"
                " be repeated in another precision; set the precision that it began with, or begin a new run",
                key="training.precision",
                value=FASTEST,
            )
        choice = measure()
        kept_precision.keep(disk, choice)
    log.info("trains in %s", choice.sentence)
    return choice
