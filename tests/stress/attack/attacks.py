"""All attacks, each a function that goes on until its time is over, in a table by name."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

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
from tests.hostile.transport.caller import chunk
from tests.stress.attack.attacker import LOST, Attacker, Stream, again_and_again, as_member
from tests.stress.attack.cluster import MALLORY, VICTIM

Attack: TypeAlias = Callable[[Attacker], Awaitable[None]]
_MY_NAME = f"peer-{MALLORY}"


async def nothing(me: Attacker) -> None:
    """No attack: a process that computes, to tell what its processor time alone costs the peers."""
    while me.going:
        sum(range(10_000))
    me.attempts, me.reasons = 1, {"no attack, only as much processor time": 1}


# -- whom the attacker says it is --------------------------------------------------------------------------------------


def calling(who: Callable[[Attacker], Credentials | None], **changes: Any) -> Attack:
    """Return an attack of callers with these credentials, whose hello has changes."""

    def attack(me: Attacker) -> Awaitable[None]:
        security = who(me)

        async def once() -> str:
            async with Stream(me.port, security) as stream:
                with contextlib.suppress(*LOST):
                    await stream.send(me.hello(**changes))
                return await stream.verdict()

        return again_and_again(me, once)

    return attack


def issued(name: str, **options: Any) -> Callable[[Attacker], Credentials]:
    """Return what gives a certificate of this CA."""

    def credentials(me: Attacker) -> Credentials:
        authority = me.authority()
        return authority.credentials(authority.issue(name, **options))

    return credentials


def of_another_ca(me: Attacker) -> Credentials:
    elsewhere = CertificateAuthority.create("elsewhere")
    theirs = elsewhere.credentials(elsewhere.issue(_MY_NAME))
    return Credentials(theirs.identity, me.authority().certificate, theirs.certificate, theirs.key)


def taken_back(me: Attacker) -> Credentials:
    pem, key = (me.kits / "revoked-peer.pem").read_bytes(), (me.kits / "revoked-peer.key").read_bytes()
    own = me.credentials()
    return Credentials(own.identity, own.ca, pem, key)


# -- callers -----------------------------------------------------------------------------------------------------------


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
    stranger = of_another_ca(me)

    async def once() -> str:
        async with Stream(me.port, stranger) as stream:
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


async def repairs_anew(me: Attacker) -> None:
    """A member that connects, asks for a replica, and connects anew."""
    own, request = me.credentials(), pb.Envelope(chunks=[repair_request(me)])

    async def once() -> str:
        async with Stream(me.port, own) as stream:
            try:
                await me.greeted(stream)
            except ConnectionError as error:
                return str(error)
            await stream.send(request)
            while (envelope := await stream.next()) is not None:
                if envelope.HasField("close"):
                    return str(envelope.close.reason)
                if any(chunk.sequence == 0 for chunk in envelope.chunks):
                    return "it is answered"
        return "the stream ends"

    await again_and_again(me, once, 0.0)


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


# -- members that say what makes no sense ------------------------------------------------------------------------------


def flooding(made: Callable[[Attacker], pb.Envelope]) -> Attack:
    """Return an attack of a member that says one thing, made once, as often as it can."""

    def attack(me: Attacker) -> Awaitable[None]:
        flood = made(me).SerializeToString()

        async def work(stream: Stream) -> None:
            while me.going:
                await stream.send(flood)

        return as_member(me, work, 0.0)

    return attack


def saying(made: Callable[[], pb.Envelope | bytes]) -> Attack:
    """Return an attack of a member that says one thing and waits for the answer."""
    return lambda me: as_member(me, lambda stream: stream.send(made()))


def crumbling(frame_bytes: int, pause_s: float) -> Attack:
    """Return an attack of a member that sends its frame one byte at a time."""

    def attack(me: Attacker) -> Awaitable[None]:
        async def work(stream: Stream) -> None:
            for at in range(frame_bytes):
                if not me.going:
                    return
                await stream.send(chunk(1, b"x", at, frame_bytes))
                if pause_s:
                    await asyncio.sleep(pause_s)

        return as_member(me, work, pause_s)

    return attack


def note(topic: str, data: bytes, times: int = 1) -> pb.Envelope:
    return pb.Envelope(bulletins=[pb.Bulletin(topic=topic, data=data)] * times)


def repair_request(me: Attacker) -> pb.Chunk:
    return pb.Chunk(sequence=0, data=bytes.fromhex(me.fact("repair_request")))


ATTACKS: dict[str, Attack] = {
    "nothing": nothing,
    "other-cluster": calling(of_another_ca),
    "expired": calling(
        issued(_MY_NAME, days=10, now=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=30))
    ),
    "revoked": calling(taken_back),
    "operator": calling(issued("operator", role=Role.OPERATOR)),
    # In nobody's list.
    "stranger": calling(issued("eve")),
    "other-name": calling(Attacker.credentials, index=1, name="peer-1"),
    "no-tls": calling(lambda me: None),
    "connections": connections,
    "handshakes": handshakes,
    "hellos": hellos,
    "envelopes": flooding(lambda me: pb.Envelope()),
    "notes": flooding(lambda me: note(EVALUATION, b"x" * 60_000)),
    # Of a topic that nobody knows.
    "empty-notes": flooding(lambda me: note("x", b"", 2000)),
    "signed-notes": signed_notes,
    # Of a list that everybody has.
    "revocations": flooding(lambda me: note(REVOKED_TOPIC, (me.kits / "peer-0" / "revoked.pem").read_bytes(), 50)),
    # Frames outside the sequence, more than it has credit for.
    "requests": flooding(lambda me: chunk(0, os.urandom(60_000))),
    "repair-requests": flooding(lambda me: pb.Envelope(chunks=[repair_request(me)] * 50)),
    "repairs-anew": repairs_anew,
    "crumbs": crumbling(20_000, 0.0),
    "status-calls": status_calls,
    "relay-pieces": relay_pieces,
    "oversized-frame": saying(lambda: chunk(1, b"x", frame_bytes=1 << 40)),
    "oversized-message": saying(lambda: bytes(64 << 20)),
    "malformed-message": saying(lambda: b"\xff" + os.urandom(5000)),
    "malformed-frame": saying(lambda: chunk(1, os.urandom(20_000))),
    "silent-tls": silent_tls,
    "dripping-hello": dripping_hello,
    "dripping-frame": crumbling(10_000, 0.2),
}
