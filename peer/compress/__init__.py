"""Compressors: the only place where information is lost on purpose.

Each compressor turns one layer of a flat vector into a `LayerPayload` and knows neither algorithms, bytes nor the
network. `build(kind, **settings)` finds one by name; the functions of `decompress` turn payloads back into numbers.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from peer.compress.base import Compressor
from peer.compress.float_types import type_named
from peer.compress.grid import Grid
from peer.compress.modulo import Modulo
from peer.compress.none import NoCompression
from peer.compress.payload import Rounding
from peer.compress.qsgd import Qsgd
from peer.compress.random_k import RandomK
from peer.compress.settings import BY_ALGORITHM
from peer.compress.sign import Sign
from peer.compress.ternary import Ternary
from peer.compress.top_k import TopK

_Class = type[NoCompression | TopK | RandomK | Qsgd | Grid | Sign | Ternary | Modulo]

COMPRESSORS: dict[str, _Class] = {
    cls.kind: cls for cls in (NoCompression, TopK, RandomK, Qsgd, Grid, Sign, Ternary, Modulo)
}
"""Every compressor by its name."""


def build(kind: str, **settings: Any) -> Compressor:
    """Return the compressor of that name. Raises ValueError, naming the setting and its valid values.

    `value_type` and `rounding` may be given by their names in lower case.
    """
    if kind not in COMPRESSORS:
        raise ValueError(f"there is no compressor {kind!r}; valid: {', '.join(COMPRESSORS)}")
    known = settings_of(kind)
    for name in settings:
        if name not in known:
            valid = ", ".join(known) if known else "none"
            raise ValueError(f"the compressor {kind} has no setting {name!r}; valid: {valid}")
    for name, required in known.items():
        if required and settings.get(name) is None:
            raise ValueError(f"the compressor {kind} needs the setting {name!r}")
    make: Any = COMPRESSORS[kind]
    try:
        compressor: Compressor = make(**{name: _named(kind, name, value) for name, value in settings.items()})
        return compressor
    except ValueError as error:
        raise ValueError(f"compressor {kind}: {error}") from None


def settings_of(kind: str) -> dict[str, bool]:
    """Return the settings of a compressor and whether each is required."""
    return {f.name: f.default is MISSING for f in fields(COMPRESSORS[kind])}


def options_of(kind: str) -> tuple[str, ...]:
    """Return the settings of a compressor that are keys of the section `[compressor]`, by the same names."""
    return tuple(f.name for f in fields(COMPRESSORS[kind]) if f.metadata != BY_ALGORITHM)


def _named(kind: str, name: str, value: object) -> object:
    """Return the enumeration's member where a setting was given by its name."""
    if name == "value_type" and isinstance(value, str):
        return type_named(value)
    if kind == "modulo" and name == "rounding" and isinstance(value, str):
        if value.upper() not in Rounding.__members__:
            raise ValueError(f"rounding is nearest, stochastic or dither, not {value!r}")
        return Rounding[value.upper()]
    return value
