"""The bytes of a connection below gRPC, as the kernel or the tunnel through a relay counts them."""

from __future__ import annotations

from collections.abc import Callable

from peer.net import tcp_info
from peer.net.counters import LinkCounters


class SocketMeter:
    """Reads the counters of one connection."""

    def __init__(self, socket: tcp_info.Connection | None, relayed: Callable[[], tuple[int, int] | None]) -> None:
        """`socket` is None where it is not known. `relayed` returns the bytes to and from the neighbour through a relay
        since this process began, None if nothing did."""
        self._socket, self._relayed = socket, relayed
        self._tcp = None if socket is None else socket.counters()
        self._relayed_before = relayed() or (0, 0)

    def update(self, counters: LinkCounters) -> None:
        """Bring the counters of the socket up to date; those of a closed one keep their last values."""
        if self._socket is None:
            if (relayed := self._relayed()) is not None:
                # The bytes that a socket to the neighbour would have carried.
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
