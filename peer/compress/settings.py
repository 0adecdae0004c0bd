"""Checks of compressors' settings: errors that name the setting and its valid values."""

from __future__ import annotations

import math
from collections.abc import Mapping

BY_ALGORITHM: Mapping[str, bool] = {"option": False}
"""Metadata of a setting that the algorithm decides about, so that the section `[compressor]` has no key for it."""


def require_whole(name: str, value: object, low: int, high: int) -> None:
    """Raise ValueError unless `value` is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is a whole number from {low} to {high}, not {value!r}")


def require_positive(name: str, value: object, high: float = math.inf) -> None:
    """Raise ValueError unless `value` is a finite number above 0, at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0.0 < value <= high and value < math.inf):
        limit = "" if math.isinf(high) else f" and at most {high:g}"
        raise ValueError(f"{name} is a number above 0{limit}, not {value!r}")


def require_flag(name: str, value: object) -> None:
    """Raise ValueError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is true or false, not {value!r}")
