"""All attacks, each a function that goes on until its time is over."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import time
from collections.abc import Awaitable, Callable

from peer.daemon.notes.notes import EVALUATION
from peer.errors import SottoError
from peer.net.control import call_control
from peer.net.outbox import REVOKED_TOPIC
from peer.net.rpc import Channel, DialledStream
from peer.net.security.authority import CertificateAuthority
from peer.net.security.certificates import Role
from peer.net.security.credentials import Credentials
from peer.net.services import RELAY_SERVICE
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.proto.sottovoce.v1 import note_pb2, relay_pb2
from tests.stress.attack.attacker import LOST, Attacker, Stream, again_and_again, as_member, as_whom
from tests.stress.attack.cluster import MALLORY, VICTIM


async def nothing(me: Attacker) -> None:
    """No attack: a process that computes, to tell what its processor time alone costs the peers."""
    while me.going:
        sum(range(10_000))
    me.attempts, me.reasons = 1, {"no attack, only as much processor time": 1}


async def other_cluster(me: Attacker) -> None:
    """A certificate of another cluster's CA."""
    elsewhere = CertificateAuthority.create("elsewhere")
    theirs = elsewhere.credentials(elsewhere.issue(f"peer-{MALLORY}"))
    mixed = Credentials(theirs.identity, me.authority().certificate, theirs.certificate, theirs.key)
    await as_whom(me, lambda: mixed)


async def expired(me: Attacker) -> None:
    """A certificate of this CA that expired."""
    authority = me.authority()
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=30)
    await as_whom(me, lambda: authority.credentials(authority.issue(f"peer-{MALLORY}", days=10, now=then)))


async def revoked(me: Attacker) -> None:
    """A certificate of this CA that was taken back."""
    pem, key = (me.kits / "revoked-peer.pem").read_bytes(), (me.kits / "revoked-peer.key").read_bytes()
    own = me.credentials()
    await as_whom(me, lambda: Credentials(own.identity, own.ca, pem, key))


async def operator(me: Attacker) -> None:
    """An operator's certificate in place of a peer's."""
    authority = me.authority()
    await as_whom(me, lambda: authority.credentials(authority.issue("operator", role=Role.OPERATOR)))


async def stranger(me: Attacker) -> None:
    """A certificate of this CA for a peer that is in nobody's list."""
    authority = me.authority()
    await as_whom(me, lambda: authority.credentials(authority.issue("eve")))


async def other_name(me: Attacker) -> None:
    """A member that says it is another member."""
    await as_whom(me, me.credentials, index=1, name="peer-1")


async def no_tls(me: Attacker) -> None:
    """A caller without TLS."""
    await as_whom(me, lambda: None)


async def connections(me: Attacker) -> None:
    """TCP connections that say nothing, as many as the system lets it open."""
    opened: list[socket.socket] = []
    while me.going:
        with contextlib.suppress(OSError):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", me.port))
            opened.append(each)
            me.attempts += 1
        if len(opened) >= 500:
            for each in opened:
                each.close()
            opened.clear()
        await asyncio.sleep(0.002)
    me.reasons["never heard: a bounded number at a time, 10 s each"] = me.attempts


async def handshakes(me: Attacker) -> None:
    """TLS handshakes of a stranger, one after the other, on four connections at a time."""
    elsewhere = CertificateAuthority.create("elsewhere")
    theirs = elsewhere.credentials(elsewhere.issue(f"peer-{MALLORY}"))
    mixed = Credentials(theirs.identity, me.authority().certificate, theirs.certificate, theirs.key)

    async def once() -> str:
        async with Stream(me.port, mixed) as stream:
            return await stream.verdict()

    await asyncio.gather(*(again_and_again(me, once, 0.0) for _ in range(4)))


async def hellos(me: Attacker) -> None:
    """A member that connects, says hello, and connects anew."""
    own = me.credentials()

    async def once() -> str:
        async with Stream(me.port, own) as stream:
            await stream.send(me.hello())
            answer = await stream.next()
            return "let in" if answer is not None and answer.HasField("hello") else str(answer and answer.close.reason)

    await again_and_again(me, once, 0.0)


async def envelopes(me: Attacker) -> None:
    """A member that floods with empty envelopes."""

    async def work(stream: Stream) -> None:
        while me.going:
            await stream.send(pb.Envelope())

    await as_member(me, work, 0.0)


async def notes(me: Attacker) -> None:
    """A member that floods with notes of 60 kB."""

    async def work(stream: Stream) -> None:
        note = pb.Envelope(bulletins=[pb.Bulletin(topic="evaluation", data=b"x" * 60_000)])
        while me.going:
            await stream.send(note)

    await as_member(me, work, 0.0)


async def empty_notes(me: Attacker) -> None:
    """A member that puts 2,000 empty notes, of a topic that nobody knows, into each envelope."""

    async def work(stream: Stream) -> None:
        flood = pb.Envelope(bulletins=[pb.Bulletin(topic="x")] * 2000).SerializeToString()
        while me.going:
            await stream.send(flood)

    await as_member(me, work, 0.0)


async def signed_notes(me: Attacker) -> None:
    """A member that floods with accuracies of its last round, each with a fresh signature of its own."""
    statements, rounds, total, made = me.statements(), me.config().run.rounds, me.fact("test_classes"), 0

    async def work(stream: Stream) -> None:
        nonlocal made
        while me.going:
            signed = []
            for _ in range(20):
                made += 1
                correct = [made % (each + 1) for each in total]
                note = note_pb2.EvaluationNote(peer=MALLORY, round=rounds, split="TEST", correct=correct, total=total)
                signed.append(statements.sign(EVALUATION, note.SerializeToString()))
            await stream.send(pb.Envelope(bulletins=[pb.Bulletin(topic=EVALUATION, data=each) for each in signed]))

    await as_member(me, work, 0.0)


async def revocations(me: Attacker) -> None:
    """A member that passes on the list of revoked certificates, which everybody has, again and again."""
    pem = (me.kits / "peer-0" / "revoked.pem").read_bytes()

    async def work(stream: Stream) -> None:
        flood = pb.Envelope(bulletins=[pb.Bulletin(topic=REVOKED_TOPIC, data=pem)] * 50).SerializeToString()
        while me.going:
            await stream.send(flood)

    await as_member(me, work, 0.0)


async def repair_requests(me: Attacker) -> None:
    """A member that asks for a replica 50 times in each envelope."""
    request = bytes.fromhex(me.fact("repair_request"))

    async def work(stream: Stream) -> None:
        chunk = pb.Chunk(sequence=0, data=request)
        flood = pb.Envelope(chunks=[chunk] * 50).SerializeToString()
        while me.going:
            await stream.send(flood)

    await as_member(me, work, 0.0)


async def repairs_anew(me: Attacker) -> None:
    """A member that connects, asks for a replica, and connects anew."""
    own, request = me.credentials(), bytes.fromhex(me.fact("repair_request"))

    async def once() -> str:
        async with Stream(me.port, own) as stream:
            try:
                await me.greeted(stream)
            except ConnectionError as error:
                return str(error)
            await stream.send(pb.Envelope(chunks=[pb.Chunk(sequence=0, data=request)]))
            while (envelope := await stream.next()) is not None:
                if envelope.HasField("close"):
                    return str(envelope.close.reason)
                if any(chunk.sequence == 0 for chunk in envelope.chunks):
                    return "it is answered"
        return "the stream ends"

    await again_and_again(me, once, 0.0)


async def crumbs(me: Attacker) -> None:
    """A member that sends the pieces of its frame one byte at a time, as fast as it can."""

    async def work(stream: Stream) -> None:
        at = 0
        while me.going and at < 20_000:
            await stream.send(pb.Envelope(chunks=[pb.Chunk(sequence=1, data=b"x", offset=at, frame_bytes=20_000)]))
            at += 1

    await as_member(me, work, 0.0)


async def status_calls(me: Attacker) -> None:
    """A member that asks for the status again and again, 8 calls at a time."""

    async def once() -> str:
        await call_control(
            f"127.0.0.1:{me.port}", "status", name=f"peer-{VICTIM}", security=me.credentials(), timeout_s=5.0
        )
        return "it is answered"

    async def caller() -> None:
        while me.going:
            try:
                me.note(await once())
            except SottoError as error:
                me.note(str(error)[-100:])

    await asyncio.gather(*(caller() for _ in range(8)))


async def relay_pieces(me: Attacker) -> None:
    """A member that waits for callers of the relay and floods with signs of life meanwhile."""
    own = me.credentials()

    async def once() -> str:
        channel = Channel(f"127.0.0.1:{me.port}", f"peer-{VICTIM}", own)
        stream = channel.stream(RELAY_SERVICE, "Accept")
        try:
            await stream.write(relay_pb2.Piece(sender=f"peer-{MALLORY}").SerializeToString())
            drain = asyncio.ensure_future(_read_all(stream))
            while me.going and not drain.done():
                await stream.write(b"")
            return "the stream ends" if drain.done() else "still open when the attack ended"
        finally:
            await stream.abandon()

    await again_and_again(me, once, 0.0)


async def _read_all(stream: DialledStream) -> None:
    with contextlib.suppress(*LOST):
        while await stream.read() is not None:
            pass


async def requests(me: Attacker) -> None:
    """A member that floods with frames outside the sequence, more than it has credit for."""

    async def work(stream: Stream) -> None:
        chunk = pb.Envelope(chunks=[pb.Chunk(sequence=0, data=os.urandom(60_000))])
        while me.going:
            await stream.send(chunk)

    await as_member(me, work, 0.0)


async def oversized_frame(me: Attacker) -> None:
    """A member that announces a frame of a terabyte."""

    async def work(stream: Stream) -> None:
        await stream.send(pb.Envelope(chunks=[pb.Chunk(sequence=1, data=b"x", frame_bytes=1 << 40)]))

    await as_member(me, work)


async def oversized_message(me: Attacker) -> None:
    """A member that sends one message of 64 MB."""

    async def work(stream: Stream) -> None:
        await stream.send(b"\0" * (64 << 20))

    await as_member(me, work)


async def malformed_message(me: Attacker) -> None:
    """A member that sends bytes that are no envelope."""

    async def work(stream: Stream) -> None:
        await stream.send(b"\xff" + os.urandom(5000))

    await as_member(me, work)


async def malformed_frame(me: Attacker) -> None:
    """A member whose frames are random bytes."""

    async def work(stream: Stream) -> None:
        await stream.send(pb.Envelope(chunks=[pb.Chunk(sequence=1, data=os.urandom(20_000))]))

    await as_member(me, work)


async def silent_tls(me: Attacker) -> None:
    """Callers with a good certificate that open streams and never say hello."""
    own = me.credentials()

    async def once() -> str:
        async with Stream(me.port, own) as stream:
            return await stream.verdict(max(0.1, me.until - time.monotonic()))

    await asyncio.gather(*(again_and_again(me, once) for _ in range(20)))


async def dripping_hello(me: Attacker) -> None:
    """TCP callers that send one byte of TLS a second."""

    async def once() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", me.port)
        try:
            for byte in b"\x16\x03\x01\x02\x00" + bytes(600):
                writer.write(bytes((byte,)))
                await writer.drain()
                if not me.going:
                    return "still open; cut 10 s after it was accepted"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        if not await reader.read(100):
                            return "the connection is cut"
        finally:
            writer.close()
        return "it may go on"

    await asyncio.gather(*(again_and_again(me, once, 0.05) for _ in range(40)))


async def dripping_frame(me: Attacker) -> None:
    """A member that sends its frame one byte at a time."""

    async def work(stream: Stream) -> None:
        for at in range(10_000):
            if not me.going:
                return
            await stream.send(pb.Envelope(chunks=[pb.Chunk(sequence=1, data=b"x", offset=at, frame_bytes=10_000)]))
            await asyncio.sleep(0.2)

    await as_member(me, work)


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    attack.__name__.replace("_", "-"): attack
    for attack in (
        nothing, other_cluster, expired, revoked, operator, stranger, other_name, no_tls,
        connections, handshakes, hellos, envelopes, notes, empty_notes, signed_notes, revocations,
        requests, repair_requests, repairs_anew, crumbs, status_calls, relay_pieces,
        oversized_frame, oversized_message, malformed_message, malformed_frame,
        silent_tls, dripping_hello, dripping_frame,
    )
}  # fmt: skip
