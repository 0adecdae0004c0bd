"""Whatever a neighbour sends on a stream, the daemon says what is wrong, drops it, and serves others and it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from peer.config.options import TransportOptions
from peer.net.handler import MAX_BULLETIN_BYTES
from peer.net.rpc import StreamLost
from peer.net.security.authority import CertificateAuthority
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from tests.hostile.transport.caller import Caller, chunk, hello
from tests.net.transport_peers import Mind, build, dialled, hello_of, passive, running, until

KB = 1024
OPTIONS = TransportOptions(chunk_kbytes=16, window_kbytes=64, max_message_mbytes=1, dial_timeout_s=5)


async def unharmed(port: int | None, mind: Mind) -> None:
    """Check that a well-behaved neighbour is still served."""
    before = len(mind.frames)
    other = Mind()
    dialler = build(2, other, [dialled(0, port)], listen=None, options=OPTIONS)
    async with running(dialler):
        other.send(0, b"a frame of an honest peer")
        await until(lambda: len(mind.frames) > before)
        assert mind.frames[-1] == (2, b"a frame of an honest peer")


def tell(lie: Callable[[Caller], Awaitable[None]], words: str, *, frames: list[bytes] | None = None) -> None:
    """Have a caller greet properly, then lie; check its sentence, what was delivered, and that life goes on."""

    async def story() -> None:
        ada = Mind()
        ada.acknowledges = False
        listener = build(0, ada, [passive(1), passive(2)], options=OPTIONS)
        async with running(listener):
            async with Caller(listener.port) as caller:
                await caller.greet()
                # Read beside the lie: a write that fails because the link has ended takes along what is unread.
                reading = asyncio.create_task(caller.verdict())
                with contextlib.suppress(StreamLost):
                    await lie(caller)
                verdict = await reading
                assert verdict.kind == pb.Close.VIOLATION
                assert words in verdict.reason
            await until(lambda: not listener.is_up(1))
            assert [frame for _, frame in ada.frames] == (frames or [])
            assert ada.events[-1] == ("down", 1, verdict.reason)
            await unharmed(listener.port, ada)

    asyncio.run(story())


def test_a_frame_announced_larger_than_allowed_is_refused_before_anything_is_kept() -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(chunk(data=b"x", frame_bytes=1024**2 + 1))

    tell(lie, "announced a frame of 1048577 bytes; at most 1048576")


def test_the_bound_of_the_run_counts_where_it_is_lower() -> None:
    async def story() -> None:
        ada = Mind()
        listener = build(0, ada, [passive(1)], hello=hello_of(0, max_frame_bytes=1000))
        async with running(listener), Caller(listener.port) as caller:
            await caller.greet()
            await caller.send(chunk(data=bytes(1000)))
            await caller.send(chunk(sequence=2, data=bytes(1001)))
            assert "at most 1000 are possible in this run" in (await caller.verdict()).reason
            assert ada.frames == [(1, bytes(1000))]

    asyncio.run(story())


def test_chunks_beyond_the_agreed_size_are_refused() -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(chunk(data=bytes(16 * KB + 1)))

    tell(lie, "more than 16384 bytes of chunks in one envelope")


def test_many_chunks_in_an_envelope_share_the_limit() -> None:
    async def lie(caller: Caller) -> None:
        each = [pb.Chunk(sequence=number, data=bytes(6 * KB)) for number in (1, 2, 3)]
        await caller.send(pb.Envelope(chunks=each))

    tell(lie, "more than 16384 bytes of chunks in one envelope")


@pytest.mark.parametrize("offset", [1, 5, 99, 2**63])
def test_a_frame_that_does_not_begin_at_its_beginning(offset: int) -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(chunk(data=b"data", offset=offset, frame_bytes=100))

    tell(lie, f"begins frame 1 at byte {offset}")


@pytest.mark.parametrize(
    "second",
    [
        {"offset": 3},
        {"offset": 5},
        {"offset": 0},
        {"frame_bytes": 11},
        {"frame_bytes": 0},
        {"sequence": 2},
        {"sequence": 0},
    ],
    ids=str,
)
def test_a_second_chunk_that_does_not_follow_the_first(second: dict[str, Any]) -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(chunk(data=b"data", frame_bytes=10))
        await caller.send(chunk(**({"sequence": 1, "data": b"dat", "offset": 4, "frame_bytes": 10} | second)))

    tell(lie, "are next")


def test_more_data_than_announced() -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(chunk(data=b"data", frame_bytes=10))
        await caller.send(chunk(data=b"more data", offset=4, frame_bytes=10))

    tell(lie, "sent 13 bytes of frame 1, which has 10")


def test_an_empty_chunk() -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(chunk(data=b""))

    tell(lie, "an empty chunk of frame 1")


@pytest.mark.parametrize("first", [2, 2**64 - 1])
def test_a_first_frame_with_a_wrong_number(first: int) -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(chunk(sequence=first))

    tell(lie, f"begins with frame {first}, where 1 is next")


@pytest.mark.parametrize("second", [1, 3])
def test_a_gap_or_a_step_back_in_the_numbers(second: int) -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(chunk(sequence=1))
        await caller.send(chunk(sequence=second))

    tell(lie, f"sent frame {second} after frame 1", frames=[b"data"])


def test_more_than_was_granted() -> None:
    async def story() -> None:
        ada = Mind()
        ada.takes_at_once = False
        listener = build(0, ada, [passive(1), passive(2)], options=OPTIONS)
        async with running(listener):
            async with Caller(listener.port) as caller:
                granted = (await caller.greet()).window_bytes
                assert granted == 64 * KB
                for number in range(1, 20):
                    await caller.send(chunk(sequence=number, data=bytes(16 * KB)))
                assert "more than it had credit for" in (await caller.verdict()).reason
            # The first window, and what was given back until a window of frames was held.
            assert len(ada.frames) <= 8
            ada.takes_at_once = True
            await unharmed(listener.port, ada)

    asyncio.run(story())


def test_a_flood_of_tiny_frames_spends_credit_too() -> None:
    async def story() -> None:
        ada = Mind()
        ada.takes_at_once = False
        listener = build(0, ada, [passive(1)], options=OPTIONS)
        async with running(listener), Caller(listener.port) as caller:
            await caller.greet()
            each = [pb.Chunk(sequence=number, data=b"x") for number in range(1, 200_001)]
            await caller.send(pb.Envelope(chunks=each[:6_000]))
            assert "more than it had credit for" in (await caller.verdict()).reason
            assert not ada.frames

    asyncio.run(story())


def test_a_second_hello() -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(pb.Envelope(hello=hello()))

    tell(lie, "a second hello")


def test_a_receipt_for_frames_that_were_never_sent() -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(pb.Envelope(receipt=7))

    tell(lie, "acknowledges frame 7, but we have sent 0")


def test_absurd_credit() -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(pb.Envelope(credit=2**63))

    tell(lie, "granted credit")


def test_a_note_that_is_too_large() -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(pb.Envelope(bulletins=[pb.Bulletin(topic="t", data=bytes(MAX_BULLETIN_BYTES + 1))]))

    tell(lie, "a note of 65537 bytes")


def test_a_note_with_an_endless_topic() -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(pb.Envelope(bulletins=[pb.Bulletin(topic="t" * 65)]))

    tell(lie, "a note of 0 bytes")


@pytest.mark.parametrize("size", [1, 100, 50_000])
def test_bytes_that_are_no_envelope(size: int) -> None:
    async def lie(caller: Caller) -> None:
        await caller.send(b"\xff" * size)

    tell(lie, f"{size} bytes that are no envelope")


def test_an_envelope_beyond_all_limits_ends_the_stream_and_nothing_else() -> None:
    async def story() -> None:
        ada = Mind()
        listener = build(0, ada, [passive(1), passive(2)], options=OPTIONS)
        async with running(listener):
            async with Caller(listener.port) as caller:
                await caller.greet()
                await caller.send(chunk(data=bytes(4 * 1024**2)))
                await until(lambda: not listener.is_up(1))
            await unharmed(listener.port, ada)

    asyncio.run(story())


def test_a_stream_that_breaks_off_in_a_frame_delivers_nothing_of_it() -> None:
    async def story() -> None:
        ada = Mind()
        listener = build(0, ada, [passive(1), passive(2)], options=OPTIONS)
        async with running(listener):
            for ends_politely in (True, False):
                async with Caller(listener.port) as caller:
                    await caller.greet()
                    await caller.send(chunk(data=b"half", frame_bytes=8))
                    if ends_politely:
                        await caller.done()
                        assert await caller.next() is None
                await until(lambda: not listener.is_up(1))
            assert not ada.frames
            await unharmed(listener.port, ada)

    asyncio.run(story())


def test_an_error_that_the_daemon_finds_in_a_frame_reaches_its_sender() -> None:
    from peer.errors import FrameError

    class Strict(Mind):
        def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
            if frame == b"nonsense":
                raise FrameError("its checksum is wrong")
            return super().frame_received(peer, seq, frame)

    async def story() -> None:
        ada = Strict()
        listener = build(0, ada, [passive(1), passive(2)], options=OPTIONS)
        async with running(listener):
            async with Caller(listener.port) as caller:
                await caller.greet()
                await caller.send(chunk(data=b"nonsense"))
                assert (await caller.verdict()).reason == "its checksum is wrong"
            await unharmed(listener.port, ada)

    asyncio.run(story())


def test_frames_outside_the_sequence_are_under_credit_too() -> None:
    """Nobody can fill the memory with requests while the worker computes."""

    async def story() -> None:
        ada = Mind()
        ada.takes_at_once = False
        listener = build(0, ada, [passive(1)], options=OPTIONS)
        async with running(listener), Caller(listener.port) as caller:
            await caller.greet()
            for _ in range(3):
                await caller.send(chunk(sequence=0, data=bytes(16 * KB)))
            await until(lambda: len(ada.requests) == 3)
            listener.taken(1, 0)
            for _ in range(20):
                await caller.send(chunk(sequence=0, data=bytes(16 * KB)))
            assert "more than it had credit for" in (await caller.verdict()).reason
            # No credit comes back while a whole window waits; so two windows are the most, and what was taken.
            assert len(ada.requests) <= 2 * 64 // 16 + 1

    asyncio.run(story())


@pytest.mark.usefixtures("no_allowance_grows")
def test_a_flood_of_empty_envelopes_ends_the_link() -> None:
    async def lie(caller: Caller) -> None:
        for _ in range(1500):
            await caller.send(pb.Envelope())

    tell(lie, "it floods this peer: more than 500 messages")


@pytest.mark.usefixtures("no_allowance_grows")
def test_a_flood_of_notes_ends_the_link() -> None:
    async def lie(caller: Caller) -> None:
        note = pb.Envelope(bulletins=[pb.Bulletin(topic="evaluation", data=b"x" * (60 * KB))])
        for _ in range(30):
            await caller.send(note)

    tell(lie, "it floods this peer: more than 500 messages or kB a second beside frames")


def test_a_list_of_revoked_certificates_that_the_authority_did_not_sign_ends_the_link() -> None:
    elsewhere = CertificateAuthority.create("elsewhere")

    async def lie(caller: Caller) -> None:
        forged = elsewhere.revoke(b"", [1, 2, 3])
        await caller.send(pb.Envelope(bulletins=[pb.Bulletin(topic="revoked", data=forged)]))

    tell(
        lie, "it passed on an invalid revocation list: the list of revoked certificates is not signed by this run's CA"
    )
