"""A link measured from inside: round trip of small datagrams, goodput of TCP."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from peer.links.network import LinkNetwork

_PING_BYTES = 50
"""A number in a datagram in an Ethernet frame."""
_ROUND_TRIPS_TO_FILL = 20

RATE_TOLERANCE = 0.10
ROUND_TRIP_TOLERANCE = 0.10
ROUND_TRIP_TOLERANCE_MS = 0.15


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One direction of one link, asked for and measured."""

    sender: int
    receiver: int
    asked_kbit: float
    """0 where no limit was asked for."""
    goodput_kbit: float
    """TCP payload that arrived; headers take up to 4.4 % of the rate."""
    asked_round_trip_ms: float
    round_trip_ms: float
    """Median of an otherwise idle link."""
    least_round_trip_ms: float
    loses_packets: bool = False
    """Whether packets are lost at random, which limits TCP before the rate does."""

    @property
    def is_right(self) -> bool:
        """Whether the link is as requested."""
        allowed = max(ROUND_TRIP_TOLERANCE * self.asked_round_trip_ms, ROUND_TRIP_TOLERANCE_MS)
        trip_is_right = abs(self.round_trip_ms - self.asked_round_trip_ms) <= allowed
        rate_is_right = not self.asked_kbit or abs(self.goodput_kbit / self.asked_kbit - 1) <= RATE_TOLERANCE
        return trip_is_right and (rate_is_right or self.loses_packets)


def measure(network: LinkNetwork, sender: int, receiver: int, *, seconds: float = 4.0) -> Measured:
    """Measure the link from one device to another; it takes a little longer than `seconds`.

    TCP needs some round trips before it fills a link, which is time on top.
    """
    seconds += _ROUND_TRIPS_TO_FILL * network.round_trip_ms(sender, receiver, 0) / 1000
    both = [sys.executable, "-m", "peer.links.probe"]
    server = subprocess.Popen([*network.command(receiver), *both, "serve"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        server.stdout.readline()
        client = [*network.command(sender), *both, "ask", network.address(receiver), str(seconds)]
        asked = subprocess.run(client, capture_output=True, text=True, check=True, timeout=60 + 10 * seconds)
        received = json.loads(server.stdout.readline())
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    trips = json.loads(asked.stdout)
    return Measured(
        sender=sender,
        receiver=receiver,
        asked_kbit=network.rate_kbit(sender, receiver),
        goodput_kbit=received["goodput_kbit"],
        asked_round_trip_ms=network.round_trip_ms(sender, receiver, _PING_BYTES),
        round_trip_ms=trips["median_ms"],
        least_round_trip_ms=trips["least_ms"],
        loses_packets=any(network.profiles[end].loss > 0 for end in (sender, receiver)),
    )
