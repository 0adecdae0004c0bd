"""The process of a peer without a peer: waiting, working, stopping."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from peer.config.options import PeerOptions
from peer.daemon.runtime import Runtime, pace


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = Runtime()
    yield runtime
    runtime.close()


def test_waiting_ends_with_a_wake_up_that_came_before_it_too(runtime: Runtime) -> None:
    async def story() -> None:
        runtime.wake()
        began = runtime.now()
        await runtime.wait()
        assert runtime.now() - began < 0.5
        # It was used up: now it takes the time that was given.
        await runtime.wait(until=began + 0.6)
        assert runtime.now() >= began + 0.6

    asyncio.run(story())


def test_a_time_that_is_past_is_not_waited_for(runtime: Runtime) -> None:
    async def story() -> None:
        async with asyncio.timeout(0.5):
            await runtime.wait(until=-5.0)

    asyncio.run(story())


def test_work_is_done_in_the_order_in_which_it_was_handed_over(runtime: Runtime) -> None:
    done: list[int] = []
    gate = threading.Event()

    def first(number: int) -> None:
        gate.wait(10)
        done.append(number)

    async def story() -> None:
        tasks = [asyncio.ensure_future(runtime.work(first, 1)), asyncio.ensure_future(runtime.work(done.append, 2))]
        # The disk does not wait behind the work.
        assert await runtime.sync(lambda: "synced") == "synced"
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(story())
    assert done == [1, 2]


def test_the_first_reason_to_stop_counts_and_a_later_one_may_hurry(runtime: Runtime) -> None:
    assert (runtime.stops, runtime.stopping_for_s) == (False, 0.0)
    runtime.request_stop("stopped by the operator")
    assert not runtime.stops_at_once
    runtime.request_stop("the loss is not finite", at_once=True)
    assert runtime.stop_reason == "stopped by the operator"
    assert runtime.stops_at_once
    assert runtime.stopping_for_s >= 0.0


def test_the_clock_goes_on_where_an_earlier_process_was(runtime: Runtime) -> None:
    before = runtime.now()
    runtime.continue_from(1000.0)
    assert runtime.began_at == 1000.0
    assert 1000.0 <= runtime.now() - before < 1001.0


def test_closing_waits_for_what_is_being_written() -> None:
    written = threading.Event()
    runtime = Runtime()

    def write() -> None:
        threading.Event().wait(0.3)
        written.set()

    async def story() -> None:
        # The task is gone long before the thread is.
        task = asyncio.ensure_future(runtime.work(write))
        await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(story())
    runtime.close()
    assert written.is_set()


@pytest.mark.parametrize(("share", "slept"), [(1.0, []), (0.25, [6.0])])
def test_a_local_step_takes_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, share: float, slept: list[float]
) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    monkeypatch.setattr(time, "perf_counter", lambda: 12.0)
    pace(PeerOptions(), 10.0, share)
    assert sleeps == slept
