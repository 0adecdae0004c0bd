"""The tasks of one transport: they end with it, and an error that nobody expected in one of them ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Tasks:
    """A group of tasks whose first unexpected error surfaces in `wait_closed`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Begin to wait for an end; on the event loop."""
        self._ended = asyncio.get_running_loop().create_future()

    @property
    def started(self) -> bool:
        """Whether the loop runs on which tasks can be spawned."""
        return self._ended is not None

    async def wait_closed(self) -> None:
        """Return when `finish` was called. Raises the first error that `fail` was given."""
        assert self._ended is not None, "start() comes first"
        await asyncio.shield(self._ended)

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Start a task. An error in it is a bug."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def fail(self, error: BaseException) -> None:
        """Let `wait_closed` raise an error; only the first counts."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def cancel(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def finish(self) -> None:
        """Let `wait_closed` return, unless something failed before."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
