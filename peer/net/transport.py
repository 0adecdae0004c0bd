"""Connections to the neighbours: gRPC streams, mutual TLS, reconnection, liveness, and what it all costs in bytes.

One stream for each pair of peers, opened by either of them, carries frames, receipts, credit and notes both ways
(`proto/sottovoce/v1/exchange.proto`). The transport delivers frames whole and in order and says when a link comes and
goes; what must be sent again, and what was heard before, is the daemon's knowledge (`peer.node.delivery`).

Everything runs on one event loop and nothing here blocks it. All tasks belong to the transport and end with `close`;
an unexpected error in one of them ends `wait_closed` with that error.

Liveness is the application's: an idle link carries an empty envelope every `heartbeat_s`. HTTP/2 keepalive stays off,
because gRPC servers count such pings as an attack ("too_many_pings") and middle boxes ignore them; the bandwidth
probe of gRPC stays off, because it answers each small message with a ping of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import os
import random
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol
from urllib.parse import unquote

# gRPC reads these when it is imported. Peers are exec'd, never forked; what matters is logged here in sentences.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio

from peer.config import TransportOptions
from peer.errors import (
    ConfigError,
    HandshakeRefused,
    LocalProtocolError,
    PeerUnreachable,
    RemoteError,
    RemoteProtocolError,
    SecurityError,
    SottoError,
)
from peer.net import tcp_info
from peer.net.chunks import Assembler, Cutter
from peer.net.envelope import Piece, decode, encode
from peer.net.hello import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    HelloInfo,
    Terms,
    check_identity,
    check_job,
    check_texts,
    quote,
    read_terms,
)
from peer.net.rate_limits import Allowance, Complaints
from peer.net.relay import RelayAddress, RelayService, Tunnels
from peer.net.security.certificates import Identity, Role, identify
from peer.net.security.credentials import Access, Credentials, TokenAccess
from peer.net.security.proofs import CHALLENGE_BYTES, check_proof, prove
from peer.proto.sottovoce.v1 import control_pb2, exchange_pb2

log = logging.getLogger(__name__)

MAX_BULLETIN_BYTES = 64 * 1024
MAX_TOPIC = 64
CONTROL_VERBS = ("status", "stop", "snapshot", "reload", "leave", "remove", "revoke", "probe")
_OPEN_VERBS = ("status", "revoke", "probe")
"""What every peer of the run may ask."""

_ENVELOPE_SLACK = MAX_BULLETIN_BYTES + 8 * 1024  # beside the chunks: a note or a hello, and the numbers
_MAX_QUEUED_BULLETINS = 256
_RECEIPT_FRAMES = 8
_RECEIPT_DELAY_S = 0.5
_BACKOFF_FIRST_S = 0.1
_REFUSED_PAUSE_S = 4.0
_STABLE_S = 5.0  # a link that lived this long starts the back-off anew
_FAREWELL_S = 1.0
_MAX_GREETINGS = 64
_MAX_GREETINGS_EACH = 4
_HELLOS = {"rate": 2.0, "burst": 60.0}
"""Of one neighbour, a second and at once: each costs a handshake."""
_SMALL_MESSAGES = {"rate": 500.0, "burst": 1000.0}
"""Envelopes of one neighbour that complete no numbered frame, and kilobytes in them beside chunks."""
_LEAST_BYTES_PER_S = 4096
"""An envelope may take this long at the slowest, beside the silence that is allowed."""
_COMPLAINTS_PER_MINUTE = 20
_REVOKED_TOPIC = "revoked"
_LOOK_AT_FILES_S = 2.0
_MAX_CONTROL_CALLS = 32
_MAX_RELAY_STREAMS = 256
_MAX_ARGUMENTS = 64 * 1024
_MAX_REASON = 500

_NO_TOKEN = "the caller does not show this run's token; security.mode and the token must be the same on every peer"

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_Close = exchange_pb2.Close
_PEER_SERVICE = exchange_pb2.DESCRIPTOR.services_by_name["Peer"].full_name
_CONTROL_SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name


@dataclass(frozen=True)
class Neighbor:
    """A peer at the other end of an edge."""

    index: int
    name: str
    address: str | None
    """Where it can be dialled, "host:port"."""
    dial: bool
    """Whether this end dials it."""
    relay: RelayAddress | None = None
    """Where this end dials it, if it has no address of its own."""

    @property
    def place(self) -> str:
        """Where it is dialled, for people."""
        return f"relay {self.relay.name}" if self.relay is not None else str(self.address)


@dataclass
class LinkCounters:
    """What went over the link to one neighbour, over all its connections so far."""

    frames_sent: int = 0
    """Frames handed to gRPC whole, those sent again included."""
    frames_received: int = 0
    frames_resent: int = 0
    frame_bytes_sent: int = 0
    """Sizes of those frames."""
    frame_bytes_received: int = 0
    protobuf_bytes_sent: int = 0
    """Sizes of all envelopes."""
    protobuf_bytes_received: int = 0
    socket_bytes_sent: int | None = None
    """TCP payload as the kernel counted it, with TLS, HTTP/2 and retransmissions; None where it cannot be asked."""
    socket_bytes_received: int | None = None
    packet_bytes_sent: int | None = None
    """The same plus TCP and IP headers of each segment."""
    packet_bytes_received: int | None = None
    retransmitted_bytes: int | None = None
    connections: int = 0
    """How many connections there were: reconnections are one fewer."""

    @property
    def reconnects(self) -> int:
        return max(0, self.connections - 1)


class Handler(Protocol):
    """Whoever uses the transport. All calls come on the event loop and must not block.

    A RemoteError raised by one of them is the neighbour's fault: the link is closed with that sentence and dialled
    anew. Any other exception is a bug and ends the transport.
    """

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """Return the frames to send (again), in order: the neighbour durably has those up to `remote_has`."""
        ...

    def link_down(self, peer: int, reason: str) -> None:
        """Take note that the link is gone, or that the neighbour refuses us (then no `link_up` came before)."""
        ...

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """Take a whole frame. In order; one that was received but is not durable may come again.

        Frames with number 0 stand outside the sequence. Returning False keeps the credit of the frame back until
        `Transport.taken`.
        """
        ...

    def receipt(self, peer: int, upto: int) -> None:
        """Take note that the neighbour durably has our frames up to `upto`."""
        ...

    def bulletin_received(self, peer: int, topic: str, data: bytes) -> None:
        """Take a note of at most 64 kB; it may come more than once."""
        ...

    def goodbye(self, peer: int, reason: str) -> None:
        """Take note that the neighbour leaves on purpose; `link_down` follows."""
        ...

    def last_received(self, peer: int) -> int:
        """Return up to which number the neighbour's frames are durable here."""
        ...

    async def control(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the answer (JSON) to an operator's "status", "stop", "snapshot", "leave" or "remove"."""
        ...


class Transport:
    """All links of one peer."""

    def __init__(
        self,
        *,
        me: int,
        listen: str | None,
        neighbors: Sequence[Neighbor],
        hello: HelloInfo,
        security: Access | None,
        options: TransportOptions,
        handler: Handler,
        members: Sequence[str] = (),
        own_relay: RelayAddress | None = None,
        hear: Callable[[int, str], Neighbor | None] | None = None,
    ) -> None:
        """`members` are the names of all peers of the run, for whom this one may relay; at `own_relay` it waits for
        callers, where nobody can dial it. `hear(index, name)` returns how a caller of the same job is seen that is no
        neighbour yet, None if it shall be none, or raises HandshakeRefused."""
        self.me = me
        self.port: int | None = None
        """The port that is listened on, once started."""
        self.refusals: dict[int, str] = {}
        """Neighbours whose hello does not match ours, with the sentence; until a link to them comes up."""
        self.problems: dict[int, str] = {}
        """Neighbours without a link, with what stood in the way last."""
        self._listen = listen
        self._hello = hello
        self._security = security
        self._credentials = security if isinstance(security, Credentials) else None
        self._options = options
        self._handler = handler
        self._nonce = secrets.randbits(64)
        self._jitter = random.Random(self._nonce)
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: dict[int, _Link] = {}
        self._members = set(members)
        self._hear = hear
        self._own_relay = own_relay
        self.relay = RelayService(identify=self._relayed_for, kbytes_per_s=options.relay_kbytes_per_s)
        """What this peer carries for others."""
        self._tunnels: Tunnels | None = None
        if own_relay is not None:
            self._tunnels = self._make_tunnels()
        self._greetings: dict[str, int] = {}
        """Streams that wait for a hello, by who opened them."""
        self._hellos: dict[int, Allowance] = {}
        self._probes = Allowance(rate=1.0, burst=10.0, now=0.0)
        self._complaints = Complaints(per_minute=_COMPLAINTS_PER_MINUTE, now=0.0)
        self._neighbors: dict[int, Neighbor] = {}
        self._generation: dict[int, int] = {}
        self._replaced: dict[int, deque[int]] = {}
        self._went_down: dict[int, asyncio.Event] = {}
        self._past: dict[int, LinkCounters] = {}
        self._highest_sent: dict[int, int] = {}
        self._closing = False
        self._ended: asyncio.Future[None] | None = None

        self._chunk_bytes = options.chunk_kbytes * 1024
        self._window_bytes = options.window_kbytes * 1024
        self._max_frame_bytes = options.max_message_mbytes * 1024**2
        if hello.max_frame_bytes is not None:
            self._max_frame_bytes = min(self._max_frame_bytes, hello.max_frame_bytes)
        for neighbor in neighbors:
            self.add_neighbor(neighbor)

    def add_neighbor(self, neighbor: Neighbor) -> None:
        """Take up a neighbour: dial it if this end does that, or let it in. Raises ConfigError for a wrong address."""
        index = neighbor.index
        if index == self.me:
            raise LocalProtocolError("a peer is not its own neighbour")
        if neighbor.dial and neighbor.relay is None:
            split_address(neighbor.address or "", key=f"peers.{index}.advertise")
        if neighbor.relay is not None and self._tunnels is None:
            self._tunnels = self._make_tunnels()
        self._neighbors[index] = neighbor
        self._generation.setdefault(index, 0)
        self._replaced.setdefault(index, deque(maxlen=32))
        self._went_down.setdefault(index, asyncio.Event())
        self._past.setdefault(index, LinkCounters())
        self._highest_sent[index] = 0
        if self._ended is not None and neighbor.dial and not self._closing:
            self._spawn(self._keep_dialling(neighbor), f"dial {neighbor.name}")

    def know_member(self, name: str) -> None:
        """Relay for a peer, too, that was not known when this one began."""
        self._members.add(name)

    def remove_neighbor(self, index: int, reason: str) -> None:
        """Have nothing to do with a neighbour any more, for a reason that it is told."""
        if self._neighbors.pop(index, None) is None:
            return
        self.refusals.pop(index, None)
        self._went_down[index].set()
        if (link := self._links.get(index)) is not None:
            link.end(_Close.VIOLATION, reason)
            self._detach(link, reason)
        self.problems.pop(index, None)

    @property
    def _most_neighbors(self) -> int:
        """How many there can ever be: members may change."""
        return max(len(self._neighbors), len(self._members))

    @property
    def neighbors(self) -> frozenset[int]:
        """The neighbours of now."""
        return frozenset(self._neighbors)

    def _make_tunnels(self) -> Tunnels:
        return Tunnels(
            name=self._hello.name,
            open_channel=self._open_relay_channel,
            spawn=self._spawn,
            heartbeat_s=self._options.heartbeat_s,
        )

    async def start(self, *, at_home: bool = True) -> None:
        """Listen, and start to dial in the background. Raises ConfigError if the address cannot be listened on.

        With `at_home=False` only control calls are answered, and peers are told that this one is about to end.
        """
        self._closing = not at_home
        self._ended = asyncio.get_running_loop().create_future()
        if self._listen or self._own_relay is not None:
            await self._start_server(self._listen)
        if self._own_relay is not None and self._tunnels is not None:
            self._spawn(self._tunnels.offer(self._own_relay), "wait at the relay")
        if self._credentials is not None and self._credentials.revoked is not None:
            self._spawn(self._watch_revocations(), "revocations")
        for neighbor in self._neighbors.values():
            if neighbor.dial:
                self._spawn(self._keep_dialling(neighbor), f"dial {neighbor.name}")

    async def wait_closed(self) -> None:
        """Return when `close` is done. Raises whatever went wrong inside the transport: a bug."""
        assert self._ended is not None, "start() comes first"
        await asyncio.shield(self._ended)

    def send(self, peer: int, seq: int, frame: bytes) -> None:
        """Queue a frame if the link is up; otherwise `link_up` will be asked for it.

        Number 0 stands outside the sequence: a request, or the answer to one, that is asked for again if it is lost.
        """
        if not frame:
            raise LocalProtocolError("an empty frame cannot be sent")
        if (link := self._links.get(peer)) is not None:
            link.send(seq, frame)

    def acknowledge(self, peer: int, upto: int) -> None:
        """Tell the neighbour, soon, that its frames up to `upto` are durable here.

        Receipts wait for company: 8 frames, a quarter of the window, half a second, or anything else to send.
        """
        if (link := self._links.get(peer)) is not None:
            link.acknowledge(upto)

    def taken(self, peer: int, upto: int) -> None:
        """Give back the credit of frames up to `upto` for which `frame_received` returned False.

        0 stands for the oldest one outside the sequence. Frames are taken in the order in which they came.
        """
        if (link := self._links.get(peer)) is not None:
            link.taken(upto)

    def bulletin(self, peer: int, topic: str, data: bytes) -> bool:
        """Queue a note; return False, and drop it, if the link is down.

        Where more than 256 wait, the oldest is dropped.
        """
        if len(data) > MAX_BULLETIN_BYTES or len(topic) > MAX_TOPIC:
            raise LocalProtocolError(f"a note of {len(data)} bytes under {topic[:80]!r} is too large")
        link = self._links.get(peer)
        if link is not None:
            link.bulletin(topic, data)
        return link is not None

    def reset(self, peer: int, reason: str) -> None:
        """Close the link to a neighbour that broke the protocol, telling it why; it is dialled anew."""
        if (link := self._links.get(peer)) is not None:
            link.end(_Close.VIOLATION, reason)
            self._detach(link, reason)

    def relayed(self, peer: int) -> tuple[int, int] | None:
        """Return the bytes that went to and came from a neighbour through a relay; None where none ever did."""
        name = self._neighbors[peer].name if peer in self._neighbors else ""
        if self._tunnels is None or name not in self._tunnels.sent.keys() | self._tunnels.received.keys():
            return None
        return self._tunnels.sent.get(name, 0), self._tunnels.received.get(name, 0)

    def is_up(self, peer: int) -> bool:
        """Return whether there is a link to a neighbour now."""
        return peer in self._links

    def counters(self, peer: int) -> LinkCounters:
        """Return what went over the link to a neighbour so far."""
        total = self._past.get(peer, LinkCounters())
        link = self._links.get(peer)
        return _add(total, link.counters()) if link is not None else _add(total, LinkCounters())

    async def close(self, goodbye: str) -> None:
        """Say goodbye on every link, wait a moment for it to arrive, and end everything."""
        self._closing = True
        links = list(self._links.values())
        for link in links:
            link.end(_Close.GOODBYE, goodbye)
        if links:
            await asyncio.wait([link.ended for link in links], timeout=2 * _FAREWELL_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=_FAREWELL_S)
        if self._tunnels is not None:
            self._tunnels.close()
        for link in list(self._links.values()):
            self._detach(link, "we left")
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    # Listening

    async def _start_server(self, listen: str | None) -> None:
        server = grpc.aio.server(
            options=[
                *self._channel_options(),
                # Two daemons on one port would each get half of the neighbours.
                ("grpc.so_reuseport", 0),
                # A stranger gets this long for TLS, as long again without a call, and as long for the hello
                # (`_greet_caller`). There is no limit of age: links live as long as the run.
                ("grpc.server_handshake_timeout_ms", int(self._options.dial_timeout_s * 1000)),
                ("grpc.max_connection_idle_ms", int(max(self._options.dial_timeout_s, 1) * 1000)),
                (
                    "grpc.max_allowed_incoming_connections",
                    2 * self._most_neighbors + _MAX_GREETINGS + _MAX_RELAY_STREAMS,
                ),
                ("grpc.max_concurrent_streams", 16),
            ],
            maximum_concurrent_rpcs=2 * self._most_neighbors + _MAX_GREETINGS + _MAX_CONTROL_CALLS + _MAX_RELAY_STREAMS,
        )
        server.add_generic_rpc_handlers((self._peer_methods(), self._control_methods(), self.relay.handler()))
        if self._own_relay is not None and self._tunnels is not None:
            self._bind(server, f"unix:{self._tunnels.listening_socket}")
        if listen:
            host, port = split_address(listen, key="peer.listen")
            self.port = self._bind(server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
            if not self.port:
                raise ConfigError(_why_not_bound(host, port), key="peer.listen", value=listen)
        await server.start()
        self._server = server

    def _bind(self, server: grpc.aio.Server, address: str) -> int:
        """Return the port that is listened on; 0 if it cannot be."""
        credentials = None if self._security is None else _server_credentials(self._security)
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError:
            return 0

    def _peer_methods(self) -> grpc.GenericRpcHandler[Any, Any]:
        exchange = grpc.stream_stream_rpc_method_handler(self._exchange)
        return grpc.method_handlers_generic_handler(_PEER_SERVICE, {"Exchange": exchange})

    def _control_methods(self) -> grpc.GenericRpcHandler[Any, Any]:
        def method(verb: str) -> grpc.RpcMethodHandler[Any, Any]:
            async def call(request: control_pb2.ControlRequest, context: Any) -> control_pb2.ControlResponse:
                return await self._control(verb, request, context)

            return grpc.unary_unary_rpc_method_handler(
                call,
                request_deserializer=control_pb2.ControlRequest.FromString,
                response_serializer=control_pb2.ControlResponse.SerializeToString,
            )

        return grpc.method_handlers_generic_handler(
            _CONTROL_SERVICE, {verb.capitalize(): method(verb) for verb in CONTROL_VERBS}
        )

    async def _exchange(self, _requests: object, context: Any) -> None:
        """Serve one stream, from the hello to the end."""
        pipe = _ServerPipe(context)
        try:
            if self._closing:
                await pipe.write(_farewell(_Close.GOODBYE, "this peer is about to end"))
            elif (refusal := self._not_admitted(pipe)) is not None:
                self._complain("refused a caller at %s: %s", pipe.caller, refusal)
                await pipe.write(_farewell(_Close.REFUSED, refusal))
                await pipe.heed()
            elif (link := await self._greet_caller(pipe)) is not None:
                await link.run()
        except _ConnectionLostError as error:
            self._complain("a caller at %s went away: %s", pipe.caller, error)
        except SottoError as error:
            self._complain("a caller at %s was turned away: %s", pipe.caller, error)
        except Exception as error:
            self._fail(error)
            raise

    def _not_admitted(self, pipe: _ServerPipe) -> str | None:
        """Return why a caller is sent away before it has said a word; None if it may speak."""
        if isinstance(self._security, TokenAccess) and not self._security.admits(pipe.metadata()):
            return _NO_TOKEN
        if self._credentials is not None:
            try:
                identity = pipe.identity()
                self._check_revoked(identity)
            except SecurityError as error:
                return str(error)
            if identity.role is not Role.PEER:
                return f"{quote(identity.name)} shows an operator's certificate, which no peer can have"
            # A certificate with a number is that of a peer that not everybody lists; its hello says more.
            is_heard = self._hear is not None and identity.index is not None
            if not is_heard and all(identity.name != neighbor.name for neighbor in self._neighbors.values()):
                return (
                    f"{quote(identity.name)} is no neighbour of peer {self.me}, {quote(self._hello.name)}; compare the "
                    "graph and the lists of peers"
                )
        if sum(self._greetings.values()) >= _MAX_GREETINGS or self._greetings.get(self._caller(pipe), 0) >= (
            # Without certificates one address may stand for a machine with many peers.
            _MAX_GREETINGS_EACH if self._credentials is not None else _MAX_GREETINGS // 2
        ):
            return "too many connections wait for their hello"
        return None

    def _relayed_for(self, context: Any, claimed: str) -> str:
        """Return the name of a member that wants to use this peer as a relay. Raises SottoError."""
        if isinstance(self._security, TokenAccess) and not self._security.admits(context.invocation_metadata()):
            raise SecurityError(_NO_TOKEN)
        if self._credentials is not None:
            identity = _caller_identity(context)
            self._check_revoked(identity)
            if identity.role is not Role.PEER or identity.name != claimed:
                raise SecurityError(
                    f"{quote(claimed)} shows the certificate of {identity.role.value} {identity.name!r}"
                )
            if identity.index is not None:
                return claimed  # On its way to a sponsor, perhaps: the CA vouches for it.
        if claimed not in self._members:
            raise SecurityError(f"{quote(claimed)} is no peer of this run; compare the lists of peers")
        return claimed

    def _open_relay_channel(self, relay: RelayAddress) -> tuple[Any, Any]:
        options: list[tuple[str, int]] = [("grpc.http2.bdp_probe", 0)]
        return _open_channel(relay.address, relay.name, self._security, options), _metadata(self._security)

    def _caller(self, pipe: _ServerPipe) -> str:
        """Return what stands for a caller where streams are counted."""
        if self._credentials is not None:
            return pipe.identity().name
        address = tcp_info.parse_peer(pipe.caller)
        return pipe.caller if address is None else address[0]

    def _check_revoked(self, identity: Identity) -> None:
        if self._credentials is not None and self._credentials.revoked is not None:
            self._credentials.revoked.check(identity.serial, identity.name)

    def _complain(self, line: str, *values: object) -> None:
        """Log something about a stranger, unless strangers have been heard of too often."""
        more = self._complaints.worth_a_line(asyncio.get_running_loop().time())
        if more is not None:
            log.warning(line + "%s", *values, more)

    async def _greet_caller(self, pipe: _ServerPipe) -> _Link | None:
        neighbor: Neighbor | None = None
        who = self._caller(pipe)
        self._greetings[who] = self._greetings.get(who, 0) + 1
        try:
            async with asyncio.timeout(self._options.dial_timeout_s):
                first = await pipe.read()
            if first is None:
                return None
            theirs = _parse_hello(first)
            certified = None if self._credentials is None else pipe.identity()
            neighbor = self._check_caller(theirs, certified)
            terms = read_terms(theirs, check_job(self._hello, theirs))
            return await self._welcome(pipe, neighbor, terms, theirs.challenge)
        except TimeoutError:
            reason = f"no hello came within {self._options.dial_timeout_s:g} s"
            await pipe.write(_farewell(_Close.REFUSED, reason))
        except RemoteError as error:
            kind = _Close.REFUSED if isinstance(error, HandshakeRefused) else _Close.VIOLATION
            if neighbor is not None and neighbor.index not in self._links:
                self._note_refusal(neighbor, error.problem)
            else:
                self._complain("refused a caller at %s: %s", pipe.caller, error.problem)
            await pipe.write(_farewell(kind, error.problem))
        finally:
            self._greetings[who] -= 1
            if not self._greetings[who]:
                del self._greetings[who]
        return None

    def _check_caller(self, theirs: exchange_pb2.Hello, certified: Identity | None) -> Neighbor:
        check_texts(theirs)
        neighbor = self._neighbors.get(theirs.index)
        certified_name = None if certified is None else certified.name
        if neighbor is None:
            neighbor = self._heard(theirs, certified)
        else:
            check_identity(
                theirs, expected_name=neighbor.name, certified_name=certified_name, expected_index=neighbor.index
            )
        now = asyncio.get_running_loop().time()
        if not self._hellos.setdefault(neighbor.index, Allowance(**_HELLOS, now=now)).spend(1, now):
            raise HandshakeRefused(f"{quote(neighbor.name)} connects again and again; try later")
        return neighbor

    def _heard(self, theirs: exchange_pb2.Hello, certified: Identity | None) -> Neighbor:
        """Return how a caller is seen that was no neighbour until now. Raises HandshakeRefused."""
        neighbor = None
        if self._hear is not None and (certified is None or certified.index is not None):
            name, index = (None, theirs.index) if certified is None else (certified.name, certified.index)
            assert index is not None
            check_identity(theirs, expected_name=theirs.name, certified_name=name, expected_index=index)
            check_job(self._hello, theirs)
            neighbor = self._hear(theirs.index, theirs.name)
        if neighbor is None:
            raise HandshakeRefused(
                f"peer {theirs.index}, {quote(theirs.name)}, is no neighbour of peer {self.me}, "
                f"{quote(self._hello.name)}; compare the graph and the lists of peers"
            )
        self.add_neighbor(neighbor)
        return neighbor

    async def _welcome(self, pipe: _ServerPipe, neighbor: Neighbor, terms: Terms, challenge: bytes) -> _Link | None:
        """Answer a hello that matches; return the link, unless another stream of the pair is better."""
        if not self._give_way(neighbor, terms, dialled=False):
            await pipe.write(_farewell(_Close.SUPERSEDED, "the stream in the other direction stays"))
            return None
        self._generation[neighbor.index] += 1
        generation = self._generation[neighbor.index]
        received = self._handler.last_received(neighbor.index)
        await pipe.write(self._our_hello(received, seen_as=pipe.caller, answers=(challenge, neighbor.name)))
        if generation != self._generation[neighbor.index] or self._closing:
            await pipe.write(_farewell(_Close.SUPERSEDED, "a newer stream took over"))
            return None
        remote = tcp_info.parse_peer(pipe.caller)
        socket_ = next((each for each in tcp_info.connections() if each.remote == remote), None) if remote else None
        identity = None if self._credentials is None else pipe.identity()
        link = _Link(self, neighbor, pipe, terms, identity, dialled=False, received=received, connection=socket_)
        self._attach(link)
        return link

    async def _control(
        self, verb: str, request: control_pb2.ControlRequest, context: Any
    ) -> control_pb2.ControlResponse:
        if (reason := self._not_allowed(verb, context)) is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        try:
            if len(request.arguments) > _MAX_ARGUMENTS:
                raise ValueError("too long")
            arguments = json.loads(request.arguments or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the arguments are not a JSON object")
        try:
            if verb == "revoke":
                result = self._take_revocations(str(arguments.get("list", "")).encode())
            elif verb == "probe":
                result = await self._probe(arguments.get("index"), context.peer())
            else:
                result = await self._handler.control(verb, arguments)
        except SottoError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Exception as error:
            self._fail(error)
            raise
        return control_pb2.ControlResponse(result=json.dumps(result))

    def _not_allowed(self, verb: str, context: Any) -> str | None:
        """Return why a caller may not do this; None if it may."""
        if self._credentials is not None:
            try:
                identity = _caller_identity(context)
                self._check_revoked(identity)
            except SecurityError as error:
                return str(error)
            if identity.role is Role.OPERATOR or identity.name == self._hello.name or verb in _OPEN_VERBS:
                return None
            return f"{verb} needs an operator's certificate, or this peer's own; {quote(identity.name)} has neither"
        if isinstance(self._security, TokenAccess):
            return None if self._security.admits(context.invocation_metadata()) else _NO_TOKEN
        caller = tcp_info.parse_peer(context.peer())
        if verb in _OPEN_VERBS or (caller is not None and ipaddress.ip_address(caller[0]).is_loopback):
            return None
        return f'with security.mode = "insecure", {verb} is only taken from this machine'

    async def _probe(self, index: object, caller: str) -> dict[str, Any]:
        """Return how this peer sees a neighbour, and whether it can connect to the address that it knows of it.

        `sotto doctor` of that neighbour asks. Only addresses of our own configuration are ever dialled.
        """
        answer: dict[str, Any] = {
            "name": self._hello.name,
            "software": self._hello.software,
            "protocol": [PROTOCOL_MIN, PROTOCOL_MAX],
            "time": time.time(),
            "seen_as": caller,
            "job": self._hello.run_digest,
            "job_parts": list(self._hello.shared_sections),
            "neighbor": None,
        }
        neighbor = self._neighbors.get(index) if isinstance(index, int) else None
        if neighbor is None:
            return answer
        problem = self.refusals.get(neighbor.index) or self.problems.get(neighbor.index)
        answer |= {
            "neighbor": neighbor.name,
            "link": self.is_up(neighbor.index),
            "problem": None if self.is_up(neighbor.index) else problem,
            "address": neighbor.address,
            "reached": None,
            "reason": None,
        }
        if neighbor.address is None:
            return answer
        if not self._probes.spend(1, asyncio.get_running_loop().time()):
            raise RemoteError("it was asked for too many probes; try again in a few seconds")
        timeout_s = min(self._options.dial_timeout_s, 5.0)
        try:
            await call_control(
                neighbor.address, "status", name=neighbor.name, security=self._security, timeout_s=timeout_s
            )
        except SecurityError:
            answer["reached"] = True  # It answered, and only that was the question.
        except RemoteError as error:
            answer |= {"reached": False, "reason": error.problem}
        else:
            answer["reached"] = True
        return answer

    # Revoked certificates

    async def _watch_revocations(self) -> None:
        """Look at the file from time to time: `sotto revoke`, or a person, may have put a newer list there."""
        assert self._credentials is not None
        revoked, complained = self._credentials.revoked, ""
        assert revoked is not None
        while True:
            try:
                if await asyncio.get_running_loop().run_in_executor(None, revoked.reload):
                    self._act_on_revocations(source=None)
                complained = ""
            except SecurityError as error:
                if str(error) != complained:
                    complained = str(error)
                    log.error("%s", error)
            await asyncio.sleep(_LOOK_AT_FILES_S)

    def _take_revocations(self, pem: bytes, source: int | None = None) -> dict[str, Any]:
        """Take a list that somebody brought; return what came of it. Raises SecurityError if it is not genuine."""
        if self._credentials is None or self._credentials.revoked is None:
            raise SecurityError('certificates are revoked with security.mode = "mtls" only')
        revoked, before = self._credentials.revoked, self._credentials.revoked.number
        try:
            revoked.take(pem)
        except SecurityError as error:
            if revoked.number == before:
                raise
            log.error("%s; what it says holds until this peer is started again", error)
        if revoked.number > before:
            self._act_on_revocations(source)
        return {"number": revoked.number, "revoked": len(revoked), "news": revoked.number > before}

    def _act_on_revocations(self, source: int | None) -> None:
        """End the links to whom the new list excludes, and tell the others of it."""
        assert self._credentials is not None
        revoked = self._credentials.revoked
        assert revoked is not None
        log.info("%d certificates are revoked by list %d", len(revoked), revoked.number)
        for link in list(self._links.values()):
            try:
                if link.identity is not None:
                    self._check_revoked(link.identity)
            except SecurityError as error:
                link.end(_Close.REFUSED, str(error))
                self._detach(link, str(error))
                self._note_refusal(link.neighbor, str(error))
                continue
            if link.neighbor.index != source:
                link.bulletin(_REVOKED_TOPIC, revoked.pem)
        try:
            self._check_revoked(self._credentials.identity)
        except SecurityError as error:
            self._fail(SecurityError(f"{error}: this peer may no longer take part"))

    # Dialling

    async def _keep_dialling(self, neighbor: Neighbor) -> None:
        """Keep up the link to one neighbour for as long as the transport lives."""
        loop = asyncio.get_running_loop()
        pause = _BACKOFF_FIRST_S
        while not self._closing and self._neighbors.get(neighbor.index) is neighbor:
            if neighbor.index in self._links:
                self._went_down[neighbor.index].clear()
                await self._went_down[neighbor.index].wait()
                continue
            try:
                link = await self._dial(neighbor)
            except HandshakeRefused as error:
                # Only a person can mend this, but then it should mend by itself.
                self._note_refusal(neighbor, error.problem)
                pause = max(pause, _REFUSED_PAUSE_S)
            except RemoteError as error:
                self._note_problem(neighbor, error.problem)
            else:
                if link is not None:
                    begin = loop.time()
                    await link.run()
                    if loop.time() - begin >= _STABLE_S:
                        pause = _BACKOFF_FIRST_S
            pause = min(pause, self._options.backoff_max_s)
            await asyncio.sleep(pause * self._jitter.uniform(0.5, 1.0))
            pause *= 2

    async def _dial(self, neighbor: Neighbor) -> _Link | None:
        """Return a new link; None if another stream of the pair is better. Raises RemoteError."""
        older = {each.local for each in tcp_info.connections()}
        address = await self._address_of(neighbor)
        pipe = _ClientPipe(address, neighbor.name, self._security, self._channel_options())
        attached = False
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        try:
            async with asyncio.timeout(self._options.dial_timeout_s):
                received = self._handler.last_received(neighbor.index)
                await pipe.write(self._our_hello(received, seen_as="", challenge=challenge))
                first = await pipe.read()
            if first is None:
                raise PeerUnreachable(f"{neighbor.name} at {neighbor.place} closed the connection without an answer")
            answer, _ = decode(first)
            if answer.HasField("close"):
                reason = _clean(answer.close.reason)
                if answer.close.kind == _Close.SUPERSEDED:
                    return None
                if answer.close.kind == _Close.GOODBYE:
                    raise PeerUnreachable(f"{neighbor.name} at {neighbor.place} is leaving: {reason}")
                raise HandshakeRefused(f"{neighbor.name} at {neighbor.place} refuses us: {reason}")
            try:
                theirs = _parse_hello(first)
                check_texts(theirs)
                check_identity(theirs, expected_name=neighbor.name, certified_name=None, expected_index=neighbor.index)
                terms = read_terms(theirs, check_job(self._hello, theirs))
                identity = self._check_listener(neighbor, theirs, challenge)
                stays = self._give_way(neighbor, terms, dialled=True)
            except RemoteError as error:
                await pipe.write(_farewell(_Close.REFUSED, error.problem))
                await pipe.finish()
                raise
            if not stays or self._closing:
                await pipe.write(_farewell(_Close.SUPERSEDED, "the stream in the other direction stays"))
                await pipe.finish()
                return None
            self._generation[neighbor.index] += 1
            link = _Link(
                self,
                neighbor,
                pipe,
                terms,
                identity,
                dialled=True,
                received=received,
                connection=None if neighbor.relay else _dialled_connection(neighbor, terms.seen_as, older),
            )
            self._attach(link)
            attached = True
            return link
        except TimeoutError:
            raise PeerUnreachable(
                f"{neighbor.name} at {neighbor.place} did not answer within {self._options.dial_timeout_s:g} s"
            ) from None
        except _ConnectionLostError as error:
            if self._tunnels is not None and neighbor.relay and (trouble := self._tunnels.trouble.get(neighbor.name)):
                raise PeerUnreachable(f"{neighbor.name} cannot be reached: {trouble}") from None
            raise PeerUnreachable(_explain(error.error, neighbor, encrypted=self._security is not None)) from None
        finally:
            if not attached:
                await pipe.abandon()

    async def _address_of(self, neighbor: Neighbor) -> str:
        """Return what gRPC is to dial."""
        if neighbor.relay is not None and self._tunnels is not None:
            return await self._tunnels.address_of(neighbor.name, neighbor.relay)
        assert neighbor.address is not None
        return neighbor.address

    def _check_listener(self, neighbor: Neighbor, theirs: exchange_pb2.Hello, challenge: bytes) -> Identity | None:
        """Return whose certificate a listener proved to hold. Raises HandshakeRefused."""
        if self._credentials is None:
            return None
        try:
            return check_proof(self._credentials, theirs.certificate, theirs.proof, challenge, prover=neighbor.name)
        except SecurityError as error:
            raise HandshakeRefused(str(error)) from None

    def _note_refusal(self, neighbor: Neighbor, reason: str) -> None:
        self.problems[neighbor.index] = reason
        if self.refusals.get(neighbor.index) != reason:
            self.refusals[neighbor.index] = reason
            log.error("%s and this peer do not belong together: %s", neighbor.name, reason)
            self._tell(self._handler.link_down, neighbor.index, reason)

    def _note_problem(self, neighbor: Neighbor, reason: str) -> None:
        if self.problems.get(neighbor.index) != reason:
            self.problems[neighbor.index] = reason
            log.info("no link to %s yet: %s", neighbor.name, reason)

    # Links

    def _give_way(self, neighbor: Neighbor, terms: Terms, *, dialled: bool) -> bool:
        """Return whether a new stream takes over; then the older one of the pair, if any, is gone.

        The newest wins. Only where both ends dial each other at the same time, the one dialled by the lower index
        wins, so that both ends choose the same.
        """
        if terms.nonce in self._replaced[neighbor.index]:
            raise HandshakeRefused(
                f"a newer process of {quote(neighbor.name)} took the place of this one; is it running twice?"
            )
        old = self._links.get(neighbor.index)
        if old is None:
            return True
        if old.nonce == terms.nonce:
            if old.dialled != dialled and old.dialled == (self.me < neighbor.index):
                return False
        else:
            self._replaced[neighbor.index].append(old.nonce)
        old.end(_Close.SUPERSEDED, "a newer stream of the same pair took over")
        self._detach(old, "a newer connection took over")
        return True

    def _attach(self, link: _Link) -> None:
        peer = link.neighbor.index
        self._links[peer] = link
        self.refusals.pop(peer, None)
        self.problems.pop(peer, None)
        log.info("link to %s is up", link.neighbor.name)
        if self._credentials is not None and (revoked := self._credentials.revoked) is not None and revoked.number:
            link.bulletin(_REVOKED_TOPIC, revoked.pem)
        try:
            for seq, frame in self._handler.link_up(peer, link.terms.received):
                link.send(seq, frame)
        except RemoteError as error:
            link.end(_Close.VIOLATION, error.problem)
        except Exception as error:
            self._fail(error)
            raise

    def _detach(self, link: _Link, reason: str) -> None:
        """Take a link out of use, if it still is in use."""
        peer = link.neighbor.index
        if self._links.get(peer) is not link:
            return
        self._past[peer] = _add(self._past[peer], link.counters())
        del self._links[peer]
        self.problems[peer] = reason
        self._went_down[peer].set()
        log.info("link to %s is down: %s", link.neighbor.name, reason)
        self._tell(self._handler.link_down, peer, reason)

    def _tell(self, call: Callable[[int, str], None], peer: int, reason: str) -> None:
        try:
            call(peer, reason)
        except Exception as error:
            self._fail(error)
            raise

    def _our_hello(
        self, received: int, seen_as: str, *, challenge: bytes = b"", answers: tuple[bytes, str] | None = None
    ) -> bytes:
        """Return our first envelope; `answers` is a dialler's challenge with its name."""
        ours = self._hello
        certificate = proof = b""
        if self._credentials is not None and answers is not None and len(answers[0]) == CHALLENGE_BYTES:
            certificate, proof = prove(self._credentials, answers[0], verifier=answers[1])
        hello = exchange_pb2.Hello(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            run=ours.run,
            algorithm=ours.algorithm,
            model_digest=ours.model_digest,
            graph_digest=ours.graph_digest,
            run_digest=ours.run_digest,
            num_peers=ours.num_peers,
            index=self.me,
            name=ours.name,
            nonce=self._nonce,
            received=received,
            window_bytes=self._window_bytes,
            chunk_bytes=self._chunk_bytes,
            heartbeat_ms=max(1, round(self._options.heartbeat_s * 1000)),
            software=ours.software,
            seen_as=seen_as,
            challenge=challenge,
            certificate=certificate,
            proof=proof,
        )
        return exchange_pb2.Envelope(hello=hello).SerializeToString()

    def _channel_options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self._chunk_bytes + _ENVELOPE_SLACK),
            ("grpc.max_send_message_length", -1),
            # How much may be on its way inside HTTP/2; our own credit bounds the whole.
            ("grpc.http2.lookahead_bytes", min(self._window_bytes, 4 * 1024**2)),
            ("grpc.http2.bdp_probe", 0),
        ]

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


class _Link:
    """One connection to one neighbour, after the hellos."""

    def __init__(
        self,
        transport: Transport,
        neighbor: Neighbor,
        pipe: _ServerPipe | _ClientPipe,
        terms: Terms,
        identity: Identity | None,
        *,
        dialled: bool,
        received: int,
        connection: tcp_info.Connection | None,
    ) -> None:
        self.neighbor, self.terms, self.dialled, self.nonce = neighbor, terms, dialled, terms.nonce
        self.identity = identity
        """Of the other end's certificate; None without one."""
        self._transport, self._handler, self._pipe = transport, transport._handler, pipe
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._cutter = Cutter(
            chunk_bytes=min(transport._chunk_bytes, terms.chunk_bytes), credit_bytes=terms.credit_bytes
        )
        self._assembler = Assembler(
            window_bytes=transport._window_bytes,
            chunk_bytes=transport._chunk_bytes,
            max_frame_bytes=transport._max_frame_bytes,
            last_seq=received,
        )
        self._window_bytes = transport._window_bytes
        self._counters = LinkCounters(connections=1)
        self._connection, self._tcp = connection, None if connection is None else connection.counters()
        self._relayed_before = transport.relayed(neighbor.index) or (0, 0)
        self._wake = asyncio.Event()
        self._bulletins: deque[exchange_pb2.Bulletin] = deque(maxlen=_MAX_QUEUED_BULLETINS)
        self._farewell: tuple[int, str] | None = None
        self._reason = "it closed the connection"

        self._receipt = received  # what `acknowledge` said last
        self._receipt_sent = received
        self._receipt_due = False
        self._receipt_at = 0.0
        self._receipt_timer: asyncio.TimerHandle | None = None
        self._received_bytes = 0  # since the last receipt
        self._held: deque[tuple[int, int]] = deque()
        self._held_bytes = 0

        self._sent_at = self._heard_at = self._whole_at = self._loop.time()
        self._small_messages = Allowance(**_SMALL_MESSAGES, now=self._loop.time())
        self._heartbeat_s = transport._options.heartbeat_s
        self._silence_s = 3 * max(self._heartbeat_s, terms.heartbeat_s)
        self._heartbeat_due = False
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    @property
    def _tick_s(self) -> float:
        return min(1.0, self._heartbeat_s / 4)

    def send(self, seq: int, frame: bytes) -> None:
        transport, peer = self._transport, self.neighbor.index
        if 0 < seq <= transport._highest_sent[peer]:
            self._counters.frames_resent += 1
        elif seq:
            transport._highest_sent[peer] = seq
        self._cutter.push(seq, frame)
        self._wake.set()

    def bulletin(self, topic: str, data: bytes) -> None:
        self._bulletins.append(exchange_pb2.Bulletin(topic=topic, data=data))
        self._wake.set()

    def acknowledge(self, upto: int) -> None:
        if upto <= self._receipt:
            return
        self._receipt = upto
        self._receipt_at = self._loop.time()
        if upto - self._receipt_sent >= _RECEIPT_FRAMES or 4 * self._received_bytes >= self._window_bytes:
            self._receipt_due = True
            self._wake.set()
        elif self._receipt_timer is None:
            self._receipt_timer = self._loop.call_later(_RECEIPT_DELAY_S, self._receipt_waited)

    def _receipt_waited(self) -> None:
        self._receipt_timer = None
        if self._receipt == self._receipt_sent:
            return
        rest = self._receipt_at + _RECEIPT_DELAY_S - self._loop.time()
        if rest > 0.01:
            self._receipt_timer = self._loop.call_later(rest, self._receipt_waited)
        else:
            self._receipt_due = True
            self._wake.set()

    def taken(self, upto: int) -> None:
        while self._held and self._held[0][0] <= upto:
            self._held_bytes -= self._held.popleft()[1]
            if not upto:
                break  # Frames outside the sequence have no numbers to be taken up to: one at a time.
        self._wake.set()

    def end(self, kind: int, reason: str) -> None:
        """Say why, and end the connection soon. The first reason stays."""
        if self._farewell is None:
            self._farewell = (kind, reason)
            self._reason = reason
            self._wake.set()

    def counters(self) -> LinkCounters:
        """Return what went over this connection so far."""
        if self._connection is not None and (tcp := self._connection.counters()) is not None:
            self._tcp = tcp
        if (relayed := self._transport.relayed(self.neighbor.index)) is not None and self._connection is None:
            # What a socket to the neighbour would have carried.
            self._counters.socket_bytes_sent = relayed[0] - self._relayed_before[0]
            self._counters.socket_bytes_received = relayed[1] - self._relayed_before[1]
        if self._tcp is not None:
            self._counters.socket_bytes_sent = self._tcp.bytes_sent
            self._counters.socket_bytes_received = self._tcp.bytes_received
            self._counters.packet_bytes_sent = self._tcp.packet_bytes_sent
            self._counters.packet_bytes_received = self._tcp.packet_bytes_received
            self._counters.retransmitted_bytes = self._tcp.bytes_retransmitted
        return self._counters

    async def run(self) -> None:
        """Carry the connection to its end."""
        transport = self._transport
        reader = transport._spawn(self._read(), f"read {self.neighbor.name}")
        writer = transport._spawn(self._write(), f"write {self.neighbor.name}")
        try:
            # The writer ends after a farewell of ours; the reader after one of theirs, or when the connection is gone.
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            transport._detach(self, self._reason)
            if not reader.done():
                # What they are still sending is read and dropped until they have heard the farewell and end the stream:
                # gRPC loses a last message if the stream ends under a write.
                await self._pipe.done_writing()
                await asyncio.wait((reader,), timeout=_FAREWELL_S)
        finally:
            self._timer.cancel()
            if self._receipt_timer is not None:
                self._receipt_timer.cancel()
            transport._detach(self, self._reason)
            reader.cancel()
            writer.cancel()
            # gRPC may cancel this very task, once more and at any await, when the stream is gone.
            try:
                await asyncio.wait((reader, writer))
                await self._pipe.abandon()
            finally:
                self.ended.set_result(None)

    async def _read(self) -> None:
        counters, links, peer = self._counters, self._transport._links, self.neighbor.index
        try:
            while (data := await self._pipe.read()) is not None:
                self._heard_at = self._whole_at = self._loop.time()
                counters.protobuf_bytes_received += len(data)
                if links.get(peer) is not self:
                    continue
                try:
                    if not self._take(*decode(data), envelope_bytes=len(data)):
                        return
                except RemoteError as error:
                    log.warning("%s broke the protocol: %s", self.neighbor.name, error.problem)
                    self.end(_Close.VIOLATION, error.problem)
                    self._transport._detach(self, error.problem)
        except _ConnectionLostError as error:
            if self._farewell is None:
                self._reason = f"the connection is lost ({error})"

    def _take(self, envelope: exchange_pb2.Envelope, pieces: list[Piece], *, envelope_bytes: int) -> bool:
        """Act on one envelope; return whether more may follow."""
        peer, handler, counters = self.neighbor.index, self._handler, self._counters
        self._check_pace(pieces, envelope_bytes)
        if pieces:
            for seq, frame in self._assembler.take(pieces):
                counters.frames_received += 1
                counters.frame_bytes_received += len(frame)
                self._received_bytes += len(frame)
                if handler.frame_received(peer, seq, frame) is False:
                    self._held.append((seq, len(frame)))
                    self._held_bytes += len(frame)
            if self._credit_is_due():
                self._wake.set()
        if envelope.receipt:
            handler.receipt(peer, envelope.receipt)
        if envelope.credit:
            self._cutter.credit_bytes += envelope.credit
            if self._cutter.credit_bytes > 1 << 50:
                raise RemoteProtocolError(f"it granted credit of {self._cutter.credit_bytes} bytes")
            self._wake.set()
        for bulletin in envelope.bulletins:
            if len(bulletin.data) > MAX_BULLETIN_BYTES or len(bulletin.topic) > MAX_TOPIC:
                raise RemoteProtocolError(f"it sent a note of {len(bulletin.data)} bytes")
            if bulletin.topic == _REVOKED_TOPIC:
                self._take_revocations(bulletin.data)
                continue
            handler.bulletin_received(peer, bulletin.topic, bulletin.data)
        if envelope.HasField("hello"):
            raise RemoteProtocolError("it sent a second hello")
        if envelope.HasField("close"):
            reason = _clean(envelope.close.reason)
            if envelope.close.kind == _Close.GOODBYE:
                self._reason = f"it left: {reason}"
                handler.goodbye(peer, reason)
            else:
                self._reason = f"it ended the connection: {reason}"
            return False
        return True

    def _check_pace(self, pieces: list[Piece], envelope_bytes: int) -> None:
        """Raise RemoteProtocolError if what costs its sender nothing comes faster than anyone honest sends it."""
        numbered = any(piece.sequence for piece in pieces)
        beside_kbytes = (envelope_bytes - sum(len(piece.data) for piece in pieces)) / 1024
        if not self._small_messages.spend((0 if numbered else 1) + beside_kbytes, self._loop.time()):
            raise RemoteProtocolError(
                f"it floods this peer: more than {self._small_messages.rate:g} messages or kB a second beside frames"
            )

    def _take_revocations(self, pem: bytes) -> None:
        try:
            self._transport._take_revocations(pem, source=self.neighbor.index)
        except SecurityError as error:
            raise RemoteProtocolError(f"it passed on something else: {error}") from None

    def _credit_is_due(self) -> bool:
        return self._held_bytes < self._window_bytes and self._assembler.owes

    async def _write(self) -> None:
        pipe, counters = self._pipe, self._counters
        try:
            while True:
                self._wake.clear()
                while (data := self._next_envelope()) is not None:
                    counters.protobuf_bytes_sent += len(data)
                    await pipe.write(data)
                    self._sent_at = self._loop.time()
                if self._farewell is not None:
                    data = _farewell(*self._farewell)
                    counters.protobuf_bytes_sent += len(data)
                    async with asyncio.timeout(_FAREWELL_S):
                        await pipe.write(data)
                    return
                await self._wake.wait()
        except TimeoutError:
            pass
        except _ConnectionLostError as error:
            if self._farewell is None:
                self._reason = f"the connection is lost ({error})"

    def _next_envelope(self) -> bytes | None:
        """Return what is ready to be sent, as one envelope; None if nothing is."""
        if self._farewell is not None and self._farewell[0] != _Close.GOODBYE:
            return None
        chunks, credit = self._cutter.ready, self._credit_is_due()
        if not (chunks or credit or self._bulletins or self._receipt_due or self._heartbeat_due):
            return None
        envelope = exchange_pb2.Envelope()
        self._heartbeat_due = False
        if self._receipt > self._receipt_sent:
            envelope.receipt = self._receipt_sent = self._receipt
            self._received_bytes = 0
        self._receipt_due = False
        if credit:
            envelope.credit = self._assembler.grant()
        room = MAX_BULLETIN_BYTES
        while self._bulletins and (len(self._bulletins[0].data) <= room or not envelope.bulletins):
            room -= len(self._bulletins[0].data) + MAX_TOPIC
            envelope.bulletins.append(self._bulletins.popleft())
        if not chunks:
            return envelope.SerializeToString()
        pieces, frames, frame_bytes = self._cutter.cut()
        self._counters.frames_sent += frames
        self._counters.frame_bytes_sent += frame_bytes
        return encode(envelope, pieces)

    def _tick(self) -> None:
        now = self._loop.time()
        before = self._tcp
        self.counters()
        # A chunk may take longer over a thin link than a heartbeat; the kernel sees it come.
        if before is not None and self._tcp is not None and self._tcp.bytes_received > before.bytes_received:
            self._heard_at = now
        if now - self._heard_at > self._silence_s:
            log.warning("%s was silent for %.1f s", self.neighbor.name, now - self._heard_at)
            self.end(_Close.VIOLATION, f"nothing was heard for {self._silence_s:g} s")
            self._transport._detach(self, self._reason)
            return
        patience_s = self._silence_s + self._transport._chunk_bytes / _LEAST_BYTES_PER_S
        if now - self._whole_at > patience_s:
            self.end(_Close.VIOLATION, f"one message takes it more than {patience_s:.0f} s")
            self._transport._detach(self, self._reason)
            return
        if now - self._sent_at >= self._heartbeat_s:
            self._heartbeat_due = True
            self._wake.set()
        self._timer = self._loop.call_later(self._tick_s, self._tick)


class _ConnectionLostError(Exception):
    """The stream is gone; the text says what gRPC says."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(_details(error))
        self.error = error


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    """Turn the ways in which gRPC reports a stream that is gone into one."""
    try:
        yield
    except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise _ConnectionLostError(error) from None


class _ServerPipe:
    """The listener's end of a stream."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.caller: str = unquote(context.peer())

    def metadata(self) -> Any:
        """Return what the caller sent beside the stream, as (key, value)."""
        return self._context.invocation_metadata()

    def identity(self) -> Identity:
        """Return whose certificate the caller showed. Raises SecurityError."""
        return _caller_identity(self._context)

    async def read(self) -> bytes | None:
        with _losses():
            data = await self._context.read()
        return None if data is _EOF else data

    async def write(self, data: bytes) -> None:
        with _losses():
            await self._context.write(data)

    async def heed(self) -> None:
        """Wait a moment for what the caller may be writing: a stream that ends under a write loses its last words."""
        with contextlib.suppress(TimeoutError, _ConnectionLostError):
            async with asyncio.timeout(_FAREWELL_S):
                await self.read()

    async def done_writing(self) -> None:
        """Do nothing: the stream ends, after what was written, when the method that serves it returns."""

    async def abandon(self) -> None:
        """Do nothing, likewise."""


class _ClientPipe:
    """The dialler's end of a stream, with the channel that carries nothing else."""

    def __init__(self, address: str, name: str, security: Access | None, options: list[tuple[str, int]]) -> None:
        # Typed loosely: the published stubs of grpc.aio know neither raw bytes nor read and write.
        channel: Any = _open_channel(address, name, security, options)
        self._channel = channel
        self._call: Any = channel.stream_stream(f"/{_PEER_SERVICE}/Exchange")(metadata=_metadata(security))

    async def read(self) -> bytes | None:
        with _losses():
            data = await self._call.read()
        return None if data is _EOF else data

    async def write(self, data: bytes) -> None:
        with _losses():
            await self._call.write(data)

    async def done_writing(self) -> None:
        """Say that nothing more will be written."""
        with contextlib.suppress(_ConnectionLostError), _losses():
            await self._call.done_writing()

    async def finish(self) -> None:
        """Let what was written arrive, while nobody reads: a stream that is cancelled loses it."""
        with contextlib.suppress(TimeoutError, _ConnectionLostError):
            async with asyncio.timeout(_FAREWELL_S):
                await self.done_writing()
                while await self.read() is not None:
                    pass

    async def abandon(self) -> None:
        """End the stream and the connection at once."""
        self._call.cancel()
        await self._channel.close()


async def call_control(
    address: str,
    verb: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    name: str,
    security: Access | None,
    timeout_s: float = 10.0,
) -> dict[str, Any]:
    """Return what the peer `name` at `address` ("host:port") answers to one of CONTROL_VERBS.

    Raises PeerUnreachable, SecurityError if it does not accept the certificate for this, RemoteError if it cannot.
    """
    if verb not in CONTROL_VERBS:
        raise LocalProtocolError(f"there is no control call {verb!r}")
    split_address(address, key="address")
    channel: Any = _open_channel(address, name, security, [])
    try:
        method = channel.unary_unary(
            f"/{_CONTROL_SERVICE}/{verb.capitalize()}",
            request_serializer=control_pb2.ControlRequest.SerializeToString,
            response_deserializer=control_pb2.ControlResponse.FromString,
        )
        request = control_pb2.ControlRequest(arguments=json.dumps(dict(arguments or {})))
        response = await method(request, timeout=timeout_s, metadata=_metadata(security))
        result = json.loads(response.result or "{}")
    except grpc.RpcError as error:
        code = error.code()
        if code is grpc.StatusCode.PERMISSION_DENIED:
            raise SecurityError(f"{name} at {address} does not allow it: {_details(error)}") from None
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise PeerUnreachable(f"{name} at {address} did not answer within {timeout_s:g} s") from None
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
            raise RemoteError(f"{name} at {address}: {_details(error)}") from None
        neighbor = Neighbor(-1, name, address, dial=True)
        raise PeerUnreachable(_explain(error, neighbor, encrypted=security is not None)) from None
    except (ValueError, RecursionError):
        raise RemoteProtocolError(f"{name} at {address} answered with something that is not JSON") from None
    finally:
        await channel.close()
    if not isinstance(result, dict):
        raise RemoteProtocolError(f"{name} at {address} answered with something that is not a JSON object")
    return result


def _open_channel(address: str, name: str, security: Access | None, options: list[tuple[str, int]]) -> grpc.aio.Channel:
    settings: list[tuple[str, Any]] = [
        *options,
        # Each channel has a connection of its own, made when we say so and to whom we say.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]
    if security is None:
        return grpc.aio.insecure_channel(address, options=settings)
    if isinstance(security, TokenAccess):
        # The certificate is that of the address: of a load balancer, where there is one.
        credentials = grpc.ssl_channel_credentials(security.ca)
    else:
        settings.append(("grpc.ssl_target_name_override", name))
        credentials = grpc.ssl_channel_credentials(security.ca, security.key, security.certificate)
    return grpc.aio.secure_channel(address, credentials, options=settings)


def _server_credentials(security: Access) -> grpc.ServerCredentials | None:
    """Return what a listener shows and asks for; None if it speaks without TLS."""
    if isinstance(security, TokenAccess):
        if security.key is None or security.certificate is None:
            return None
        return grpc.ssl_server_credentials([(security.key, security.certificate)])
    return grpc.ssl_server_credentials(
        [(security.key, security.certificate)], root_certificates=security.ca, require_client_auth=True
    )


def _metadata(security: Access | None) -> tuple[tuple[str, str], ...] | None:
    return security.metadata() if isinstance(security, TokenAccess) else None


def _caller_identity(context: Any) -> Identity:
    certificates = context.auth_context().get("x509_pem_cert", [])
    if len(certificates) != 1:
        raise SecurityError("the caller showed no certificate")
    return identify(certificates[0], "the caller's certificate")


def _dialled_connection(neighbor: Neighbor, seen_as: str, older: set[tuple[str, int]]) -> tcp_info.Connection | None:
    """Return our socket of a stream just opened: the one the listener sees, or (behind NAT) the only new one."""
    _, port = split_address(neighbor.address or "", key="address")
    new = [each for each in tcp_info.connections() if each.remote[1] == port and each.local not in older]
    seen = tcp_info.parse_peer(seen_as)
    same = [each for each in new if seen is not None and each.local[1] == seen[1]]
    candidates = same or new
    return candidates[0] if len(candidates) == 1 else None


def split_address(address: str, *, key: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[::1]:port". Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ConfigError("is not an address with a port", key=key, value=address, valid="host:port, [ipv6]:port")
    return host.strip("[]"), int(port)


def _why_not_bound(host: str, port: int) -> str:
    """Return, by trying it plainly, why an address could not be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except socket.gaierror:
        return f"the host name {host!r} is not known here"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use by another program; choose another port, or end that program"
        if error.errno == errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}; listen on 0.0.0.0 and put the public address into advertise"
        return f"cannot be listened on: {error.strerror}"
    return "cannot be listened on"


def _explain(error: BaseException, neighbor: Neighbor, *, encrypted: bool) -> str:
    """Return a sentence for a call that failed before it was answered."""
    details = _details(error)
    who = f"{neighbor.name} at {neighbor.place}"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"{who} shows a certificate that this run's CA did not sign, or that is not valid today"
    if "not in peer certificate" in details or "Hostname Verification Check failed" in details:
        return f"{who} shows a certificate made out to another name; is this the address of {neighbor.name}?"
    if "WRONG_VERSION_NUMBER" in details or "HTTP_REQUEST" in details:
        return f"{who} does not speak TLS; security.mode must be the same on every peer"
    if "Connection refused" in details:
        return f"nobody listens at {neighbor.address}, the address of {neighbor.name}"
    if "DNS resolution failed" in details or "Domain name not found" in details:
        return f"the host name in {neighbor.address}, the address of {neighbor.name}, is not known"
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else grpc.StatusCode.UNAVAILABLE
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{who} is not a peer of this program"
    if code is grpc.StatusCode.UNAVAILABLE and any(
        sign in details for sign in ("Socket closed", "Connection reset", "Broken pipe", "handshak", "GOAWAY", "EOF")
    ):
        cause = "it may not accept our certificate, or speak without TLS" if encrypted else "it may want TLS"
        return f"{who} closed the connection at once; {cause}"
    return f"{who} cannot be reached ({details})"


def _details(error: BaseException) -> str:
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return _clean(details or type(error).__name__)


def _clean(text: str) -> str:
    """Return a text of somebody else, printable and not too long."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_REASON])


def _parse_hello(data: bytes) -> exchange_pb2.Hello:
    envelope, _ = decode(data)
    if not envelope.HasField("hello") or len(envelope.ListFields()) != 1:
        raise RemoteProtocolError("its first envelope is not a hello")
    return envelope.hello


def _farewell(kind: int, reason: str) -> bytes:
    close = exchange_pb2.Close(kind=kind, reason=_clean(reason))  # type: ignore[arg-type]
    return exchange_pb2.Envelope(close=close).SerializeToString()


def _add(one: LinkCounters, other: LinkCounters) -> LinkCounters:
    """Return the sums; None for what one of the connections could not be asked."""
    parts = [part for part in (one, other) if part.connections]
    total = LinkCounters()
    for each in fields(LinkCounters) if parts else ():
        values = [getattr(part, each.name) for part in parts]
        setattr(total, each.name, None if None in values else sum(values))
    return total
