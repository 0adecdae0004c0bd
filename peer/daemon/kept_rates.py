"""The averaging rate, the first θ, the rounding and the order of classes that a run began with, kept beside its state.

Where the configuration leaves `algorithm.averaging_rate` or `algorithm.theta_value` unset, a default takes its place,
and a later release may have another one. A journal leads to the same model only with the values of the rounds in it,
and neighbours that mix at different rates lose weight. So a run keeps the values that it began with.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from peer.compress.bound import BoundedCompressor
from peer.config import Config
from peer.errors import StateError
from peer.foreign_values import parse_json
from peer.gossip.averaging_rate import default_of_release_0_1
from peer.run_plan import LOOSE_THETA, averaging_rate, first_theta
from peer.state.disk import Disk, replace

FILE = "rates.json"
_RATE, _THETA, _SUMS = "averaging_rate", "first_theta", "float32_weight_gradients"
_ORDER = "normal_class_order"


class KeptRates(NamedTuple):
    """What a run began with."""

    averaging_rate: float
    """η."""
    first_theta: float
    """θ of modulo codes in the first round."""
    float32_weight_gradients: bool
    """Whether 8-bit training does without the rounding of weight gradients to bfloat16 that release 0.2 had on
    processors with AVX2 alone."""
    normal_class_order: bool = True
    """Whether class folders are numbered by their names in Unicode's normal form C, rather than as release 0.2 did."""


def settle_rates(config: Config, compressor: BoundedCompressor, disk: Disk) -> KeptRates:
    """Return the rates of the run that a state folder belongs to, and keep them there. The configuration overrules
    them. Raises StateError."""
    names = disk.names()
    kept = _read(disk) if FILE in names else None
    has_begun = any(name.startswith(("checkpoint-", "journal-")) for name in names)
    rate, theta = averaging_rate(config, compressor), first_theta(config)
    if config.algorithm.averaging_rate is None:
        if kept is not None:
            rate = kept.averaging_rate
        elif has_begun:
            # Release 0.1 kept nothing.
            rate = averaging_rate(config, compressor, default_of_release_0_1)
    if config.algorithm.theta_value is None:
        if kept is not None:
            theta = kept.first_theta
        elif has_begun:
            theta = LOOSE_THETA
    # What release 0.2 began is repeated with its rounding, and its classes keep their numbers.
    newer = (not has_begun, not has_begun) if kept is None else (kept.float32_weight_gradients, kept.normal_class_order)
    settled = KeptRates(rate, theta, *newer)
    if settled != kept:
        document = dict(zip((_RATE, _THETA, _SUMS, _ORDER), settled, strict=True))
        try:
            replace(disk, FILE, [json.dumps(document).encode()])
        except OSError as error:
            raise StateError(f"{FILE} cannot be written: {error.strerror}") from None
    return settled


def _read(disk: Disk) -> KeptRates:
    try:
        document = parse_json(disk.read(FILE))
        rate, theta, sums = document[_RATE], document.get(_THETA, LOOSE_THETA), document.get(_SUMS, False)
        order = document.get(_ORDER, False)
        is_valid = isinstance(rate, float) and 0 < rate <= 1 and isinstance(theta, float) and theta > 0
        if is_valid and isinstance(sums, bool) and isinstance(order, bool):
            return KeptRates(rate, theta, sums, order)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    raise StateError(
        f"{FILE} is damaged; restore it from a copy, or delete it and set algorithm.averaging_rate, and with a modulo"
        " code algorithm.theta_value, to what the run began with"
    )
