"""What a link turns out to be, measured from inside: round trip of small datagrams, goodput of TCP.

Both ends run this file in the namespaces of two devices; it imports nothing else, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from links.network import LinkNetwork

_PORT = 7799
_PINGS = 40
_PING_BYTES = 50
"""A number in a datagram in an Ethernet frame."""
_ROUND_TRIPS_TO_FILL = 20
_SETTLE = 0.25
"""The first quarter of a transfer is slow start and what the queues take at once."""

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

    @property
    def rate_is_right(self) -> bool:
        return not self.asked_kbit or abs(self.goodput_kbit / self.asked_kbit - 1) <= RATE_TOLERANCE

    @property
    def round_trip_is_right(self) -> bool:
        allowed = max(ROUND_TRIP_TOLERANCE * self.asked_round_trip_ms, ROUND_TRIP_TOLERANCE_MS)
        return abs(self.round_trip_ms - self.asked_round_trip_ms) <= allowed


def measure(network: LinkNetwork, sender: int, receiver: int, *, seconds: float = 4.0) -> Measured:
    """Return what the link from one device to another is like; it takes a little longer than `seconds`.

    TCP needs some round trips before it fills a link, which is time on top.
    """
    seconds += _ROUND_TRIPS_TO_FILL * network.round_trip_ms(sender, receiver, 0) / 1000
    both = [sys.executable, __file__]
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
    )


def _serve() -> dict[str, float]:
    """Echo datagrams, take one stream; return its rate."""
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("0.0.0.0", _PORT))

    def answer() -> None:
        while True:
            data, address = echo.recvfrom(2048)
            echo.sendto(data, address)

    threading.Thread(target=answer, daemon=True).start()
    listener = socket.create_server(("0.0.0.0", _PORT))
    print("listening", flush=True)
    stream, _ = listener.accept()
    samples = [(time.monotonic(), 0)]
    buffer = bytearray(1 << 18)
    while count := stream.recv_into(buffer):
        samples.append((time.monotonic(), samples[-1][1] + count))
    return {"goodput_kbit": _rate(samples)}


def _rate(samples: Sequence[tuple[float, int]]) -> float:
    """Return the kbit/s of the settled part of a transfer, from (seconds, bytes so far)."""
    begins = samples[0][0] + _SETTLE * (samples[-1][0] - samples[0][0])
    first = next(i for i, (at, _) in enumerate(samples) if at >= begins)
    (start, before), (end, after) = samples[first], samples[-1]
    return (after - before) * 8 / 1000 / max(end - start, 1e-9)


def _ask(address: str, seconds: float) -> dict[str, float]:
    """Return the round trips, then send a stream for some seconds."""
    trips = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo:
        echo.settimeout(3.0)
        echo.connect((address, _PORT))
        for number in range(_PINGS):
            sent = time.perf_counter()
            echo.send(number.to_bytes(8, "big"))
            try:
                while int.from_bytes(echo.recv(64), "big") != number:
                    pass
            except TimeoutError:
                continue  # Lost.
            trips.append((time.perf_counter() - sent) * 1000)
            time.sleep(0.005)
    with socket.create_connection((address, _PORT)) as stream:
        # BBR, the default of some kernels, empties the link every ten seconds to measure its latency.
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, (10).to_bytes(8, "little") + bytes(8))
        until, data = time.monotonic() + seconds, bytes(1 << 14)
        while time.monotonic() < until:
            stream.send(data)
    return {"median_ms": statistics.median(trips), "least_ms": min(trips)}


def _main(arguments: Sequence[str]) -> None:
    found: dict[str, Any] = _serve() if arguments[0] == "serve" else _ask(arguments[1], float(arguments[2]))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
