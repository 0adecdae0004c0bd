"""Which of two streams between the same peers stays: decided at each end alone, and the same at both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest

from peer.errors import HandshakeRefused, LocalProtocolError
from peer.net.handshake import OpenedStream
from peer.net.hello import Terms
from peer.net.inbox import LinkLimits
from peer.net.links import Links
from peer.net.tasks import Tasks
from peer.net.transport import Transport
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from tests.net.transport_peers import NAMES, Mind, passive

LIMITS = LinkLimits(window_bytes=64 * 1024, chunk_bytes=16 * 1024, max_frame_bytes=1024**2)


class Nowhere:
    """A stream that is never read or written here."""

    async def read(self) -> bytes | None:
        raise AssertionError

    async def write(self, data: bytes) -> None:
        raise AssertionError

    async def done_writing(self) -> None:
        raise AssertionError

    async def abandon(self) -> None:
        raise AssertionError


@dataclass
class Confirms(Nowhere):
    """A stream over which the other end confirms frames, and which it closes then."""

    upto: int

    async def read(self) -> bytes | None:
        upto, self.upto = self.upto, 0
        return pb.Envelope(receipt=upto).SerializeToString() if upto else None

    async def write(self, data: bytes) -> None:
        pass

    async def done_writing(self) -> None:
        pass

    async def abandon(self) -> None:
        pass


@dataclass
class End:
    """The links of one of two peers, and which stream it has in use."""

    me: int
    mind: Mind = field(default_factory=Mind)
    stream: str = ""

    def __post_init__(self) -> None:
        self.links = Links(
            me=self.me, limits=LIMITS, heartbeat_s=1.0, relayed=lambda _: None, handler=self.mind,
            revocations=lambda: b"", take_revocations=lambda _peer, _pem: None, tasks=Tasks(),
        )  # fmt: skip
        self.links.add(passive(1 - self.me))

    def offer(
        self, name: str, *, dialled: bool, nonce: int = 7, received: int = 0, stream: Nowhere | None = None
    ) -> bool:
        """Return whether a stream that another end accepted is put into use."""
        neighbor = self.links.neighbors[1 - self.me]
        terms = Terms(
            protocol=2, received=received, nonce=nonce, credit_bytes=64 * 1024, chunk_bytes=16 * 1024, heartbeat_s=1.0,
            seen_as="", software="sottovoce 0.1.0",
        )  # fmt: skip
        if not self.links.give_way(neighbor, terms, dialled=dialled):
            return False
        self.links.open(
            OpenedStream(
                neighbor=neighbor,
                stream=stream or Nowhere(),
                terms=terms,
                identity=None,
                dialled=dialled,
                received=0,
                socket=None,
            )
        )
        self.stream = name
        return True


@pytest.mark.parametrize("first_at_0", ["dialled by 0", "dialled by 1"])
@pytest.mark.parametrize("first_at_1", ["dialled by 0", "dialled by 1"])
def test_of_two_streams_that_cross_both_ends_keep_the_one_that_the_lower_index_dialled(
    first_at_0: str, first_at_1: str
) -> None:
    async def story() -> None:
        for end, first in ((End(0), first_at_0), (End(1), first_at_1)):
            for name in (first, "dialled by 1" if first == "dialled by 0" else "dialled by 0"):
                end.offer(name, dialled=name == f"dialled by {end.me}")
            assert end.stream == "dialled by 0"

    asyncio.run(story())


def test_a_newer_stream_in_the_same_direction_takes_over() -> None:
    async def story() -> None:
        end = End(0)
        assert end.offer("first", dialled=False)
        assert end.offer("second", dialled=False)
        assert [event[0] for event in end.mind.events] == ["up", "down", "up"]

    asyncio.run(story())


def test_a_process_whose_place_a_newer_one_took_does_not_come_back() -> None:
    async def story() -> None:
        end = End(1)
        assert end.offer("old process", dialled=False, nonce=1)
        assert end.offer("new process", dialled=False, nonce=2)
        with pytest.raises(HandshakeRefused, match=f"a newer process of '{NAMES[0]}' took the place of this one"):
            end.offer("old process again", dialled=True, nonce=1)
        assert end.stream == "new process"

    asyncio.run(story())


@pytest.mark.parametrize(("nonce", "up"), [(7, [1, 3]), (8, [1, 1])], ids=["same process", "another process"])
def test_a_hello_that_a_receipt_overtook_takes_nothing_back(nonce: int, up: list[int]) -> None:
    """A process loses no state while it runs, so its earlier word about it was not a lie. What another process says of
    the same state counts."""

    async def story() -> None:
        end = End(0)
        end.mind.transport = cast(Transport, end.links)  # It sends, and no more.
        for _ in range(3):
            end.mind.send(1, b"frame")
        end.offer("first", dialled=True, received=1, stream=Confirms(3))
        connection = end.links.connection(1)
        assert connection is not None
        await connection.run()
        assert end.links.connection(1) is None
        end.offer("second", dialled=False, nonce=nonce, received=1)
        assert [event[2] for event in end.mind.events if event[0] == "up"] == up
        assert end.links.offences.count(1) == (nonce != 7)

    asyncio.run(story())


def test_counters_go_on_over_connections_and_repeated_frames_are_counted() -> None:
    async def story() -> None:
        end = End(0)
        for _ in range(2):
            end.offer("a stream", dialled=True)
            for seq in (1, 2, 0):
                end.links.send(1, seq, b"frame")
        total = end.links.counters(1)
        assert (total.connections, total.reconnects, total.frames_resent) == (2, 1, 2)

    asyncio.run(story())


def test_a_peer_is_not_its_own_neighbour() -> None:
    with pytest.raises(LocalProtocolError):
        End(0).links.add(passive(0))
