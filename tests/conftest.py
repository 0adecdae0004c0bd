"""Settings of the whole suite, and what several folders use."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before NumPy is imported: one thread computes, as in `sotto`. The threads of several workers wait for one another by
# spinning, which took four times the processor time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# As where the environment is active: a command that is advised is then called `sotto`.
os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', '')}"

from peer.ops.peer_processes import ForkServer
from tests.browser import browser
from tests.warm_python import WarmPython

# Times say nothing on a shared machine: no example may fail for being slow.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# A shell starts its background jobs with interrupts ignored, and every process below inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


class SharedForkServer(ForkServer):
    """Outlives the clusters whose peers it forks: each test would import the same libraries for seconds."""

    def close(self) -> None:
        """Leave it open for others. What was forked has to have ended."""

    def end(self) -> None:
        """Close it."""
        super().close()


@pytest.fixture(scope="session")
def _warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    with (
        WarmPython(tmp_path_factory.mktemp("libraries")) as below,
        WarmPython(tmp_path_factory.mktemp("warm"), below) as server,
    ):
        yield server


@pytest.fixture(scope="session")
def fork_server(_warm_python: WarmPython) -> Iterator[ForkServer]:
    """What the peers of all tests are forked from that say no more of it."""
    server = SharedForkServer([str(_warm_python.executable), "-m", "peer.cli.fork_server"])
    yield server
    server.end()


@pytest.fixture(scope="module")
def warm_python(_warm_python: WarmPython) -> Iterator[None]:
    """For tests of what processes do together, not of how each begins: `sys.executable` is a `tests.warm_python`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(_warm_python.executable))
        yield


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real browser, one for each file of tests."""
    with browser() as opened:
        yield opened
