"""The precision that a peer trains in where `training.precision` is "fastest": measured once, then kept."""

from __future__ import annotations

import logging
from collections.abc import Callable

from peer.config.precision_choice import FASTEST, PrecisionChoice
from peer.errors import ConfigError
from peer.state.disk import Disk
from peer.state.kept_file import CHOSEN_PRECISION
from peer.state.recovery import begin_anew, begun_round

log = logging.getLogger("sotto")


def settle_chosen(measure: Callable[[], PrecisionChoice], disk: Disk) -> PrecisionChoice:
    """Return the precision of the run that a state folder belongs to. Before the first round, `measure` decides, and it
    is on disk before anything is computed in it. Raises ConfigError for a run that began with another setting, and
    StateError."""
    choice = CHOSEN_PRECISION.read(disk)
    if choice is None:
        if (begun := begun_round(disk)) is not None:
            raise ConfigError(
                f"cannot be set in a run that began without it, or that lost {CHOSEN_PRECISION.name}: its rounds cannot"
                f" be repeated in another precision; set the precision that it began with, or {begin_anew(begun)}",
                key="training.precision",
                value=FASTEST,
            )
        choice = measure()
        CHOSEN_PRECISION.keep(disk, choice)
    log.info("trains in %s", choice.sentence)
    return choice
