"""The end that opens streams: dials a neighbour, again and again, for as long as it is one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from peer.errors import HandshakeRefused, PeerUnreachable, RemoteError, RemoteProtocolError
from peer.foreign_text import printable
from peer.net import tcp_info
from peer.net.address import split_address
from peer.net.connection import Connection
from peer.net.handshake import FAREWELL_S, Handshake, OpenedStream, farewell, read_close
from peer.net.links import Links
from peer.net.neighbor import Neighbor
from peer.net.rpc import Channel, DialledStream, Options, StreamLost
from peer.net.services import PEER_SERVICE
from peer.net.tunnels import Tunnels
from peer.net.unreachable import why_unreachable
from peer.proto.sottovoce.v1 import exchange_pb2 as pb

_BACKOFF_FIRST_S = 0.1
_REFUSED_PAUSE_S = 4.0
_HEAD_START_S = 1.0
"""Time that a neighbour, which is to dial, has when this process starts. It is short: where this peer was away, the
neighbour may be in one of its long pauses."""
_STABLE_S = 5.0
"""A connection that lived this long starts the back-off anew."""


@dataclass(kw_only=True)
class Dialler:
    """Opens this peer's share of the streams to its neighbours."""

    links: Links
    handshake: Handshake
    tunnels: Tunnels
    """They lead to neighbours beyond a relay."""
    channel_options: Options
    dial_timeout_s: float
    backoff_max_s: float
    is_closing: Callable[[], bool]
    """Once this is so, no connection is put into use."""
    _jitter: random.Random = field(default_factory=random.Random, init=False)

    async def keep_up(self, neighbor: Neighbor, *, is_calling: bool = False) -> None:
        """Keep up the link to a neighbour until the transport closes or the neighbour is removed.

        One that is to dial this peer, or that `is_calling` it already, gets a second for that at first. One that is to
        dial gets as long as an attempt takes each time that the link goes down. Then this end dials, too: the neighbour
        may pause after attempts in vain, and the address under which it knows this peer may be another one by now. If
        two streams cross, both ends keep the same one (`Links.give_way`).
        """
        loop = asyncio.get_running_loop()
        at_once = neighbor.dial and not is_calling
        pause_s, wait_s = _BACKOFF_FIRST_S, 0.0 if at_once else min(_HEAD_START_S, self.dial_timeout_s)
        while not self.is_closing() and self.links.holds(neighbor):
            if self.links.connection(neighbor.index) is not None:
                begin = loop.time()
                await self.links.wait_down(neighbor.index)
                pause_s = _BACKOFF_FIRST_S if loop.time() - begin >= _STABLE_S else pause_s
                wait_s = 0.0 if neighbor.dial else self.dial_timeout_s
                continue
            if wait_s:
                await asyncio.sleep(wait_s * self._jitter.uniform(1.0, 1.5))
                wait_s = 0.0
                continue
            try:
                connection = await self._dial(neighbor)
            except HandshakeRefused as error:
                # Only a person can mend this; once it is mended the link should come up by itself.
                self.links.note_refusal(neighbor, error.problem)
                pause_s = max(pause_s, _REFUSED_PAUSE_S)
            except RemoteProtocolError as error:
                self.links.blame(neighbor.index, error)
            except RemoteError as error:
                self.links.note_problem(neighbor, error.problem)
            else:
                if connection is not None:
                    begin = loop.time()
                    await connection.run()
                    if loop.time() - begin >= _STABLE_S:
                        pause_s = _BACKOFF_FIRST_S
            pause_s = min(pause_s, self.backoff_max_s)
            await asyncio.sleep(pause_s * self._jitter.uniform(0.5, 1.0))
            pause_s *= 2

    async def _dial(self, neighbor: Neighbor) -> Connection | None:
        """Return a new connection; None if another stream of the pair is better. Raises RemoteError."""
        older = {each.local for each in tcp_info.connections()}
        address = await self._address_of(neighbor)
        channel = Channel(address, neighbor.name, self.handshake.access, self.channel_options)
        stream = channel.stream(PEER_SERVICE, "Exchange")
        connection = None
        try:
            connection = await self._greet(stream, neighbor, older)
        except TimeoutError:
            raise PeerUnreachable(
                f"{neighbor.name} at {neighbor.place} did not answer within {self.dial_timeout_s:g} s"
            ) from None
        except StreamLost as error:
            raise PeerUnreachable(self._why_lost(error, neighbor)) from None
        except RemoteError:
            raise
        except Exception as error:  # Raised for what the neighbour answered.
            self.links.blame(neighbor.index, error)
        finally:
            if connection is None:
                await stream.abandon()
        return connection

    async def _greet(self, stream: DialledStream, neighbor: Neighbor, older: set[tuple[str, int]]) -> Connection | None:
        """Exchange hellos and put the connection into use. Raises RemoteError, TimeoutError, StreamLost."""
        challenge = self.handshake.challenge()
        async with asyncio.timeout(self.dial_timeout_s):
            received = self.links.handler.last_received(neighbor.index)
            await stream.write(self.handshake.hello(neighbor, received=received, challenge=challenge))
            first = await stream.read()
        if first is None:
            raise PeerUnreachable(f"{neighbor.name} at {neighbor.place} closed the connection without an answer")
        if (close := read_close(first)) is not None:
            if close.kind == pb.Close.SUPERSEDED:
                return None
            if close.kind == pb.Close.GOODBYE:
                raise PeerUnreachable(f"{neighbor.name} at {neighbor.place} is leaving: {printable(close.reason)}")
            raise HandshakeRefused(f"{neighbor.name} at {neighbor.place} refuses us: {printable(close.reason)}")
        # From here on nothing is awaited before the connection is in use: the checks stay valid.
        try:
            terms, identity = self.handshake.read_answer(first, neighbor, challenge)
            stays = not self.is_closing() and self.links.holds(neighbor)
            stays = stays and self.links.give_way(neighbor, terms, dialled=True)
        except RemoteError as error:
            await _part(stream, pb.Close.REFUSED, error.problem)
            raise
        if not stays:
            await _part(stream, pb.Close.SUPERSEDED, "the stream in the other direction stays")
            return None
        self.links.new_generation(neighbor.index)
        opened = OpenedStream(
            neighbor=neighbor,
            stream=stream,
            terms=terms,
            identity=identity,
            dialled=True,
            received=received,
            socket=None if neighbor.relay else _dialled_socket(neighbor, terms.seen_as, older),
        )
        return self.links.open(opened)

    async def _address_of(self, neighbor: Neighbor) -> str:
        """Return the target for gRPC to dial. Raises PeerUnreachable."""
        if neighbor.relay is not None:
            return await self.tunnels.address_of(neighbor.name, neighbor.relay)
        assert neighbor.address is not None
        return neighbor.address

    def _why_lost(self, error: StreamLost, neighbor: Neighbor) -> str:
        if neighbor.relay is not None and (trouble := self.tunnels.trouble.get(neighbor.name)):
            return f"{neighbor.name} cannot be reached: {trouble}"
        return why_unreachable(
            error,
            name=neighbor.name,
            place=neighbor.place,
            address=neighbor.address,
            encrypted=self.handshake.access is not None,
        )


async def _part(stream: DialledStream, kind: pb.Close.Kind, reason: str) -> None:
    """Say why a stream is of no use, and let it arrive: a stream that is cancelled loses its last words."""
    with contextlib.suppress(TimeoutError, StreamLost):
        async with asyncio.timeout(FAREWELL_S):
            await stream.write(farewell(kind, reason))
            await stream.done_writing()
            while await stream.read() is not None:
                pass


def _dialled_socket(neighbor: Neighbor, seen_as: str, older: set[tuple[str, int]]) -> tcp_info.Connection | None:
    """Return our socket of a stream just opened: the one that the listener sees, or (behind NAT) the only new one."""
    _, port = split_address(neighbor.address or "", key="address")
    new = [each for each in tcp_info.connections() if each.remote[1] == port and each.local not in older]
    seen = tcp_info.parse_peer(seen_as)
    same = [each for each in new if seen is not None and each.local[1] == seen[1]]
    candidates = same or new
    return candidates[0] if len(candidates) == 1 else None
