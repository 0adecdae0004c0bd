"""Either end of a connection through a relay: this peer's way to neighbours beyond one, and its own place at one.

To gRPC a neighbour beyond a relay has the address of a Unix socket in a folder of ours, and callers from a relay come
in by another one. Data through those sockets travel in pieces on a stream to the relay (`peer.net.relay`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from peer.errors import PeerUnreachable, RemoteError, StateError, remedy
from peer.foreign_text import printable
from peer.net.neighbor import RelayAddress
from peer.net.relay import MAX_TUNNELS, PieceStream
from peer.net.rpc import DialledStream, StreamLost, socket_address
from peer.net.tasks import Tasks
from peer.proto.sottovoce.v1.relay_pb2 import Piece

log = logging.getLogger(__name__)

PIECE_BYTES = 64 * 1024

_BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 10.0
_MAX_NAMES = 1024
_MAX_PARENT_BYTES = 107 - len("/sotto-12345678/to-4294967295")
"""Linux has 108 bytes for the path of a socket, of which the last is zero."""
_LOST = (StreamLost, RemoteError, OSError)  # Also what asyncio.timeout raises.


def make_socket_folder() -> Path:
    """Make a folder for Unix sockets, which only its owner can enter; the caller removes it. Raises StateError where
    none can be made whose path is short enough for the kernel."""
    tried = []
    for parent in dict.fromkeys((tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/var/tmp")):
        if parent is None:
            continue
        if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
            tried.append(f"the path {parent} is too long for a socket")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="sotto-", dir=parent))
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}; {remedy(error)}")
    raise StateError(f"no folder for the sockets to a relay: {'; '.join(tried)}; set TMPDIR to a short path")


@dataclass(kw_only=True)
class Tunnels:
    """The ends of this peer."""

    name: str
    """This peer's."""
    open_stream: Callable[[RelayAddress, str], DialledStream]
    """Maps a relay and a method to a stream, with a channel of its own."""
    tasks: Tasks
    heartbeat_s: float
    blame: Callable[[str, Exception], None]
    """`Links.blame_caller`."""
    trouble: dict[str, str] = field(default_factory=dict, init=False)
    """Peer, or relay → why the last attempt to reach it failed."""
    carried: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)
    """Peer → bytes that went to and came from it through a relay; without those of which none ever did."""
    _folder: Path | None = field(default=None, init=False)
    _numbers: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _servers: dict[tuple[str, RelayAddress], asyncio.Server] = field(default_factory=dict, init=False)

    @property
    def listening_socket(self) -> Path:
        """The socket on which our own gRPC server takes callers from a relay."""
        return self._sockets() / "in"

    def close(self) -> None:
        """Remove the sockets."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def address_of(self, peer: str, relay: RelayAddress) -> str:
        """Return the gRPC address that leads to a peer through its relay. Raises PeerUnreachable."""
        if (peer, relay) not in self._servers:
            # Tasks of our own: asyncio would report those of a server as failed when they end with this peer.
            def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                self.tasks.spawn(self.call(peer, relay, reader, writer), f"relayed to {peer}")

            # The number is drawn before anything is awaited: neighbours that are dialled at the same time must not
            # take over each other's socket.
            number = next(self._numbers)
            try:
                server = await asyncio.start_unix_server(serve, self._sockets() / f"to-{number}")
            except (OSError, StateError) as error:
                raise PeerUnreachable(f"no socket for the way to {peer} can be made: {error}") from None
            self._servers[peer, relay] = server
        return socket_address(self._servers[peer, relay].sockets[0].getsockname())

    async def offer(self, relay: RelayAddress) -> None:
        """Wait at a relay for callers, one after the other, for as long as this peer runs."""
        pause_s, said = _BACKOFF_FIRST_S, ""
        # However fast a relay says that somebody calls, there are never more connections than an honest one carries.
        places = asyncio.Semaphore(MAX_TUNNELS)
        while True:
            await places.acquire()
            taken = asyncio.Event()
            task = self.tasks.spawn(self.wait_for_caller(relay, taken), f"wait at {relay.name}")
            task.add_done_callback(lambda _: places.release())
            await taken.wait()
            trouble = self.trouble.get(relay.name, "")
            if not trouble:
                pause_s, said = _BACKOFF_FIRST_S, ""
                continue
            if trouble != said:
                log.warning("cannot wait at relay %s: %s", relay.name, trouble)
                said = trouble
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    def _sockets(self) -> Path:
        """Return the folder of the sockets, made when it is first needed. Raises StateError where none can be made."""
        if self._folder is None:
            self._folder = make_socket_folder()
        return self._folder

    async def wait_for_caller(self, relay: RelayAddress, taken: asyncio.Event) -> None:
        """Wait at a relay until a peer calls, set `taken` then, and carry its bytes to the end."""
        stream = PieceStream(self.open_stream(relay, "Accept"))
        beat: asyncio.Task[None] | None = None
        try:
            await stream.write(Piece(sender=self.name))
            beat = asyncio.create_task(self._keep_alive(stream, taken))
            while True:
                async with asyncio.timeout(3 * self.heartbeat_s):
                    piece = await stream.read()
                if piece is None or piece.refusal:
                    raise ConnectionError("it ended the stream" if piece is None else piece.refusal)
                self.trouble.pop(relay.name, None)
                if piece.peer:
                    break
            taken.set()
            # gRPC ends a stream when a write to it is cancelled, so the last heartbeat is waited for.
            await beat
            reader, writer = await asyncio.open_unix_connection(str(self.listening_socket))
            await self._pump(stream, reader, writer, piece.peer)
        except Exception as error:
            if not isinstance(error, _LOST):
                self.blame(relay.address, error)
            if not taken.is_set():
                self.trouble[relay.name] = _words(error) or "it does not answer"
        finally:
            taken.set()
            if beat is not None:
                beat.cancel()
            await stream.abandon()

    async def _keep_alive(self, stream: PieceStream, taken: asyncio.Event) -> None:
        """Write heartbeats until `taken` is set."""
        with contextlib.suppress(*_LOST):
            while not taken.is_set():
                await stream.write(Piece())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.heartbeat_s):
                        await taken.wait()

    async def call(
        self, peer: str, relay: RelayAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Call a peer at a relay, and carry the bytes of a connection to the end."""
        stream = PieceStream(self.open_stream(relay, "Connect"))
        try:
            await stream.write(Piece(sender=self.name, peer=peer))
            answer = await stream.read()
            if answer is None or not answer.peer:
                raise ConnectionError("it ended the stream" if answer is None else answer.refusal)
            self.trouble.pop(peer, None)
            await self._pump(stream, reader, writer, peer)
        except Exception as error:
            if not isinstance(error, _LOST):
                self.blame(relay.address, error)
            self.trouble[peer] = f"its relay {relay.name} at {relay.address} could not connect us: {_words(error)}"
        finally:
            writer.transport.abort()
            await stream.abandon()

    def _count(self, peer: str, sent: int, received: int) -> None:
        # The names of callers are the relay's word: it may fill neither the memory nor the status with them.
        if peer in self.carried or len(self.carried) < _MAX_NAMES:
            before = self.carried.get(peer, (0, 0))
            self.carried[peer] = before[0] + sent, before[1] + received

    async def _pump(
        self, stream: PieceStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        """Carry bytes both ways until either end is done."""

        async def outward() -> None:
            while data := await reader.read(PIECE_BYTES):
                await stream.write(Piece(data=data))
                self._count(peer, len(data), 0)

        async def inward() -> None:
            while (piece := await stream.read()) is not None:
                self._count(peer, 0, len(piece.data))
                writer.write(piece.data)
                await writer.drain()

        async def until_lost(work: Coroutine[None, None, None]) -> None:
            with contextlib.suppress(*_LOST):
                await work

        tasks = [asyncio.create_task(until_lost(each)) for each in (outward(), inward())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            writer.transport.abort()


def _words(error: BaseException) -> str:
    return printable(str(error) or type(error).__name__)[:200]
