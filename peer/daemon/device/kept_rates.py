"""The averaging rate, the first θ, the rounding and the order of classes that a run began with, kept beside its state.

Where the configuration leaves `algorithm.averaging_rate` or `algorithm.theta_value` unset, a default takes its place,
which a later release may change. A journal leads to the same model only with the values of its rounds, and neighbours
that mix at different rates lose weight. A run therefore keeps its first values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from peer.compress.bound import BoundedCompressor
from peer.config.options import Config
from peer.errors import StateError
from peer.run.plan import algorithm_spec, averaging_rate, first_theta
from peer.state.disk import Disk
from peer.state.kept_file import KeptFile
from peer.state.recovery import begun_round

_RATE, _THETA, _SUMS = "averaging_rate", "first_theta", "float32_weight_gradients"
_ORDER = "normal_class_order"


class KeptRates(NamedTuple):
    """The first values of a run."""

    averaging_rate: float
    """η."""
    first_theta: float
    """θ of modulo codes in the first round."""
    float32_weight_gradients: bool
    """Whether 8-bit training does without the rounding of weight gradients to bfloat16 that release 0.2 had on
    processors with AVX2 alone."""
    normal_class_order: bool = True
    """Whether class folders are numbered by their names in Unicode's normal form C, rather than as release 0.2 did."""


def _of_json(tree: Mapping[str, Any]) -> KeptRates:
    found = KeptRates(tree[_RATE], tree[_THETA], tree.get(_SUMS, False), tree.get(_ORDER, False))
    is_rate = isinstance(found.averaging_rate, float) and 0 < found.averaging_rate <= 1
    is_theta = isinstance(found.first_theta, float) and found.first_theta > 0
    if not (is_rate and is_theta and {*map(type, found[2:])} == {bool}):
        raise ValueError("no rates that a run can begin with")
    return found


RATES = KeptFile[KeptRates](
    "rates.json",
    lambda kept: dict(zip((_RATE, _THETA, _SUMS, _ORDER), kept, strict=True)),
    _of_json,
    "restore it from a copy, or delete it and set algorithm.averaging_rate, and with a modulo code"
    " algorithm.theta_value, to what the run began with",
)


def settle_rates(config: Config, compressor: BoundedCompressor, disk: Disk) -> KeptRates:
    """Return the rates of the run that a state folder belongs to, and keep them there. The configuration overrules
    them. Raises StateError."""
    kept, options = RATES.read(disk), config.algorithm
    rate, theta = averaging_rate(config, compressor), first_theta(config)
    if kept is not None:
        rate = kept.averaging_rate if options.averaging_rate is None else rate
        theta = kept.first_theta if options.theta_value is None else theta
        newer = kept[2:]
    else:
        has_begun = begun_round(disk) is not None
        is_open = options.averaging_rate is None or (options.theta_value is None and algorithm_spec(config).modulo)
        if has_begun and is_open:
            raise StateError(f"{RATES.name} is missing in a run that has begun; {RATES.if_damaged}")
        # Runs that release 0.2 began are repeated with its rounding, and their classes keep their numbers.
        newer = (not has_begun, not has_begun)
    settled = KeptRates(rate, theta, *newer)
    if settled != kept:
        RATES.keep(disk, settled)
    return settled
