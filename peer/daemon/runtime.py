"""The peer's process apart from its work: clock, worker threads, wake-ups, signals, the request to stop.

The event loop of asyncio belongs to the sockets. Long work runs in a worker thread, so that heartbeats and credits are
answered during a local step. Nothing here knows an algorithm, a neighbour or a file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

from peer.config.options import PeerOptions
from peer.errors import INTERRUPTED

log = logging.getLogger("sotto")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LONGEST_WAIT_S = 1.0
"""Longest wait before a waiting task looks around: some things end without an event, such as patience."""


_PARENT = "SOTTO_PARENT"
"""The variable with the id of the process that started this one, and ends without it."""


def has_parent() -> bool:
    """Return whether another process, such as `sotto up`, waits for this one."""
    return _PARENT in os.environ


class Runtime:
    """The process of one peer."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._syncer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sync")
        self._wake = asyncio.Event()
        self._started = time.monotonic()
        self.began_at = 0.0
        """When this process began, on the clock of `now`."""
        self._stop_asked_at: float | None = None
        self.stop_reason: str | None = None
        """Why this peer ends; None while it does not."""
        self.is_interrupted = False
        """Whether a signal, or the end of the process that started it, is why this peer ends."""
        self.stops_at_once = False
        """Whether the round under way is not worth waiting for."""
        self.reload_asked = asyncio.Event()
        """Set by SIGHUP."""

    # -- time ----------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the seconds since the run began on this device, earlier processes included."""
        return self.began_at + time.monotonic() - self._started

    def continue_from(self, seconds: float) -> None:
        """Count on from where an earlier process was."""
        self.began_at = seconds

    # -- waiting and working -------------------------------------------------------------------------------------------

    async def work(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Call a function in the worker thread. One runs at a time, in the order in which they were handed over."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def sync(self, function: Callable[[], T]) -> T:
        """Call a function that waits for the disk, beside the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._syncer, function)

    def wake(self) -> None:
        """Let tasks in `wait` look around."""
        self._wake.set()

    async def wait(self, until: float | None = None, event: asyncio.Event | None = None) -> None:
        """Return after `wake`, or where there is an `event` once that is set, and clear it; or at the time `until`, or
        after a second, whichever is first."""
        event = event or self._wake
        timeout = _LONGEST_WAIT_S if until is None else min(_LONGEST_WAIT_S, max(0.0, until - self.now()))
        try:
            # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that comes with the wake-up.
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            return
        event.clear()

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def stops(self) -> bool:
        """Whether this peer was asked to stop."""
        return self.stop_reason is not None

    @property
    def stopping_for_s(self) -> float:
        """For how long it has been stopping; 0 while it is not."""
        return 0.0 if self._stop_asked_at is None else self.now() - self._stop_asked_at

    def request_stop(self, reason: str, *, at_once: bool = False) -> None:
        """End after the round under way, or `at_once`, in the midst of it. The first reason counts."""
        self.stops_at_once = self.stops_at_once or at_once
        if self.stop_reason is None:
            self.stop_reason, self._stop_asked_at = reason, self.now()
            log.info("%s: stopping%s", reason, "" if at_once else " after this round")
        self.wake()

    def install_signals(self) -> None:
        """Stop on SIGTERM and SIGINT, at once on a second one; reload on SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self.reload_asked.set)

    def _on_signal(self, number: int) -> None:
        if self.stops:
            log.warning("second signal: stopping at once")
            # A worker thread in a long local step cannot be interrupted in any gentler way.
            os._exit(INTERRUPTED)
        self.is_interrupted = True
        self.request_stop(f"stopped by {signal.Signals(number).name}")

    async def watch_parent(self) -> None:
        """Stop when the `sotto up` that started this process is gone: no peer may be left running."""
        while has_parent():
            await asyncio.sleep(1.0)
            if os.getppid() != int(os.environ[_PARENT]):
                self.is_interrupted = not self.stops
                self.request_stop("the process that started this peer is gone")
                return

    def close(self) -> None:
        """End the threads after their present calls: nothing may write to a file that is about to be closed."""
        self._syncer.shutdown(wait=True, cancel_futures=True)
        self._worker.shutdown(wait=True, cancel_futures=True)


def in_event_loop(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine in an event loop of its own; return its result. After it, SIGTERM interrupts this process as
    SIGINT does. An event loop leaves the signal without a handler, and the first process of a container would not
    notice it.
    """
    try:
        return asyncio.run(main)
    finally:
        with suppress(ValueError):  # Not the main thread: then somebody else handles signals.
            signal.signal(signal.SIGTERM, signal.default_int_handler)


def pace(options: PeerOptions, started: float, share: float = 1.0) -> None:
    """Sleep for as long as a local step that began at `started` (`time.perf_counter`) is to take longer: peers of a
    study stand for devices of a known speed, and others may use only a `share` of the time."""
    took = time.perf_counter() - started
    wanted = max(took, options.min_step_s) * (1.0 + options.slow_down)
    wanted = max(wanted, took / share)
    if wanted > took:
        time.sleep(wanted - took)
