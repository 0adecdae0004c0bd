"""Connections to the neighbours: gRPC streams, mutual TLS, reconnection, liveness, and their cost in bytes.

One stream for each pair of peers, opened by either of them, carries frames, receipts, credit and notes both ways
(`proto/sottovoce/v1/exchange.proto`). The transport delivers frames whole and in order and says when a link comes and
goes; the daemon knows which frames must be sent again, and which were received before (`peer.node.delivery`).

This is the façade; the work is done by `listener` and `dialler`, which open streams, `links`, which keeps one
connection to each neighbour in use, `connection`, `control`, `revocation_watch`, `relay` and `tunnels`.

Everything runs on one event loop and nothing here blocks it. All tasks belong to the transport and end with `close`;
an unexpected error in one of them ends `wait_closed` with that error, unless input of a neighbour led to it
(`Links.blame`).

Liveness is the application's (`liveness`). HTTP/2 keepalive stays off, because gRPC servers count such pings as an
attack ("too_many_pings") and middle boxes ignore them; the bandwidth probe of gRPC stays off, because it answers each
small message with a ping of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from peer.config.options import TransportOptions
from peer.errors import LocalProtocolError, RemoteProtocolError, StateError
from peer.net import tcp_info
from peer.net.address import split_address
from peer.net.admission import Admission
from peer.net.connection import Connection
from peer.net.control import ControlService
from peer.net.counters import LinkCounters
from peer.net.dialler import Dialler
from peer.net.handler import MAX_BULLETIN_BYTES, MAX_TOPIC, Handler
from peer.net.handshake import FAREWELL_S, Handshake
from peer.net.hello import PROTOCOL_MIN, HelloInfo, Progress
from peer.net.inbox import LinkLimits
from peer.net.links import Links
from peer.net.listener import Listener, bind, new_server
from peer.net.neighbor import Neighbor, RelayAddress
from peer.net.relay import RelayService
from peer.net.revocation_watch import RevocationWatch
from peer.net.rpc import Channel, DialledStream, Options, Server, socket_address
from peer.net.security.credentials import Access, Credentials
from peer.net.services import PEER_SERVICE, RELAY_SERVICE
from peer.net.tasks import Tasks
from peer.net.tunnels import Tunnels
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.protocol import release_with

_ENVELOPE_SLACK = MAX_BULLETIN_BYTES + 8 * 1024  # beside the chunks: a note or a hello, and the numbers
_RELAY_IDLE_S = 300.0
_BDP_PROBE_OFF = ("grpc.http2.bdp_probe", 0)


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
        own_socket: Path | None = None,
        hear: Callable[[int, str], Neighbor | None] | None = None,
        needed_protocol: Callable[[], int] = lambda: PROTOCOL_MIN,
        device_of: Callable[[int], int] = lambda index: index,
        progress: Progress | None = None,
    ) -> None:
        """`members` are the names of all peers of the run, for whom this one may relay; at `own_relay` it waits for
        callers, if nobody can dial it. At `own_socket`, beside `listen`, it is there for callers on this machine, who
        need not share the connections that strangers can take. `hear(index, name)` returns how a caller of the same run
        is seen that is no neighbour yet, None if it shall be none, or raises HandshakeRefused. `needed_protocol()`: the
        lowest version of the protocol that serves the run by now; neighbours that do not speak it are refused.
        `device_of(index)` returns the number in the certificate of a newcomer that may have this index. `progress`: the
        signer of this peer's progress; None where nothing is signed."""
        self.me = me
        self.port: int | None = None
        """The port that is listened on, once started."""
        self._listening: frozenset[int] = frozenset()
        """Inodes of the sockets that listen on it; empty until they are known."""
        self._others: Collection[int] | None = None
        """Inodes of the sockets that listened before those; None before this peer listens."""
        self._listen, self._own_relay, self._security, self._options = listen, own_relay, security, options
        self._own_socket = own_socket
        self._closing = False
        self._server: Server | None = None
        self._tasks = Tasks()
        limits = _limits(options, hello)
        self._channel_options = _channel_options(limits)
        self._tunnels = Tunnels(
            name=hello.name,
            open_stream=self._open_relay_stream,
            tasks=self._tasks,
            heartbeat_s=options.heartbeat_s,
            blame=lambda address, error: self._links.blame_caller(address, error),
        )
        revoked = security.revoked if isinstance(security, Credentials) else None
        self._links = Links(
            me=me,
            limits=limits,
            heartbeat_s=options.heartbeat_s,
            relayed=self.relayed,
            handler=handler,
            revocations=lambda: b"" if revoked is None else revoked.pem,
            take_revocations=self._take_revocations,
            tasks=self._tasks,
        )
        self.refusals, self.problems = self._links.refusals, self._links.problems
        self.offences, self.log = self._links.offences, self._links.log
        self._admission = Admission(
            security, me=me, name=hello.name, neighbors=self._links.neighbors, hears_newcomers=hear is not None
        )
        self._admission.members.update(members)
        self.relay = RelayService(
            identify=self._admission.relay_user,
            account=self._admission.account,
            kbytes_per_s=options.relay_kbytes_per_s,
            # The ends may have set another heartbeat than this peer.
            idle_s=max(_RELAY_IDLE_S, 3 * options.heartbeat_s),
            blame=self._links.blame_caller,
        )
        """The service that carries traffic for others."""
        self._revocations: RevocationWatch | None = None
        if isinstance(security, Credentials) and revoked is not None:
            self._revocations = RevocationWatch(
                revoked, own=lambda: security.identity, links=self._links, on_news=self.relay.recheck, tasks=self._tasks
            )
        self._needed_protocol = needed_protocol
        handshake = Handshake(
            me=me,
            info=hello,
            access=security,
            limits=limits,
            heartbeat_s=options.heartbeat_s,
            needed_protocol=needed_protocol,
            progress=progress,
        )
        self._dialler = Dialler(
            links=self._links,
            handshake=handshake,
            tunnels=self._tunnels,
            channel_options=self._channel_options,
            dial_timeout_s=options.dial_timeout_s,
            backoff_max_s=options.backoff_max_s,
            is_closing=lambda: self._closing,
        )
        self._listener = Listener(
            links=self._links,
            handshake=handshake,
            admission=self._admission,
            tasks=self._tasks,
            dial_timeout_s=options.dial_timeout_s,
            hear=hear,
            device_of=device_of,
            add_neighbor=lambda neighbor: self.add_neighbor(neighbor, is_calling=True),
            is_closing=lambda: self._closing,
        )
        self.control = ControlService(
            admission=self._admission,
            links=self._links,
            revocations=self._revocations,
            handshake=handshake,
            dial_timeout_s=options.dial_timeout_s,
        )
        for neighbor in neighbors:
            self.add_neighbor(neighbor)

    # -- its life --

    async def start(self, *, at_home: bool = True) -> None:
        """Listen, and start to dial in the background. Raises ConfigError if the address cannot be listened on.

        With `at_home=False` only control calls are answered, and peers are told that this one is about to end.
        """
        self._closing = not at_home
        self._tasks.start()
        if self._listen or self._own_relay is not None:
            try:
                await self._serve()
            except BaseException:
                self._tunnels.close()
                raise
        if self._own_relay is not None:
            self._tasks.spawn(self._tunnels.offer(self._own_relay), "wait at the relay")
        if self._revocations is not None:
            self._tasks.spawn(self._revocations.watch_file(), "revocations")
        for neighbor in self._links.neighbors.values():
            self._dial(neighbor)

    async def wait_closed(self) -> None:
        """Return when `close` is done. Raises any error inside the transport: a bug."""
        await self._tasks.wait_closed()

    async def close(self, goodbye: str) -> None:
        """Say goodbye on every link, wait a moment for it to arrive, and end everything."""
        self._closing = True
        ended = []
        for connection in self._links.connections():
            connection.end(pb.Close.GOODBYE, goodbye)
            ended.append(connection.ended)
        if ended:
            await asyncio.wait(ended, timeout=2 * FAREWELL_S)
        await self._tasks.cancel()
        if self._server is not None:
            await self._server.stop(FAREWELL_S)
        self._tunnels.close()
        for connection in self._links.connections():
            connection.detach("we left")
        self._tasks.finish()

    def let_go_in_fork(self) -> None:
        """Close the listening socket in a forked process: its parent listens, and the parent's successor must find the
        port free."""
        tcp_info.stop_listening(self._is_own_listener)

    def _is_own_listener(self, inode: int, port: int) -> bool:
        if self._listening:
            return inode in self._listening
        if self._listen is None or self._others is None or inode in self._others:
            return False
        return port == (self.port or split_address(self._listen, key="peer.listen")[1])

    # -- neighbours --

    @property
    def neighbors(self) -> frozenset[int]:
        """The neighbours of now."""
        return frozenset(self._links.neighbors)

    def add_neighbor(self, neighbor: Neighbor, *, is_calling: bool = False) -> None:
        """Take up a neighbour: dial it if this end does that, or let it in. One that `is_calling` is dialled only if
        that comes to nothing. Raises ConfigError for a wrong address."""
        if neighbor.relay is None and (neighbor.dial or neighbor.address is not None):
            split_address(neighbor.address or "", key=f"peers.{neighbor.index}.advertise")
        self._admission.dropped.pop(neighbor.name, None)
        self._links.add(neighbor)
        if self._tasks.started and not self._closing:
            self._dial(neighbor, is_calling=is_calling)

    def remove_neighbor(self, index: int, reason: str) -> None:
        """Drop a neighbour and send it the reason, now and whenever it calls; where that is empty, nothing is held
        against it, and it is a caller like any other."""
        if reason and (neighbor := self._links.neighbors.get(index)) is not None:
            self._admission.dropped[neighbor.name] = reason
        self._links.remove(index, reason)

    def know_member(self, name: str) -> None:
        """Relay for one more peer, which was not known when this one began."""
        self._admission.members.add(name)

    def is_up(self, peer: int) -> bool:
        """Return whether there is a link to a neighbour now."""
        return self._links.connection(peer) is not None

    def connection(self, peer: int) -> Connection | None:
        """Return the connection that is in use to a neighbour; None while its link is down."""
        return self._links.connection(peer)

    def end_older(self) -> None:
        """End the links to neighbours that do not speak the version of the protocol that is needed by now."""
        needed = self._needed_protocol()
        for connection in self._links.connections():
            if connection.protocol < needed:
                reason = f"this run uses what came with release {release_with(needed)}; install that one or a later one"
                connection.drop(pb.Close.REFUSED, reason)

    def counters(self, peer: int) -> LinkCounters:
        """Return the traffic of the link to a neighbour so far."""
        return self._links.counters(peer)

    def relayed(self, peer: int) -> tuple[int, int] | None:
        """Return the bytes that went to and came from a neighbour through a relay; None where none ever did."""
        neighbor = self._links.neighbors.get(peer)
        return None if neighbor is None else self._tunnels.carried.get(neighbor.name)

    # -- messages --

    def send(self, peer: int, seq: int, frame: bytes) -> None:
        """Queue a frame if the link is up; otherwise `link_up` will be asked for it.

        Number 0 stands outside the sequence: a request, or the answer to one, that is asked for again if it is lost.
        """
        if not frame:
            raise LocalProtocolError("an empty frame cannot be sent")
        self._links.send(peer, seq, frame)

    def acknowledge(self, peer: int, upto: int) -> None:
        """Tell the neighbour, soon, that its frames up to `upto` are durable here (`receipts` says when)."""
        if (connection := self._links.connection(peer)) is not None:
            connection.acknowledge(upto)

    def taken(self, peer: int, upto: int) -> None:
        """Give back the credit of frames up to `upto` for which `frame_received` returned False.

        0 stands for the oldest one outside the sequence. Frames are taken in the order in which they came.
        """
        if (connection := self._links.connection(peer)) is not None:
            connection.taken(upto)

    def bulletin(self, peer: int, topic: str, data: bytes) -> bool:
        """Queue a note; return False, and drop it, if the link is down.

        The oldest is dropped if more than 256 wait.
        """
        if len(data) > MAX_BULLETIN_BYTES or len(topic) > MAX_TOPIC:
            raise LocalProtocolError(f"a note of {len(data)} bytes under {topic[:80]!r} is too large")
        connection = self._links.connection(peer)
        if connection is not None:
            connection.send_note(topic, data)
        return connection is not None

    def blame(self, peer: int, error: Exception) -> None:
        """Hold a neighbour responsible for an error raised while its input was handled (`Links.blame`). Raises errors
        that no neighbour is to blame for."""
        self._links.blame(peer, error)

    # -- how the parts fit together --

    async def _serve(self) -> None:
        most_neighbors = max(len(self._links.neighbors), len(self._admission.members))  # Members may change.
        server = new_server(
            self._channel_options, most_neighbors=most_neighbors, dial_timeout_s=self._options.dial_timeout_s
        )
        server.serve_streams(PEER_SERVICE, {"Exchange": self._listener.exchange})
        self.control.serve(server)
        self.relay.serve(server)
        if self._own_relay is not None:
            socket = self._tunnels.listening_socket
            if not server.bind(socket_address(socket), self._security):
                raise StateError(f"{socket}: no callers from a relay can be taken there; set TMPDIR to another folder")
        if self._listen and self._own_socket is not None and isinstance(self._security, Credentials):
            # gRPC counts the connections of each address that is listened on. Where no socket can be (a file system
            # without, a path that is too long) callers take the port.
            server.bind(socket_address(self._own_socket), self._security)
        if self._listen:
            # A loader of the script may fork its workers right after this line, in another thread.
            self._others = tcp_info.listening().keys()
            self.port = bind(server, self._listen, self._security)
            now = tcp_info.listening().items()
            self._listening = frozenset(inode for inode, port in now if self._is_own_listener(inode, port))
        await server.start()
        self._server = server

    def _dial(self, neighbor: Neighbor, *, is_calling: bool = False) -> None:
        calls_in_vain = not is_calling and not self.is_up(neighbor.index)
        if not neighbor.dial and neighbor.calls is not None and calls_in_vain:
            self._links.note_problem(neighbor, f"it is to dial this peer at {neighbor.calls}, and has not so far")
        if neighbor.dial or neighbor.can_be_dialled:
            self._tasks.spawn(self._dialler.keep_up(neighbor, is_calling=is_calling), f"dial {neighbor.name}")

    def _take_revocations(self, peer: int, pem: bytes) -> None:
        if self._revocations is None:
            raise RemoteProtocolError('it passed on a revocation list, but security.mode is not "mtls"')
        self._revocations.take_note(peer, pem)

    def _open_relay_stream(self, relay: RelayAddress, method: str) -> DialledStream:
        return Channel(relay.address, relay.name, self._security, [_BDP_PROBE_OFF]).stream(RELAY_SERVICE, method)


def _limits(options: TransportOptions, hello: HelloInfo) -> LinkLimits:
    max_frame_bytes = options.max_message_mbytes * 1024**2
    if hello.max_frame_bytes is not None:
        max_frame_bytes = min(max_frame_bytes, hello.max_frame_bytes)
    return LinkLimits(
        window_bytes=options.window_kbytes * 1024,
        chunk_bytes=options.chunk_kbytes * 1024,
        max_frame_bytes=max_frame_bytes,
    )


def _channel_options(limits: LinkLimits) -> Options:
    return [
        ("grpc.max_receive_message_length", limits.chunk_bytes + _ENVELOPE_SLACK),
        ("grpc.max_send_message_length", -1),
        # Bytes that may be on their way inside HTTP/2; our own credit bounds the whole.
        ("grpc.http2.lookahead_bytes", min(limits.window_bytes, 4 * 1024**2)),
        _BDP_PROBE_OFF,
    ]
