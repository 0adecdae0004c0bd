"""Traffic counters of the link to a neighbour."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass
class LinkCounters:
    """Traffic over the link to one neighbour, over all its connections so far."""

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
    """Connections so far: one more than reconnections."""

    @property
    def reconnects(self) -> int:
        return max(0, self.connections - 1)

    def plus(self, other: LinkCounters) -> LinkCounters:
        """Return the sums; None for a counter that one of the connections could not provide."""
        if not self.connections or not other.connections:
            return replace(self if self.connections else other)
        total = LinkCounters()
        for each in fields(LinkCounters):
            pair = (getattr(self, each.name), getattr(other, each.name))
            setattr(total, each.name, None if None in pair else sum(pair))
        return total
