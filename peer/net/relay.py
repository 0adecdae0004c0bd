"""A peer in the middle: connects two peers that cannot dial each other, but can both dial this one.

The relay carries the bytes of a connection between the two as they are: with mutual TLS they are encrypted from end to
end, and both ends check each other's certificate as if they had dialled each other. It sees which peers talk to each
other, and how much. Relayed traffic is counted apart from its own, and its rate is bounded. Connections are counted for
each member, so that none can take the places of all others, and those over which nothing passes end. Either end of such
a connection is in `peer.net.tunnels`, the protocol in `proto/sottovoce/v1/relay.proto`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from peer.errors import PeerUnreachable, RemoteProtocolError, SottoError
from peer.net.admission import counted
from peer.net.rpc import Caller, ServedStream, Server, Stream, StreamLost
from peer.net.services import RELAY_SERVICE
from peer.proto.sottovoce.v1.relay_pb2 import Piece
from peer.rate_limits import Allowance, Allowances

log = logging.getLogger(__name__)

MAX_TUNNELS = 64
"""Connections that one peer carries for others, and that it has through one relay."""
_MAX_WAITING_EACH = 4
_MAX_TUNNELS_OF_PAIR = 2
"""One, and one that takes its place before the loss of the first is noticed."""
_MAX_UNNAMED_EACH = 32
_CALLS = {"rate": 2.0, "burst": 60.0}
"""Calls of one member, a second and at once."""
_WAITS = {"rate": 10.0, "burst": 256.0}
"""Streams on which one member waits for callers, a second and at once: it opens another for each caller."""
_SIGNS_OF_LIFE = {"rate": 20.0, "burst": 50.0}
"""Pieces without data on one stream, a second and at once. More are answered no sooner."""
_LEAST_PIECE_BYTES = 1024
"""Least size at which a piece counts in the relayed traffic."""
_FIRST_PIECE_S = 10.0
_BURST_S = 1.0
_MAX_REFUSAL = 300


class PieceStream:
    """A stream of pieces. Several tasks may write to it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._lock = asyncio.Lock()

    async def read(self) -> Piece | None:
        """Return the next piece; None at the end. Raises StreamLost, RemoteProtocolError."""
        data = await self.stream.read()
        try:
            return None if data is None else Piece.FromString(data)
        except DecodeError:
            raise RemoteProtocolError("it sent bytes that are no piece of a relayed connection") from None

    async def write(self, piece: Piece) -> None:
        """Send a piece. Raises StreamLost."""
        async with self._lock:
            await self.stream.write(piece.SerializeToString())

    async def abandon(self) -> None:
        """End the stream at once."""
        await self.stream.abandon()


@dataclass(eq=False)
class _End:
    """One end of a relayed connection, or of one to come."""

    name: str
    stream: PieceStream
    task: asyncio.Task[None]
    """The task that serves it; cancelled when the other end is gone."""
    other: _End | None = None
    signs: Allowance = field(default_factory=lambda: Allowance(**_SIGNS_OF_LIFE, now=0.0))
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a caller was told that it is connected. It takes no data before."""


@dataclass(kw_only=True)
class RelayService:
    """Serves the two ends of relayed connections."""

    identify: Callable[[Caller, str], str]
    """Maps a caller and the name that it claims to that of the member that opened a stream. Raises SottoError."""
    account: Callable[[Caller], str]
    """Returns the key for counting a caller before it gave a name. Raises SottoError."""
    kbytes_per_s: float
    """Bound of all that is carried, in units of 1000 bytes, both ways together; 0 relays for nobody."""
    idle_s: float
    """An end that neither sends nor takes anything for so long is gone."""
    blame: Callable[[str, Exception], None]
    """`Links.blame_caller`."""

    def __post_init__(self) -> None:
        """Begin with nothing to carry."""
        self.carried: dict[tuple[str, str], int] = {}
        """(sender, receiver) → bytes."""
        rate = max(1.0, 1000.0 * self.kbytes_per_s)
        self._allowance = Allowance(rate=rate, burst=rate * _BURST_S, now=0.0)
        self._waiting: dict[str, deque[_End]] = {}
        self._open: dict[asyncio.Task[None], tuple[Caller, str]] = {}
        """Task that serves a stream → who opened it, and under which name."""
        self._tunnels: list[_End] = []
        """The calling ends of the connections, oldest first."""
        self._unnamed = Counter[str]()
        """Streams that wait for their first piece, by who opened them."""
        self._calls, self._waits = Allowances(**_CALLS), Allowances(**_WAITS)

    def serve(self, server: Server) -> None:
        """Have a server relay."""
        server.serve_streams(
            RELAY_SERVICE, {"Accept": self._blaming(self._accept), "Connect": self._blaming(self._connect)}
        )

    def _blaming(self, serve: Callable[[ServedStream], Awaitable[None]]) -> Callable[[ServedStream], Awaitable[None]]:
        """Return a function that serves a stream. An error raised for input of its caller ends that stream alone."""

        async def guarded(served: ServedStream) -> None:
            try:
                await serve(served)
            except Exception as error:
                self.blame(served.caller.address, error)

        return guarded

    @property
    def is_idle(self) -> bool:
        """Whether nobody is connected or waits, and nothing is kept of those who were."""
        return not (self._tunnels or self._open or self._unnamed or self._waiting)

    def recheck(self) -> None:
        """End the streams of everybody who would not be let in any more: certificates may have been revoked."""
        if self.is_idle:
            return
        for task, (caller, name) in list(self._open.items()):
            try:
                self.identify(caller, name)
            except SottoError as error:
                log.warning("relaying for %r ends: %s", name, error)
                task.cancel()

    async def _accept(self, served: ServedStream) -> None:
        """Serve a peer that nobody can dial, and that waits for one caller."""
        stream = PieceStream(served)
        if (first := await self._first(stream, served.caller)) is None:
            return
        if not self._waits.spend(first.sender, asyncio.get_running_loop().time()):
            await _refuse(stream, f"{first.sender[:80]!r} waits too often; try again later")
            return
        with self._counted(served.caller, first.sender) as task:
            own = _End(first.sender, stream, task)
            queue = self._waiting.setdefault(own.name, deque())
            if len(queue) >= _MAX_WAITING_EACH:
                # The oldest may be of a process that is gone without a word.
                queue.popleft().task.cancel()
            queue.append(own)
            try:
                while (piece := await self._next(own)) is not None:
                    if own.other is None:
                        await self._write(own, Piece())  # A sign of life for a sign of life.
                    elif piece.data:
                        await own.other.connected.wait()
                        await self._pass_on(piece.data, own, own.other)
            except (StreamLost, RemoteProtocolError, TimeoutError):
                pass
            finally:
                with contextlib.suppress(ValueError):
                    queue.remove(own)
                if not queue and self._waiting.get(own.name) is queue:
                    del self._waiting[own.name]
                if own.other is not None:
                    own.other.task.cancel()

    async def _connect(self, served: ServedStream) -> None:
        """Serve a peer that calls one that waits here."""
        stream = PieceStream(served)
        if (first := await self._first(stream, served.caller)) is None:
            return
        queue = self._waiting.get(first.peer)
        reason = self._why_not_connected(first.sender, first.peer)
        if reason is not None or not queue:
            await _refuse(stream, reason or "")
            return
        with self._counted(served.caller, first.sender) as task:
            own, other = _End(first.sender, stream, task), queue.popleft()
            own.other, other.other = other, own
            self._tunnels.append(own)
            log.info("relaying between %s and %s", own.name, other.name)
            try:
                await self._write(other, Piece(peer=own.name))
                await self._write(own, Piece(peer=other.name))
                own.connected.set()
                while (piece := await self._next(own)) is not None:
                    if piece.data:
                        await self._pass_on(piece.data, own, other)
            except (StreamLost, RemoteProtocolError, TimeoutError):
                pass
            finally:
                with contextlib.suppress(ValueError):  # It may have made room for another.
                    self._tunnels.remove(own)
                other.other = None
                other.task.cancel()

    def _why_not_connected(self, caller: str, peer: str) -> str | None:
        """Return why two members are not connected; None if there is room, which may have been made."""
        if caller == peer:
            return "a peer reaches itself without a relay"
        now = asyncio.get_running_loop().time()
        if not self._calls.spend(caller, now):
            return f"{caller[:80]!r} calls too often; try again later"
        if not self._waiting.get(peer):
            return f"{peer[:80]!r} does not wait at this relay; is it running, and is this its relay?"
        of_pair = [end for end in self._tunnels if end.name == caller and end.other and end.other.name == peer]
        if len(of_pair) >= _MAX_TUNNELS_OF_PAIR:
            self._end(of_pair[0])
        if len(self._tunnels) >= MAX_TUNNELS:
            held = Counter(end.name for end in self._tunnels)
            greediest, most = held.most_common(1)[0]
            if held[caller] + 1 >= most:
                return f"this relay carries {MAX_TUNNELS} connections, and no more"
            # A member with many gives one up to a member with few, so that nobody keeps the others out.
            self._end(next(end for end in self._tunnels if end.name == greediest))
        return None

    def _end(self, tunnel: _End) -> None:
        self._tunnels.remove(tunnel)
        tunnel.task.cancel()

    async def _first(self, stream: PieceStream, caller: Caller) -> Piece | None:
        """Return the first piece of a member's stream; None if it was sent away."""
        try:
            account = self.account(caller)
            if self._unnamed[account] >= _MAX_UNNAMED_EACH:
                raise PeerUnreachable("too many streams wait for their first piece")
            with counted(self._unnamed, account):
                async with asyncio.timeout(_FIRST_PIECE_S):
                    first = await stream.read()
            if first is None:
                return None
            if not self.kbytes_per_s:
                raise PeerUnreachable("this peer relays for nobody (transport.relay_kbytes_per_s is 0)")
            self.identify(caller, first.sender)
        except (StreamLost, TimeoutError):
            return None
        except SottoError as error:
            await _refuse(stream, str(error))
            return None
        return first

    @contextlib.contextmanager
    def _counted(self, caller: Caller, name: str) -> Iterator[asyncio.Task[None]]:
        """Keep in mind who opened the stream that this task serves, while it does."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = (caller, name)
        try:
            yield task
        finally:
            del self._open[task]

    async def _pass_on(self, data: bytes, sender: _End, receiver: _End) -> None:
        wait_s = self._allowance.wait_s(max(len(data), _LEAST_PIECE_BYTES), asyncio.get_running_loop().time())
        if wait_s:
            await asyncio.sleep(wait_s)
        pair = (sender.name, receiver.name)
        self.carried[pair] = self.carried.get(pair, 0) + len(data)
        await self._write(receiver, Piece(data=data))

    async def _next(self, end: _End) -> Piece | None:
        """Return an end's next piece. Raises TimeoutError if that takes too long: a live one has heartbeats."""
        async with asyncio.timeout(self.idle_s):
            piece = await end.stream.read()
        if piece is not None and not piece.data:
            await asyncio.sleep(end.signs.wait_s(1, asyncio.get_running_loop().time()))
        return piece

    async def _write(self, end: _End, piece: Piece) -> None:
        """Send a piece to an end. Raises TimeoutError if it takes nothing."""
        async with asyncio.timeout(self.idle_s):
            await end.stream.write(piece)


async def _refuse(stream: PieceStream, reason: str) -> None:
    with contextlib.suppress(StreamLost):
        await stream.write(Piece(refusal=reason[:_MAX_REFUSAL]))
