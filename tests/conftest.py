"""Settings of the whole suite, and what several folders use."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import browser

# Times say nothing on a shared machine: no example may fail for being slow.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# A shell starts its background jobs with interrupts ignored, and every process below inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real browser, one for each file of tests."""
    with browser() as opened:
        yield opened
