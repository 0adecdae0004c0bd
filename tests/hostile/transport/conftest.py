"""Limits on rates, where how fast the machine is must make no difference."""

from __future__ import annotations

import pytest

from peer.rate_limits import Allowance


@pytest.fixture
def no_allowance_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass for allowances: a burst is all that there is, however slowly a test spends it."""
    monkeypatch.setattr(Allowance, "_refill", lambda self, now: None)
