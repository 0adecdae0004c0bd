"""The end that is called: listens, and lets callers in.

A caller that is not known yet costs little and not for long. It may not speak at all unless it belongs to the run
(`admission`), only so many streams may wait for their hello, and each of them only for `dial_timeout_s`. A neighbour
that opens stream after stream is told to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from peer.errors import (
    HandshakeRefused,
    RemoteError,
    RemoteProtocolError,
    SecurityError,
    SottoError,
    StateBehind,
)
from peer.foreign_text import quote
from peer.net import tcp_info
from peer.net.address import split_address, why_not_bound
from peer.net.admission import Admission, counted
from peer.net.connection import Connection
from peer.net.handshake import FAREWELL_S, Handshake, OpenedStream, farewell
from peer.net.hello import check_identity
from peer.net.links import Links
from peer.net.neighbor import Neighbor
from peer.net.rpc import Caller, Options, ServedStream, Server, StreamLost
from peer.net.security.certificates import Identity
from peer.net.security.credentials import Access
from peer.net.tasks import Tasks
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.rate_limits import Allowances, Complaints

log = logging.getLogger(__name__)

_MAX_GREETINGS = 64
_MAX_GREETINGS_EACH = 4
_HELLOS = {"rate": 2.0, "burst": 60.0}
"""Hellos of one neighbour, a second and at once: each costs a handshake."""
_HELLOS_PER_OFFENCE = 10
"""An offence costs a neighbour as much: who breaks the protocol on each connection soon has one in five seconds."""
_COMPLAINTS_PER_MINUTE = 20
_MAX_CONTROL_CALLS = 32
_MAX_RELAY_STREAMS = 256


@dataclass(kw_only=True)
class Listener:
    """Serves the streams that callers open."""

    links: Links
    handshake: Handshake
    admission: Admission
    tasks: Tasks
    dial_timeout_s: float
    hear: Callable[[int, str], Neighbor | None] | None
    """As for Transport, and so is the next."""
    device_of: Callable[[int], int]
    add_neighbor: Callable[[Neighbor], None]
    """That of Transport."""
    is_closing: Callable[[], bool]
    """Once this is so, everybody is sent away."""
    _greetings: Counter[str] = field(default_factory=Counter, init=False)
    """Streams that wait for a hello, by who opened them."""
    _hellos: Allowances = field(default_factory=lambda: Allowances(**_HELLOS), init=False)
    _offences_paid: dict[int, int] = field(default_factory=dict, init=False)
    _complaints: Complaints = field(
        default_factory=lambda: Complaints(per_minute=_COMPLAINTS_PER_MINUTE, now=0.0), init=False
    )

    async def exchange(self, stream: ServedStream) -> None:
        """Serve one stream, from the hello to the end."""
        try:
            if (connection := await self._admit(stream)) is not None:
                await connection.run()
        except StreamLost as error:
            self._complain("a caller at %s went away: %s", stream.caller.address, error)
        except Exception as error:
            self.tasks.fail(error)
            raise

    async def _admit(self, stream: ServedStream) -> Connection | None:
        """Return the connection of a caller that is a neighbour; None for any other, which was told why."""
        caller = stream.caller
        try:
            if self.is_closing():
                await _part(stream, pb.Close.GOODBYE, "this peer is about to end")
            elif (refusal := self._refusal(caller)) is not None:
                self._complain("refused a caller at %s: %s", caller.address, refusal)
                await _part(stream, pb.Close.REFUSED, refusal)
                await _heed(stream)
            else:
                with counted(self._greetings, self.admission.account(caller)):
                    return await self._greet(stream)
        except StreamLost as error:
            self._complain("a caller at %s went away: %s", caller.address, error)
        except SottoError as error:
            self._complain("a caller at %s was turned away: %s", caller.address, error)
        except Exception as error:  # Raised for what the caller showed or said.
            self.links.blame_caller(caller.address, error)
        return None

    def _refusal(self, caller: Caller) -> str | None:
        """Return why a caller is sent away before it has said a word; None if it may speak."""
        try:
            self.admission.check_stream(caller)
        except SecurityError as error:
            return str(error)
        # Without certificates one address may stand for a machine with many peers.
        most_each = _MAX_GREETINGS_EACH if self.admission.is_certified else _MAX_GREETINGS // 2
        if self._greetings[self.admission.account(caller)] >= most_each or self._greetings.total() >= _MAX_GREETINGS:
            return "too many connections wait for their hello"
        return None

    async def _greet(self, stream: ServedStream) -> Connection | None:
        """Exchange hellos; return the connection, unless the caller was turned away."""
        neighbor: Neighbor | None = None
        first: bytes | None = None
        try:
            # Also our answer has to be taken in this time: a caller that reads nothing would keep its place for ever.
            async with asyncio.timeout(self.dial_timeout_s):
                if (first := await stream.read()) is None:
                    return None
                hello = self.handshake.read_hello(first)
                neighbor = self._neighbor_of(hello, self._identity(stream.caller))
                return await self._welcome(stream, neighbor, hello)
        except TimeoutError:
            what = "no hello came" if first is None else "our hello was not taken"
            await _part(stream, pb.Close.REFUSED, f"{what} within {self.dial_timeout_s:g} s")
        except RemoteError as error:
            kind = pb.Close.VIOLATION if isinstance(error, RemoteProtocolError) else pb.Close.REFUSED
            if neighbor is not None and isinstance(error, StateBehind):
                self.links.note_problem(neighbor, error.problem)
            elif neighbor is not None and self.links.connection(neighbor.index) is None:
                self.links.note_refusal(neighbor, error.problem)
            else:
                self._complain("refused a caller at %s: %s", stream.caller.address, error.problem)
            await _part(stream, kind, error.problem)
        except (SottoError, StreamLost):
            raise
        except Exception as error:
            if neighbor is None:
                raise
            self.links.blame(neighbor.index, error)
        return None

    def _neighbor_of(self, hello: pb.Hello, identity: Identity | None) -> Neighbor:
        """Return which neighbour says hello. Raises HandshakeRefused if none does, or it does so too often."""
        neighbor = self.links.neighbors.get(hello.index)
        if neighbor is None:
            neighbor = self._newcomer(hello, identity)
        else:
            certified_name = None if identity is None else identity.name
            check_identity(
                hello, expected_name=neighbor.name, certified_name=certified_name, expected_index=neighbor.index
            )
        if not self._may_greet(neighbor.index):
            raise HandshakeRefused(f"{quote(neighbor.name)} connects too often; try again later")
        return neighbor

    def _may_greet(self, peer: int) -> bool:
        """Return whether a neighbour can pay for a hello, and for its offences since the last one; then it has."""
        now, offences = asyncio.get_running_loop().time(), self.links.offences.count(peer)
        unpaid = offences - self._offences_paid.get(peer, 0)
        cost = 1 + min(_HELLOS_PER_OFFENCE * unpaid, _HELLOS["burst"] / 2)
        if not self._hellos.spend(peer, now, cost):
            return False
        self._offences_paid[peer] = offences
        return True

    def _newcomer(self, hello: pb.Hello, identity: Identity | None) -> Neighbor:
        """Return how a caller is seen that was no neighbour until now. Raises HandshakeRefused."""
        neighbor = None
        if self.hear is not None:
            name, index = (None, None) if identity is None else (identity.name, identity.index)
            expected = hello.index if index in (None, self.device_of(hello.index)) else index
            assert expected is not None
            check_identity(hello, expected_name=hello.name, certified_name=name, expected_index=expected)
            self.handshake.terms(hello)
            neighbor = self.hear(hello.index, hello.name)
        if neighbor is None:
            raise HandshakeRefused(
                f"peer {hello.index}, {quote(hello.name)}, is no neighbour of peer {self.handshake.me}, "
                f"{quote(self.handshake.info.name)}; compare the graph and the lists of peers"
            )
        self.add_neighbor(neighbor)
        return neighbor

    async def _welcome(self, stream: ServedStream, neighbor: Neighbor, hello: pb.Hello) -> Connection | None:
        """Answer a hello that matches; return the connection, unless another stream of the pair is better."""
        peer, caller = neighbor.index, stream.caller
        terms, received = self.handshake.terms(hello), self.links.handler.last_received(peer)
        try:
            self.handshake.judge_progress(hello, neighbor)
        except StateBehind:
            # With what is shown in it, that peer sees it, too. Nor does it take the place of another process of its.
            await stream.write(self.handshake.answer(hello, neighbor, received=received, seen_as=caller.address))
            raise
        if not self.links.give_way(neighbor, terms, dialled=False):
            await _part(stream, pb.Close.SUPERSEDED, "the stream in the other direction stays")
            return None
        generation = self.links.new_generation(peer)
        await stream.write(self.handshake.answer(hello, neighbor, received=received, seen_as=caller.address))
        # While that was written, another stream may have come this far, and the neighbour may have been removed (both
        # begin a new generation) or its certificate revoked.
        if generation != self.links.generation(peer) or self.is_closing():
            await _part(stream, pb.Close.SUPERSEDED, "a newer stream took over")
            return None
        return self.links.open(
            OpenedStream(
                neighbor=neighbor,
                stream=stream,
                terms=terms,
                identity=self._identity(caller),
                dialled=False,
                received=received,
                socket=_accepted_socket(caller),
            )
        )

    def _identity(self, caller: Caller) -> Identity | None:
        """Return whose certificate a caller showed. Raises HandshakeRefused if it was revoked."""
        try:
            return self.admission.identity(caller)
        except SecurityError as error:
            raise HandshakeRefused(str(error)) from None

    def _complain(self, line: str, *values: object) -> None:
        """Log something about a stranger, unless there was too much about strangers already."""
        more = self._complaints.worth_a_line(asyncio.get_running_loop().time())
        if more is not None:
            log.warning(line + "%s", *values, more)


async def _part(stream: ServedStream, kind: pb.Close.Kind, reason: str) -> None:
    """Say why a stream is of no use; a caller that does not read it in time misses it. Raises StreamLost."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await stream.write(farewell(kind, reason))


async def _heed(stream: ServedStream) -> None:
    """Wait a moment for the hello under way: a stream that ends while its caller writes loses our last words."""
    with contextlib.suppress(TimeoutError, StreamLost):
        async with asyncio.timeout(FAREWELL_S):
            await stream.read()


def _accepted_socket(caller: Caller) -> tcp_info.Connection | None:
    remote = tcp_info.parse_peer(caller.address)
    if remote is None:
        return None
    return next((each for each in tcp_info.connections() if each.remote == remote), None)


def new_server(channel_options: Options, *, most_neighbors: int, dial_timeout_s: float) -> Server:
    """Return a server whose limits suit so many neighbours; `bind` and start it."""
    expected = 2 * most_neighbors + _MAX_GREETINGS + _MAX_RELAY_STREAMS
    return Server(
        [
            *channel_options,
            # Two daemons on one port would each get half of the neighbours.
            ("grpc.so_reuseport", 0),
            # A stranger gets this long for TLS, as long again without a call, and as long for the hello (`Listener`).
            # There is no limit of age: links live as long as the run.
            ("grpc.server_handshake_timeout_ms", int(dial_timeout_s * 1000)),
            ("grpc.max_connection_idle_ms", int(max(dial_timeout_s, 1) * 1000)),
            ("grpc.max_allowed_incoming_connections", expected),
            ("grpc.max_concurrent_streams", 16),
        ],
        max_concurrent=expected + _MAX_CONTROL_CALLS,
    )


def bind(server: Server, listen: str, access: Access | None) -> int:
    """Listen on an address; return the port. Raises ConfigError, and SecurityError for credentials that TLS refuses."""
    host, port = split_address(listen, key="peer.listen")
    bound = server.bind(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", access)
    if bound:
        return bound
    why = why_not_bound(host, port, key="peer.listen")
    if why is None:
        # gRPC gives one answer for an address and for what it was to show there.
        raise SecurityError(
            f"{listen} is free, but nothing can be served there with this certificate and key; take both from the same"
            " device's folder, or issue them anew (`sotto admin sign`)"
        )
    raise why.error("peer.listen", listen)
