"""Bounds of a compressor's error, as the papers' theorems need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from peer.compress.base import Compressor


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """Bounds on C(v) − v for one layer; None if there is none of that kind."""

    contraction: float | None = None
    """δ in E‖C(v) − v‖² ≤ (1 − δ) ‖v‖² for every v; CHOCO and error feedback need δ > 0."""
    variance: float | None = None
    """ω in E‖C(v) − v‖² ≤ ω ‖v‖² for an unbiased C; DCD and ECD need it."""
    absolute: float | None = None
    """The largest error of any one coordinate, for any v."""


class BoundedCompressor(Compressor, Protocol):
    """A compressor that knows its cost and its error bound; `compress.build` returns one."""

    def bits_per_value(self, size: int) -> float:
        """Return the nominal bits that one of `size` coordinates of a float32 vector costs, before entropy coding and
        headers. Scales are left out; indices count with their bound log2 C(size, k)."""
        ...

    def error_bound(self, size: int) -> ErrorBound:
        """Return the bounds for a layer of `size` numbers, rounding of the float type left aside."""
        ...
