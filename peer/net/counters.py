"""What went over the link to a neighbour: counted here, by the kernel, or by the tunnel through a relay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from peer.net import tcp_info


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

    def plus(self, other: LinkCounters) -> LinkCounters:
        """Return the sums; None for a counter that one of the connections could not provide."""
        parts = [part for part in (self, other) if part.connections]
        total = LinkCounters()
        for each in fields(LinkCounters) if parts else ():
            values = [getattr(part, each.name) for part in parts]
            setattr(total, each.name, None if None in values else sum(values))
        return total


class SocketMeter:
    """The bytes below gRPC of one connection."""

    def __init__(self, socket: tcp_info.Connection | None, relayed: Callable[[], tuple[int, int] | None]) -> None:
        """`socket` is None where it is not known. `relayed` returns what went to and came from the neighbour through a
        relay since this process began, None if nothing did."""
        self._socket, self._relayed = socket, relayed
        self._tcp = None if socket is None else socket.counters()
        self._relayed_before = relayed() or (0, 0)

    def update(self, counters: LinkCounters) -> None:
        """Bring the counters of the socket up to date; those of a closed one keep their last values."""
        if self._socket is None:
            if (relayed := self._relayed()) is not None:
                # What a socket to the neighbour would have carried.
                counters.socket_bytes_sent = relayed[0] - self._relayed_before[0]
                counters.socket_bytes_received = relayed[1] - self._relayed_before[1]
            return
        self._tcp = self._socket.counters() or self._tcp
        if self._tcp is not None:
            counters.socket_bytes_sent = self._tcp.bytes_sent
            counters.socket_bytes_received = self._tcp.bytes_received
            counters.packet_bytes_sent = self._tcp.packet_bytes_sent
            counters.packet_bytes_received = self._tcp.packet_bytes_received
            counters.retransmitted_bytes = self._tcp.bytes_retransmitted
