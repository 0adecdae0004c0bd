"""The averaging rate that a run was started with, kept beside its state.

Where the configuration leaves `algorithm.averaging_rate` unset, a default takes its place, and a later release may have
another one. A journal leads to the same model only with the rate of the rounds in it, and neighbours that mix at
different rates lose weight. So a run keeps the rate that it began with.
"""

from __future__ import annotations

import json

from peer.compress.bound import BoundedCompressor
from peer.config import Config
from peer.errors import StateError
from peer.gossip.averaging_rate import default_of_release_0_1
from peer.run_plan import averaging_rate
from peer.state.disk import Disk, replace

FILE = "rates.json"
_KEY = "averaging_rate"


def settle_rate(config: Config, compressor: BoundedCompressor, disk: Disk) -> float:
    """Return the rate η of the run that a state folder belongs to, and keep it there. The configuration overrules it.
    Raises StateError."""
    names = disk.names()
    kept = _read(disk) if FILE in names else None
    rate = averaging_rate(config, compressor)
    if config.algorithm.averaging_rate is None:
        if kept is not None:
            rate = kept
        elif any(name.startswith(("checkpoint-", "journal-")) for name in names):
            # Release 0.1 kept no rate.
            rate = averaging_rate(config, compressor, default_of_release_0_1)
    if rate != kept:
        try:
            replace(disk, FILE, [json.dumps({_KEY: rate}).encode()])
        except OSError as error:
            raise StateError(f"{FILE} cannot be written: {error.strerror}") from None
    return rate


def _read(disk: Disk) -> float:
    try:
        rate = json.loads(disk.read(FILE))[_KEY]
        if isinstance(rate, float) and 0 < rate <= 1:
            return rate
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise StateError(f"{FILE} is damaged; delete it, and set algorithm.averaging_rate to what the run began with")
