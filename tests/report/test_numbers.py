"""Figures for people."""

from __future__ import annotations

import pytest

from peer.report.numbers import (
    count,
    percent,
    short,
    short_duration,
    short_size,
    significant,
    size,
    times,
    when,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (percent(0.9512), "95.1 %"),
        (percent(None), "–"),
        (percent(1.0, 0), "100 %"),
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1000), "1.00 kB"),
        (size(123_456), "123 kB"),
        (size(999_600), "1.00 MB"),
        (size(2.5e9), "2.50 GB"),
        (size(4e13), "40,000 GB"),
        (size(None), "–"),
        (times(312.4), "312×"),
        (times(4.2), "4.2×"),
        (times(None), "–"),
        (significant(0.25), "0.250"),
        (significant(312.0), "312"),
        (significant(1234.5), "1,230"),
        (significant(0.0), "0.00"),
        (significant(3e-9), "3.00e-09"),
        (significant(float("nan")), "nan"),
        (significant(None), "–"),
        (count(1234567), "1,234,567"),
        (count(None), "–"),
        (short_size(0), "0"),
        (short_size(200_000), "200 kB"),
        (short_size(2.5e6), "2.5 MB"),
        (short(0.1), "0.1"),
        (short_duration(40), "40"),
        (short_duration(7200), "2 h 00 min"),
        (when("2026-11-02T10:05:59+01:00"), "2 Nov 2026, 09:05 UTC"),
        (when("yesterday"), "yesterday"),
    ],
)
def test_figures_are_short_and_have_units(text: str, expected: str) -> None:
    assert text == expected
