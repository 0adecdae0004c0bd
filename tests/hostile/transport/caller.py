"""A caller that says whatever a test makes it say."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from peer.net.hello import PROTOCOL_MAX, PROTOCOL_MIN
from peer.net.rpc import Channel
from peer.net.security.credentials import Credentials
from peer.net.services import PEER_SERVICE
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from tests.net.transport_peers import NAMES, credentials

GENEROUS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def hello(**changes: Any) -> pb.Hello:
    """Return the hello of ben (peer 1) to ada, with changes."""
    fields: dict[str, Any] = {
        "protocol_min": PROTOCOL_MIN,
        "protocol_max": PROTOCOL_MAX,
        "run": "tests",
        "algorithm": "sgp",
        "run_digest": "1" * 64,
        "model_digest": "2" * 64,
        "graph_digest": "3" * 64,
        "num_peers": 4,
        "index": 1,
        "name": NAMES[1],
        "nonce": 12345,
        "window_bytes": 1 << 20,
        "chunk_bytes": 1 << 16,
        "heartbeat_ms": 10_000,
    }
    return pb.Hello(**(fields | changes))


class BareStream:
    """One stream to the listener of a peer, with nothing between the caller and the bytes."""

    def __init__(self, port: int | None, name: str, security: Credentials | None) -> None:
        channel = Channel(f"127.0.0.1:{port}", name, security, GENEROUS)
        self._stream = channel.stream(PEER_SERVICE, "Exchange")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stream.abandon()

    async def send(self, data: bytes | pb.Envelope) -> None:
        await self._stream.write(data if isinstance(data, bytes) else data.SerializeToString())

    async def next(self) -> pb.Envelope | None:
        """Return the next envelope, or None at the end of the stream."""
        data = await self._stream.read()
        return None if data is None else pb.Envelope.FromString(data)


class Caller(BareStream):
    """A stream of the tests, which wait for no answer for long."""

    def __init__(self, port: int | None, security: Credentials | str | None = "own") -> None:
        super().__init__(port, NAMES[0], credentials(NAMES[1]) if isinstance(security, str) else security)

    async def done(self) -> None:
        await self._stream.done_writing()

    async def greet(self, **changes: Any) -> pb.Hello:
        """Say hello properly and return the answer."""
        await self.send(pb.Envelope(hello=hello(**changes)))
        answer = await self.next()
        assert answer is not None
        assert answer.HasField("hello")
        return answer.hello

    async def next(self) -> pb.Envelope | None:
        async with asyncio.timeout(20):
            return await super().next()

    async def verdict(self) -> pb.Close:
        """Return with which words the listener ends the stream."""
        while (envelope := await self.next()) is not None:
            if envelope.HasField("close"):
                await self.done()
                assert await self.next() is None, "a farewell is the last thing said"
                return envelope.close
        raise AssertionError("it ended without a word")


def chunk(sequence: int = 1, data: bytes = b"data", offset: int = 0, frame_bytes: int = 0) -> pb.Envelope:
    """Return an envelope with one chunk."""
    return pb.Envelope(chunks=[pb.Chunk(sequence=sequence, data=data, offset=offset, frame_bytes=frame_bytes)])
