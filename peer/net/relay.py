"""Two peers that cannot dial each other, connected through one that both can dial.

The relay carries the bytes of a connection between the two as they are: with mutual TLS they are encrypted from end to
end, and both ends check each other's certificate as if they had dialled each other. It sees who talks to whom, and how
much. What it carries is counted apart from its own traffic, and its rate is bounded.

`RelayService` is the middle. `Tunnels` is either end: to gRPC a neighbour beyond a relay has the address of a Unix
socket in a folder of ours, and callers from there come in by another one. (`proto/sottovoce/v1/relay.proto`)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from peer.errors import PeerUnreachable
from peer.net.rate_limits import Allowance
from peer.proto.sottovoce.v1 import relay_pb2

log = logging.getLogger(__name__)

SERVICE = relay_pb2.DESCRIPTOR.services_by_name["Relay"].full_name
PIECE_BYTES = 64 * 1024

_MAX_WAITING_EACH = 4
_MAX_TUNNELS = 64
_BACKOFF_FIRST_S = 0.2
_BURST_S = 1.0
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_LOST = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, OSError)
_Piece = relay_pb2.Piece


@dataclass(frozen=True)
class RelayAddress:
    """A peer that relays."""

    name: str
    address: str
    """Where it is dialled, "host:port"."""


@dataclass(eq=False)
class _Waiting:
    """A peer that nobody can dial, waiting for a caller."""

    context: Any
    task: asyncio.Task[Any]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    caller: Any = None
    """The stream of the one that called."""
    caller_name: str = ""
    caller_task: asyncio.Task[Any] | None = None

    async def write(self, piece: relay_pb2.Piece) -> None:
        async with self.lock:
            await self.context.write(piece)


class RelayService:
    """The peer in the middle."""

    def __init__(self, *, identify: Callable[[Any, str], str], kbytes_per_s: float) -> None:
        """`identify(context, claimed)` returns the name of the member at the other end, or raises SottoError.

        `kbytes_per_s` (units of 1000 bytes) bounds all that is carried, both ways together; 0 relays for nobody.
        """
        self.carried: dict[tuple[str, str], int] = {}
        """(from, to) → bytes."""
        self._identify = identify
        self._kbytes_per_s = kbytes_per_s
        rate = max(1.0, 1000.0 * kbytes_per_s)
        self._allowance = Allowance(rate=rate, burst=rate * _BURST_S, now=0.0)
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._tunnels = 0

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return what a gRPC server serves."""

        def method(serve: Callable[[object, Any], Coroutine[Any, Any, None]]) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.stream_stream_rpc_method_handler(
                serve,  # type: ignore[arg-type]
                request_deserializer=_Piece.FromString,
                response_serializer=_Piece.SerializeToString,
            )

        return grpc.method_handlers_generic_handler(
            SERVICE, {"Accept": method(self._accept), "Connect": method(self._connect)}
        )

    async def _first(self, context: Any) -> tuple[str, relay_pb2.Piece] | None:
        """Return who opened a stream, and its first piece; None if it was sent away."""
        try:
            async with asyncio.timeout(10.0):
                first = await context.read()
            if first is _EOF:
                return None
            if not self._kbytes_per_s:
                raise PeerUnreachable("this peer relays for nobody (transport.relay_kbytes_per_s is 0)")
            return self._identify(context, first.sender), first
        except Exception as error:  # Whatever it is, it concerns this stream alone.
            with contextlib.suppress(*_LOST):
                await context.write(_Piece(refusal=str(error)[:300]))
            return None

    async def _accept(self, _requests: object, context: Any) -> None:
        if (opened := await self._first(context)) is None:
            return
        name, _ = opened
        task = asyncio.current_task()
        assert task is not None
        waiting = _Waiting(context, task)
        queue = self._waiting.setdefault(name, deque())
        if len(queue) >= _MAX_WAITING_EACH:
            # The oldest may be of a process that is gone without a word.
            queue.popleft().task.cancel()
        queue.append(waiting)
        try:
            while (piece := await context.read()) is not _EOF:
                if waiting.caller is None:
                    await waiting.write(_Piece())
                elif piece.data:
                    await self._pass_on(piece.data, name, waiting.caller_name, waiting.caller.write)
        except _LOST:
            pass
        finally:
            with contextlib.suppress(ValueError):
                queue.remove(waiting)
            if not queue and self._waiting.get(name) is queue:
                del self._waiting[name]
            if waiting.caller_task is not None:
                waiting.caller_task.cancel()

    async def _connect(self, _requests: object, context: Any) -> None:
        if (opened := await self._first(context)) is None:
            return
        caller, first = opened
        queue = self._waiting.get(first.peer)
        refusal = None
        if not queue:
            refusal = f"{first.peer[:80]!r} does not wait at this relay; is it running, and is this its relay?"
        elif self._tunnels >= _MAX_TUNNELS:
            refusal = f"this relay carries {_MAX_TUNNELS} connections, and no more"
        if refusal is not None or not queue:
            await context.write(_Piece(refusal=refusal or ""))
            return
        waiting = queue.popleft()
        waiting.caller, waiting.caller_name, waiting.caller_task = context, caller, asyncio.current_task()
        self._tunnels += 1
        log.info("relaying between %s and %s", caller, first.peer)
        try:
            await waiting.write(_Piece(peer=caller))
            await context.write(_Piece(peer=first.peer))
            while (piece := await context.read()) is not _EOF:
                if piece.data:
                    await self._pass_on(piece.data, caller, first.peer, waiting.write)
        except _LOST:
            pass
        finally:
            self._tunnels -= 1
            waiting.caller_task = None
            waiting.task.cancel()

    async def _pass_on(
        self, data: bytes, sender: str, receiver: str, write: Callable[[relay_pb2.Piece], Coroutine[Any, Any, None]]
    ) -> None:
        wait_s = self._allowance.wait_s(len(data), asyncio.get_running_loop().time())
        if wait_s:
            await asyncio.sleep(wait_s)
        self.carried[sender, receiver] = self.carried.get((sender, receiver), 0) + len(data)
        await write(_Piece(data=data))


class Tunnels:
    """The ends of this peer: its way to neighbours beyond a relay, and its own place at one."""

    def __init__(
        self,
        *,
        name: str,
        open_channel: Callable[[RelayAddress], tuple[Any, Any]],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        heartbeat_s: float,
    ) -> None:
        """`open_channel(relay)` returns a gRPC channel to a relay, and the metadata that goes with each call on it;
        `spawn` starts a task that ends with its owner."""
        self.sent: dict[str, int] = {}
        """Peer → bytes that went to it through a relay."""
        self.received: dict[str, int] = {}
        self.trouble: dict[str, str] = {}
        """Peer → why the last attempt to reach it came to nothing."""
        self._name = name
        self._open_channel, self._spawn, self._heartbeat_s = open_channel, spawn, heartbeat_s
        self._folder = Path(tempfile.mkdtemp(prefix="sotto-"))  # Only for its owner.
        self._servers: dict[str, asyncio.Server] = {}

    @property
    def listening_socket(self) -> Path:
        """Where our own gRPC server takes callers from a relay."""
        return self._folder / "in"

    def close(self) -> None:
        """Remove the sockets."""
        for server in self._servers.values():
            server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def address_of(self, peer: str, relay: RelayAddress) -> str:
        """Return the gRPC address that leads to a peer through its relay."""
        path = self._folder / f"to-{len(self._servers)}"
        if peer not in self._servers:
            # Tasks of our own: asyncio would report those of a server as failed when they end with this peer.
            def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                self._spawn(self._call(peer, relay, reader, writer), f"relayed to {peer}")

            self._servers[peer] = await asyncio.start_unix_server(serve, path)
        return f"unix:{self._servers[peer].sockets[0].getsockname()}"

    async def offer(self, relay: RelayAddress) -> None:
        """Wait at a relay for callers, one after the other, for as long as this peer runs."""
        pause, said = _BACKOFF_FIRST_S, ""
        while True:
            taken = asyncio.Event()
            self._spawn(self._wait_for_caller(relay, taken), f"wait at {relay.name}")
            await taken.wait()
            trouble = self.trouble.get(relay.name, "")
            if not trouble:
                pause, said = _BACKOFF_FIRST_S, ""
                continue
            if trouble != said:
                log.warning("cannot wait at relay %s: %s", relay.name, trouble)
                said = trouble
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 10.0)

    async def _wait_for_caller(self, relay: RelayAddress, taken: asyncio.Event) -> None:
        channel, metadata = self._open_channel(relay)
        call = _method(channel, "Accept", metadata)
        beat: asyncio.Task[None] | None = None
        try:
            await call.write(_Piece(sender=self._name))
            beat = asyncio.create_task(self._keep_alive(call))
            while True:
                async with asyncio.timeout(3 * self._heartbeat_s):
                    piece = await call.read()
                if piece is _EOF or piece.refusal:
                    raise ConnectionError("it ended the stream" if piece is _EOF else piece.refusal)
                self.trouble.pop(relay.name, None)
                if piece.peer:
                    break
            beat.cancel()
            taken.set()
            reader, writer = await asyncio.open_unix_connection(str(self.listening_socket))
            await self._pump(call, reader, writer, piece.peer)
        except (*_LOST, TimeoutError) as error:
            if not taken.is_set():
                self.trouble[relay.name] = _words(error) or "it does not answer"
        finally:
            taken.set()
            if beat is not None:
                beat.cancel()
            call.cancel()
            await channel.close()

    async def _keep_alive(self, call: Any) -> None:
        with contextlib.suppress(*_LOST):
            while True:
                await call.write(_Piece())
                await asyncio.sleep(self._heartbeat_s)

    async def _call(
        self, peer: str, relay: RelayAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        channel, metadata = self._open_channel(relay)
        call = _method(channel, "Connect", metadata)
        try:
            await call.write(_Piece(sender=self._name, peer=peer))
            answer = await call.read()
            if answer is _EOF or not answer.peer:
                refusal = "it ended the stream" if answer is _EOF else answer.refusal
                raise ConnectionError(refusal)
            self.trouble.pop(peer, None)
            await self._pump(call, reader, writer, peer)
        except _LOST as error:
            self.trouble[peer] = f"its relay {relay.name} at {relay.address} could not connect us: {_words(error)}"
        finally:
            writer.transport.abort()
            call.cancel()
            await channel.close()

    async def _pump(self, call: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        """Carry bytes both ways until either end is done."""

        async def outward() -> None:
            while data := await reader.read(PIECE_BYTES):
                await call.write(_Piece(data=data))
                self.sent[peer] = self.sent.get(peer, 0) + len(data)

        async def inward() -> None:
            while (piece := await call.read()) is not _EOF:
                self.received[peer] = self.received.get(peer, 0) + len(piece.data)
                writer.write(piece.data)
                await writer.drain()

        async def until_lost(work: Coroutine[Any, Any, None]) -> None:
            with contextlib.suppress(*_LOST):
                await work

        tasks = [asyncio.create_task(until_lost(each)) for each in (outward(), inward())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            writer.transport.abort()


def _method(channel: Any, name: str, metadata: Any) -> Any:
    method = channel.stream_stream(
        f"/{SERVICE}/{name}",
        request_serializer=_Piece.SerializeToString,
        response_deserializer=_Piece.FromString,
    )
    return method(metadata=metadata)


def _words(error: BaseException) -> str:
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return "".join(c if c.isprintable() else " " for c in (details or type(error).__name__)[:200])
