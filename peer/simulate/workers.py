"""Worker processes of one simulation: each holds some of the peers, and answers for them.

The simulation is built once and then forked, so that every worker has the peers, the data and the graph without a copy
being sent. The agenda, the links and the figures of the run stay in the first process, which tells the workers the
events of their peers and their times. Calls in the same stretch of virtual time concern different peers, or come in
order to the same one, so their outcomes do not depend on the number of workers.

The pipes carry a JSON text and the bytes to which it refers (frames, models), nothing else.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import signal
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from peer.errors import ConfigError, LocalProtocolError

Packed: TypeAlias = tuple[Any, Sequence[bytes | memoryview]]
"""JSON values, and the bytes that go with them."""
Answer: TypeAlias = Callable[[Any, Sequence[memoryview]], Packed]
"""A worker's answer to a request."""


class Workers:
    """The workers of one simulation; a context manager that ends them."""

    def __init__(self, parts: Sequence[range], answer: Answer) -> None:
        """Fork one worker for each part of the peers. `answer` is called there. Raises ConfigError if processes cannot
        be forked."""
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigError("needs a system that can fork processes", key="--workers", valid="1")
        self.parts = list(parts)
        """The peers of each worker, ascending."""
        self._starts = [part.start for part in parts]
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("fork")
        # Objects that exist by now are left out of the workers' collections, which would copy every page of them.
        gc.freeze()
        for _ in self.parts:
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(target=_serve, args=(theirs, list(self._connections), answer), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()
        gc.unfreeze()

    def worker_of(self, peer: int) -> int:
        """Return the number of the worker that holds a peer."""
        return bisect_right(self._starts, peer) - 1

    def ask(self, requests: Sequence[Packed | None]) -> list[tuple[Any, list[memoryview]]]:
        """Send each worker its request, if it has one, and return the answers in the same order (None for no request).

        Raises LocalProtocolError if a worker has ended.
        """
        try:
            for connection, request in zip(self._connections, requests, strict=True):
                if request is not None:
                    _send(connection, request)
            return [
                (None, []) if request is None else _receive(connection)
                for connection, request in zip(self._connections, requests, strict=True)
            ]
        except (EOFError, OSError):
            raise LocalProtocolError("a worker process of the simulation ended; its traceback is above") from None


def _serve(connection: Connection, others: Sequence[Connection], answer: Answer) -> None:
    """Answer requests until the first process closes the pipe or ends."""
    # Ctrl-C goes to all processes of a terminal, and SIGTERM to all of a group or container; the first one decides what
    # it means, and its end ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Inherited ends of pipes would keep them open when the first process is gone.
    for other in others:
        other.close()
    while True:
        try:
            values, blobs = _receive(connection)
        except EOFError:
            return
        try:
            _send(connection, answer(values, blobs))
        except BrokenPipeError:
            return


def _send(connection: Connection, packed: Packed) -> None:
    values, blobs = packed
    text = json.dumps([values, [len(blob) for blob in blobs]], separators=(",", ":")).encode()
    connection.send_bytes(b"".join([struct.pack("<Q", len(text)), text, *blobs]))


def _receive(connection: Connection) -> tuple[Any, list[memoryview]]:
    content = memoryview(connection.recv_bytes())
    (length,) = struct.unpack_from("<Q", content)
    values, sizes = json.loads(bytes(content[8 : 8 + length]))
    blobs, start = [], 8 + length
    for size in sizes:
        blobs.append(content[start : start + size])
        start += size
    return values, blobs
