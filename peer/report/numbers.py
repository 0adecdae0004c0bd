"""Figures written for people: one way for terminal, page and status."""

from __future__ import annotations

from datetime import UTC, datetime

from peer.records import ACCURACY, Criterion
from peer.terminal import duration as duration

MISSING = "–"


def figure(criterion: Criterion, value: float | None) -> str:
    """Return an accuracy as "95.1 %", any other figure as a number."""
    return percent(value) if criterion == ACCURACY else significant(value)


def difference(criterion: Criterion, value: float) -> str:
    """Return the difference of two figures with its sign: "−2.5 points" of accuracies, "−0.0120" of others."""
    if criterion == ACCURACY:
        return f"{100 * value:+.1f} points".replace("-", "−")
    return f"{'−' if value < 0 else '+'}{significant(abs(value))}"


def percent(fraction: float | None, digits: int = 1) -> str:
    """Return 0.9512 as "95.1 %"."""
    return MISSING if fraction is None else f"{100 * fraction:.{digits}f} %"


def size(num_bytes: float | None) -> str:
    """Return bytes in units of 1,000: "3.2 MB"."""
    if num_bytes is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5 or unit == "GB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{significant(num_bytes)} {unit}"
        num_bytes /= 1000
    raise AssertionError("the last unit always returns")


def short_size(num_bytes: float) -> str:
    """Return a round number of bytes without trailing zeros, for an axis: "200 kB"."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:g} {unit}"
    return f"{num_bytes:g} B" if num_bytes else "0"


def short_duration(seconds: float) -> str:
    """Return a round number of seconds, for an axis."""
    return f"{seconds:g}" if seconds < 6000 else duration(seconds)


def short(value: float) -> str:
    """Return a round number, for an axis."""
    return f"{value:g}"


def times(factor: float | None) -> str:
    """Return a reduction as "312×"."""
    if factor is None:
        return MISSING
    return f"{factor:,.0f}×" if factor >= 10 else f"{factor:.1f}×"


def when(moment: str) -> str:
    """Return an ISO 8601 time as "22 Nov 2026, 10:05 UTC"; any other text unchanged."""
    try:
        return f"{datetime.fromisoformat(moment).astimezone(UTC):%-d %b %Y, %H:%M} UTC"
    except (ValueError, OverflowError):
        return moment


def significant(value: float | None) -> str:
    """Return a number with three significant digits, without an exponent where that stays short."""
    if value is None:
        return MISSING
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.2e}"
    # "#" keeps trailing zeros, so that columns of figures line up.
    text = f"{value:#.3g}".rstrip(".")
    return f"{float(text):,.0f}" if "e" in text else text


def count(value: int | None) -> str:
    """Return a whole number with separators."""
    return MISSING if value is None else f"{value:,}"
