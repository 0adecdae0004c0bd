"""A neighbour that sends but never reads cannot hold on to a place or a link of ours."""

from __future__ import annotations

import asyncio
import socket
import struct

from peer.config.options import TransportOptions
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from tests.hostile.transport.caller import hello
from tests.net.transport_peers import Mind, Proxy, build, dialled, passive, running, until

OPTIONS = TransportOptions(dial_timeout_s=0.5, backoff_max_s=0.2, heartbeat_s=0.5)

# RFC 9113: frame types, and the setting that lets a peer send nothing at all.
DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4


def http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field that refers to no table (RFC 7541, section 6.2.2)."""
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


def stream_without_a_window(first: pb.Envelope) -> bytes:
    """Return what opens a stream, says something, and allows not one byte to come back."""
    path = b"/sottovoce.v1.Peer/Exchange"
    headers = bytes((0x83, 0x86)) + bytes((0x04, len(path))) + path
    for name, value in ((b":authority", b"ada"), (b"content-type", b"application/grpc"), (b"te", b"trailers")):
        headers += literal(name, value)
    message = first.SerializeToString()
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + http2_frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
        + http2_frame(HEADERS, END_HEADERS, 1, headers)
        + http2_frame(DATA, 0, 1, struct.pack(">BI", 0, len(message)) + message)
    )


def test_callers_that_take_no_answer_leave_their_places_to_others() -> None:
    async def story() -> None:
        listener = build(0, Mind(), [passive(1), passive(2)], options=OPTIONS, security=None)
        async with running(listener):
            callers = []
            try:
                for _ in range(32):  # As many greetings as one address may have at a time.
                    caller = socket.create_connection(("127.0.0.1", listener.port or 0))
                    caller.sendall(stream_without_a_window(pb.Envelope(hello=hello())))
                    callers.append(caller)
                await asyncio.sleep(2)
                honest = build(2, Mind(), [dialled(0, listener.port)], listen=None, options=OPTIONS, security=None)
                async with running(honest):
                    await until(lambda: honest.is_up(0), within_s=15)
            finally:
                for caller in callers:
                    caller.close()

    asyncio.run(story())


def test_a_link_is_dialled_anew_although_its_last_words_cannot_be_sent() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        listener = build(0, ada, [passive(1)], options=OPTIONS)
        async with running(listener), Proxy(listener.port or 0) as proxy:
            dialler = build(1, ben, [dialled(0, proxy.port)], listen=None, options=OPTIONS)
            async with running(dialler):
                await until(lambda: listener.is_up(1) and dialler.is_up(0))
                proxy.flowing.clear()
                ben.send(0, bytes(30_000_000))
                await until(lambda: "nothing was heard" in dialler.problems.get(0, ""))
                await until(lambda: proxy.connections == 2, within_s=10)
                proxy.cut()
                proxy.flowing.set()
                await until(lambda: listener.is_up(1) and dialler.is_up(0))

    asyncio.run(story())
