"""Peers made of nothing but a transport, for tests that use real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from peer.config.options import TransportOptions
from peer.net.hello import HelloInfo
from peer.net.neighbor import Neighbor
from peer.net.security.authority import CertificateAuthority
from peer.net.security.credentials import Access, Credentials
from peer.net.transport import Transport
from peer.node.delivery import InLink, OutLink
from peer.wire.start_model import StartModel
from tests.ops.answering import HONEST

NAMES = ("ada", "ben", "cleo", "dan")
QUICK = TransportOptions(backoff_max_s=0.3, dial_timeout_s=5)


@functools.cache
def authority() -> CertificateAuthority:
    return CertificateAuthority.create("tests")


@functools.cache
def credentials(name: str) -> Credentials:
    return authority().credentials(authority().issue(name))


def hello_of(index: int, **changes: Any) -> HelloInfo:
    info = HelloInfo(
        run="tests",
        algorithm="sgp",
        run_digest="1" * 64,
        start=StartModel("2" * 64),
        graph_digest="3" * 64,
        num_peers=len(NAMES),
        name=NAMES[index],
        max_frame_bytes=512 * 1024**2,
    )
    return replace(info, **changes)


class Mind:
    """A handler with the daemon's bookkeeping, in which whatever comes is durable at once."""

    def __init__(self) -> None:
        self.transport: Transport | None = None
        self.name = NAMES[0]
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.out: dict[int, OutLink] = {}
        self.heard: dict[int, InLink] = {}
        self.frames: list[tuple[int, bytes]] = []
        self.requests: list[tuple[int, bytes]] = []
        self.bulletins: list[tuple[int, str, bytes]] = []
        self.events: list[tuple[Any, ...]] = []
        self.takes_at_once = True
        self.acknowledges = True

    def send(self, peer: int, frame: bytes) -> None:
        assert self.transport is not None
        self.transport.send(peer, self._out(peer).push(frame), frame)

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        self.events.append(("up", peer, remote_has))
        self._out(peer).acknowledge(remote_has)
        return self._out(peer).unacknowledged(remote_has)

    def link_down(self, peer: int, reason: str) -> None:
        self.events.append(("down", peer, reason))

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        if seq == 0:
            self.requests.append((peer, frame))
            return self.takes_at_once
        link = self._heard(peer)
        if link.accept(seq):
            self.frames.append((peer, frame))
            link.mark_durable(seq)
        if self.acknowledges and self.transport is not None:
            self.transport.acknowledge(peer, link.durable_seq)
        return self.takes_at_once

    def receipt(self, peer: int, upto: int) -> None:
        self._out(peer).acknowledge(upto)

    def bulletin_received(self, peer: int, topic: str, data: bytes) -> None:
        self.bulletins.append((peer, topic, data))

    def goodbye(self, peer: int, reason: str) -> None:
        self.events.append(("goodbye", peer, reason))

    def last_received(self, peer: int) -> int:
        return self._heard(peer).durable_seq

    async def control(self, verb: str, arguments: dict[str, Any], caller: str) -> dict[str, Any]:
        self.asked.append((verb, arguments))
        return HONEST[verb] | ({"name": self.name} if "name" in HONEST[verb] else {})

    def backlog(self, peer: int) -> int:
        return self._out(peer).backlog

    def _out(self, peer: int) -> OutLink:
        return self.out.setdefault(peer, OutLink())

    def _heard(self, peer: int) -> InLink:
        return self.heard.setdefault(peer, InLink())


def build(
    index: int,
    mind: Mind,
    neighbors: list[Neighbor],
    *,
    listen: str | None = "127.0.0.1:0",
    options: TransportOptions = QUICK,
    hello: HelloInfo | None = None,
    security: Access | str | None = "own",
    me: int | None = None,
    **extra: Any,
) -> Transport:
    """Return the peer `index` of NAMES, or one that says that it is peer `me`."""
    own = credentials(NAMES[index]) if isinstance(security, str) else security
    transport = Transport(
        me=index if me is None else me,
        listen=listen,
        neighbors=neighbors,
        hello=hello or hello_of(index),
        security=own,
        options=options,
        handler=mind,
        **extra,
    )
    mind.transport, mind.name = transport, NAMES[index]
    return transport


def passive(index: int) -> Neighbor:
    return Neighbor(index, NAMES[index], None, dial=False)


def dialled(index: int, port: int | None) -> Neighbor:
    return Neighbor(index, NAMES[index], f"127.0.0.1:{port}", dial=True)


@contextlib.asynccontextmanager
async def running(*transports: Transport) -> AsyncIterator[None]:
    """Start transports, close them at the end, and let nothing that went wrong in them pass."""
    started = []
    try:
        for transport in transports:
            await transport.start()
            started.append(transport)
        yield
    finally:
        for transport in reversed(started):
            await transport.close("the test is over")
    for transport in started:
        await transport.wait_closed()


@contextlib.asynccontextmanager
async def pair(
    one: Mind, other: Mind, *, options: TransportOptions = QUICK, security: Access | str | None = "own"
) -> AsyncIterator[tuple[Transport, Transport]]:
    """Two peers with a link that is up: 0 listens, 1 only dials."""
    listener = build(0, one, [passive(1)], options=options, security=security)
    async with running(listener):
        dialler = build(1, other, [dialled(0, listener.port)], listen=None, options=options, security=security)
        async with running(dialler):
            await until(lambda: listener.is_up(1) and dialler.is_up(0))
            yield listener, dialler


async def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    """Wait until something is true. Fails if that takes absurdly long."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


class Proxy:
    """A TCP relay that can be cut, stalled, or told to cut itself after so many bytes."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = 0
        self.cut_after: int | None = None
        self.pause_s = 0.0
        """How long 16 kB take each."""
        self.connections = 0
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        budget = [self.cut_after]
        self._writers |= {writer, there_writer}
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink, budget))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, budget: list[int | None]) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(16384):
                await self.flowing.wait()
                await asyncio.sleep(self.pause_s)
                if budget[0] is not None:
                    budget[0] -= len(data)
                    if budget[0] < 0:
                        self.cut()
                        break
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
        self._writers.discard(sink)
