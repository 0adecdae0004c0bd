"""The two ends of a measurement, each run as `python -m peer.links.probe` in the namespace of a device.

It imports nothing of the package, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence

_PORT = 7799
_PINGS = 40
_SETTLE = 0.25
"""The first quarter of a transfer is slow start and what the queues take at once."""


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
    found = _serve() if arguments[0] == "serve" else _ask(arguments[1], float(arguments[2]))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
