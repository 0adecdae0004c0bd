"""Callers that are not who they should be, or that never say who they are, get a sentence and cost nothing."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from peer.config.options import TransportOptions, load
from peer.errors import PeerUnreachable
from peer.net.control import call_control
from peer.net.hello import PROTOCOL_MAX, PROTOCOL_MIN
from peer.net.rpc import StreamLost
from peer.net.security.authority import CertificateAuthority, Issued
from peer.net.security.credentials import Credentials, load_credentials
from peer.net.services import OWN_SOCKET
from peer.net.transport import Transport
from peer.ops import control
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from tests.hostile.transport.caller import Caller, chunk, hello
from tests.net.transport_peers import (
    NAMES,
    Mind,
    authority,
    build,
    credentials,
    dialled,
    hello_of,
    passive,
    running,
    until,
)


def listen(mind: Mind, **options: Any) -> Transport:
    return build(0, mind, [passive(1), passive(2)], options=TransportOptions(**({"dial_timeout_s": 1} | options)))


async def unharmed(listener: Transport) -> None:
    """Check that an honest peer gets a link."""
    options = TransportOptions(dial_timeout_s=5, backoff_max_s=0.3)
    dialler = build(2, Mind(), [dialled(0, listener.port)], listen=None, options=options)
    async with running(dialler):
        await until(lambda: dialler.is_up(0) and listener.is_up(2))


@pytest.mark.parametrize(
    "first",
    [
        chunk(),
        pb.Envelope(),
        pb.Envelope(receipt=1),
        pb.Envelope(hello=hello(), receipt=1),
        pb.Envelope(hello=hello(), chunks=chunk().chunks),
        pb.Envelope(close=pb.Close(kind=pb.Close.GOODBYE)),
        b"\xff\xff\xff",
        b"\x0a\xff\xff\xff\xff\x0f",
    ],
    ids=["frame", "heartbeat", "receipt", "hello+receipt", "hello+frame", "close", "garbage", "truncated"],
)
def test_the_first_envelope_must_be_a_hello_and_nothing_else(first: pb.Envelope | bytes) -> None:
    async def story() -> None:
        ada = Mind()
        listener = listen(ada)
        async with running(listener):
            async with Caller(listener.port) as caller:
                await caller.send(first)
                verdict = await caller.verdict()
                assert verdict.kind == pb.Close.VIOLATION
                assert "not a hello" in verdict.reason or "no envelope" in verdict.reason
            assert not ada.frames
            assert not ada.events
            await unharmed(listener)

    asyncio.run(story())


OTHER: dict[str, Any] = {"run_digest": "f" * 64}
HELLOS: list[tuple[dict[str, Any], str]] = [
    ({"run": "another"}, "'ben' is in run 'another', we are in 'tests'"),
    ({"algorithm": "moniqua"}, "trains with algorithm 'moniqua', we train with 'sgp'"),
    ({"model_digest": "f" * 64}, "the initial model of 'ben' differs from ours; compare the task's code"),
    ({"graph_digest": "f" * 64}, "the graph of 'ben' differs from ours; compare [graph]"),
    ({"run_digest": "f" * 64}, "the configuration of 'ben' differs from ours; compare sections outside [peer]"),
    (
        {**OTHER, "settings": {"run.seed": "7", "\x1b[2J": "'\n"}},
        r"""ours: \x1b[2J is '\n there and not set here, run.seed is 7 there and not set here; compare""",
    ),
    ({**OTHER, "settings": {f"a.{n}": "x" * 300 for n in range(999)}}, "xx… there and not set here, and 61 more"),
    ({**OTHER, "settings": {"run.seed": "7"}, "protocol_max": 4}, "of 'ben' differs from ours; compare sections"),
    ({"num_peers": 5}, "'ben' has 5 peers in its list, we have 4"),
    ({"protocol_min": 6, "protocol_max": 7}, "'ben' speaks versions 6 to 7 of the protocol"),
    # Its notes were JSON.
    ({"protocol_min": 2, "protocol_max": 2}, "'ben' speaks version 2 of the protocol"),
    ({"protocol_min": 0, "protocol_max": 0}, "speaks version 0 of the protocol"),
    ({"index": 2}, "it says it is peer 2, 'ben', but peer 2, 'cleo', is expected here"),
    ({"index": 2, "name": "cleo"}, "its certificate is made out to 'ben'"),
    ({"name": "cleo"}, "it calls itself 'cleo', but its certificate is made out to 'ben'"),
    ({"receiver": 7}, "this is peer 0, 'ada', not 7; if it lasts, compare the lists of peers"),
    ({"index": 0}, "is no neighbour"),
    ({"index": 77}, "peer 77, 'ben', is no neighbour of peer 0, 'ada'"),
    ({"run": "x" * 257}, "a run of 257 characters"),
    ({"window_bytes": 0}, "accepts a window of 0 bytes"),
    ({"chunk_bytes": 0}, "and chunks of 0"),
    ({"heartbeat_ms": 0}, "announces a heartbeat every 0 ms"),
    ({"heartbeat_ms": 2**32 - 1}, "announces a heartbeat every 4294967295 ms"),
    ({"received": 2**63}, "claims to have 9223372036854775808 of our frames"),
]


@pytest.mark.parametrize(("changes", "words"), HELLOS, ids=[str(index) for index in range(len(HELLOS))])
def test_a_hello_that_does_not_match_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    async def story() -> None:
        listener = listen(Mind())
        async with running(listener):
            async with Caller(listener.port) as caller:
                await caller.send(pb.Envelope(hello=hello(**changes)))
                verdict = await caller.verdict()
                assert verdict.kind == pb.Close.REFUSED
                assert words in verdict.reason
            assert not listener.is_up(1)
            await unharmed(listener)

    asyncio.run(story())


def test_a_peer_that_speaks_later_versions_too_is_welcome() -> None:
    async def story() -> None:
        listener = listen(Mind())
        async with running(listener), Caller(listener.port) as caller:
            answer = await caller.greet(protocol_min=1, protocol_max=9)
            assert (answer.protocol_min, answer.protocol_max) == (PROTOCOL_MIN, PROTOCOL_MAX)
            await until(lambda: listener.is_up(1))

    asyncio.run(story())


def test_texts_of_a_stranger_cannot_forge_log_lines() -> None:
    async def story() -> None:
        ada = Mind()
        listener = listen(ada)
        async with running(listener), Caller(listener.port) as caller:
            await caller.send(pb.Envelope(hello=hello(algorithm="sgp\nERROR all is lost\x1b[2J")))
            verdict = await caller.verdict()
            assert "\n" not in verdict.reason
            assert "\x1b" not in verdict.reason
            assert "\n" not in listener.refusals[1]

    asyncio.run(story())


def test_a_certificate_of_another_authority_is_worth_nothing() -> None:
    async def story() -> None:
        elsewhere = CertificateAuthority.create("elsewhere")
        theirs = elsewhere.credentials(elsewhere.issue(NAMES[1]))
        # It knows our authority, and so trusts us; but we do not know its own.
        theirs = type(theirs)(theirs.identity, credentials(NAMES[1]).ca, theirs.certificate, theirs.key)
        listener = listen(Mind())
        async with running(listener):
            with pytest.raises(StreamLost):
                async with Caller(listener.port, theirs) as caller:
                    await caller.greet()
            assert not listener.is_up(1)
            dialler = build(1, Mind(), [dialled(0, listener.port)], listen=None, security=theirs)
            async with running(dialler):
                await until(lambda: 0 in dialler.problems)
                assert "it may not accept our certificate" in dialler.problems[0]
            await unharmed(listener)

    asyncio.run(story())


def test_a_listener_of_another_authority_is_not_believed() -> None:
    async def story() -> None:
        elsewhere = CertificateAuthority.create("elsewhere")
        listener = build(0, Mind(), [passive(1)], security=elsewhere.credentials(elsewhere.issue(NAMES[0])))
        async with running(listener):
            dialler = build(1, Mind(), [dialled(0, listener.port)], listen=None)
            async with running(dialler):
                await until(lambda: 0 in dialler.problems)
                assert "certificate that this run's CA did not sign" in dialler.problems[0]

    asyncio.run(story())


def test_a_listener_that_is_another_peer_refuses_the_dialler() -> None:
    async def story() -> None:
        # Without TLS only the hello can tell: "cleo" answers where "ada" was expected.
        listener = build(2, Mind(), [passive(1)], security=None)
        async with running(listener):
            dialler = build(1, Mind(), [dialled(0, listener.port)], listen=None, security=None)
            async with running(dialler):
                await until(lambda: 0 in dialler.refusals)
                assert "this is peer 2, 'cleo', not 0" in dialler.refusals[0]
                assert not listener.is_up(1)

    asyncio.run(story())


def test_a_caller_without_tls_gets_nowhere() -> None:
    async def story() -> None:
        listener = listen(Mind())
        async with running(listener):
            with pytest.raises(StreamLost):
                async with Caller(listener.port, None) as caller:
                    await caller.greet()
            await unharmed(listener)

    asyncio.run(story())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_a_handshake_takes_tls_1_2_and_a_certificate_that_is_valid(tmp_path: Path) -> None:
    async def story() -> None:
        listener = listen(Mind())
        issued = authority().issue(NAMES[1])
        expired = authority().issue(NAMES[1], days=1, now=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))

        def shakes_hands(version: ssl.TLSVersion, own: Issued | None) -> bool:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            # OpenSSL itself would leave out what is old.
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.set_alpn_protocols(["h2"])
            context.minimum_version = context.maximum_version = version
            if own is not None:
                (tmp_path / "own.pem").write_bytes(own.certificate + own.key)
                context.load_cert_chain(tmp_path / "own.pem")
            address = ("127.0.0.1", listener.port or 0)
            try:
                with socket.create_connection(address, 30) as plain, context.wrap_socket(plain) as encrypted:
                    return encrypted.version() is not None
            except (ssl.SSLError, ConnectionError):
                return False

        async with running(listener):
            told = {
                case: await asyncio.to_thread(shakes_hands, version, own)
                for case, version, own in (
                    ("1.2", ssl.TLSVersion.TLSv1_2, issued),
                    ("1.1", ssl.TLSVersion.TLSv1_1, issued),
                    ("no certificate", ssl.TLSVersion.TLSv1_2, None),
                    ("an expired one", ssl.TLSVersion.TLSv1_2, expired),
                )
            }
            assert [case for case, is_let_in in told.items() if is_let_in] == ["1.2"]
            await unharmed(listener)

    asyncio.run(story())


@pytest.mark.parametrize("encrypted", [True, False], ids=["mtls", "insecure"])
def test_garbage_on_the_port_harms_nobody(encrypted: bool) -> None:
    async def story() -> None:
        security = "own" if encrypted else None
        listener = build(0, Mind(), [passive(2)], options=TransportOptions(dial_timeout_s=1), security=security)
        async with running(listener):
            for data in (b"", b"\0" * 70_000, os.urandom(70_000), b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n"):
                with socket.create_connection(("127.0.0.1", listener.port or 0)) as stranger:
                    try:
                        stranger.sendall(data)
                    except OSError:
                        continue
                await asyncio.sleep(0.01)
            options = TransportOptions(backoff_max_s=0.3)
            dialler = build(2, Mind(), [dialled(0, listener.port)], listen=None, options=options, security=security)
            async with running(dialler):
                await until(lambda: dialler.is_up(0))

    asyncio.run(story())


def test_a_flood_of_silent_connections_does_not_shut_the_others_out_for_long() -> None:
    async def story() -> None:
        ada = Mind()
        listener = listen(ada)
        async with running(listener):
            flood = []
            try:
                for _ in range(400):
                    connection = socket.socket()
                    connection.setblocking(False)
                    connection.connect_ex(("127.0.0.1", listener.port or 0))
                    flood.append(connection)
                    await asyncio.sleep(0)
                await unharmed(listener)
            finally:
                for connection in flood:
                    connection.close()

    asyncio.run(story())


def test_a_flood_does_not_touch_links_that_are_up() -> None:
    async def story() -> None:
        ada, cleo = Mind(), Mind()
        listener = listen(ada)
        async with running(listener):
            dialler = build(2, cleo, [dialled(0, listener.port)], listen=None)
            async with running(dialler):
                await until(lambda: dialler.is_up(0))
                flood = [socket.create_connection(("127.0.0.1", listener.port or 0)) for _ in range(150)]
                try:
                    for number in range(20):
                        cleo.send(0, b"%d" % number)
                    await until(lambda: len(ada.frames) == 20)
                    assert len(cleo.events) == 1
                finally:
                    for connection in flood:
                        connection.close()

    asyncio.run(story())


def test_strangers_that_take_all_connections_do_not_keep_this_machine_from_asking(tmp_path: Path) -> None:
    """An operator on the device and the container's health check ask by a socket in the state folder."""
    settings = {"run.rounds": "10", "run.name": "tests"}
    config = load(environment={}, overrides=[f"{key}={value}" for key, value in settings.items()])
    (file, _) = write_cluster(tmp_path, config, [Host("127.0.0.1", port) for port in free_ports(2)])
    config, base = load(file, environment={}), file.parent
    (base / "state").mkdir(mode=0o700)
    security = load_credentials(config.security, base, "peer-0")
    assert isinstance(security, Credentials)
    named = Mind()

    async def story() -> None:
        listener = build(
            0, named, [], listen=config.peer.listen, security=security, hello=hello_of(0, name="peer-0"),
            options=TransportOptions(dial_timeout_s=60), own_socket=base / "state" / OWN_SOCKET,
        )  # fmt: skip
        named.name = "peer-0"
        async with running(listener):
            flood = [socket.create_connection(("127.0.0.1", listener.port or 0)) for _ in range(700)]
            try:
                address = f"127.0.0.1:{listener.port}"
                with pytest.raises(PeerUnreachable):
                    await call_control(address, "status", name="peer-0", security=security, timeout_s=3)
                assert (await control.ask(config, base, None, "status"))["name"] == "peer-0"
            finally:
                for connection in flood:
                    connection.close()
        # The socket of a process that is gone is no way to ask the next one.
        later = build(0, named, [], listen=config.peer.listen, security=security, hello=hello_of(0, name="peer-0"))
        named.name = "peer-0"
        async with running(later):
            assert (await control.ask(config, base, None, "status"))["name"] == "peer-0"

    asyncio.run(story())


def test_a_caller_that_never_says_hello_is_sent_away() -> None:
    async def story() -> None:
        listener = listen(Mind(), dial_timeout_s=0.3)
        async with running(listener):
            async with Caller(listener.port) as caller:
                verdict = await caller.verdict()
                assert verdict.kind == pb.Close.REFUSED
                assert "no hello came within 0.3 s" in verdict.reason
            await unharmed(listener)

    asyncio.run(story())


def test_callers_that_never_say_hello_are_capped() -> None:
    async def story() -> None:
        listener = listen(Mind(), dial_timeout_s=1)
        async with running(listener):
            callers = [Caller(listener.port) for _ in range(64 + 8)]
            try:
                verdicts = await asyncio.gather(*(caller.verdict() for caller in callers), return_exceptions=True)
                reasons = [each.reason for each in verdicts if isinstance(each, pb.Close)]
                assert set(reasons) <= {"no hello came within 1 s", "too many connections wait for their hello"}
                assert reasons.count("no hello came within 1 s") <= 64
            finally:
                for caller in callers:
                    await caller.__aexit__(None, None, None)
            await unharmed(listener)

    asyncio.run(story())


def test_callers_of_one_name_are_capped_so_that_they_leave_room_for_the_others() -> None:
    async def story() -> None:
        listener = listen(Mind(), dial_timeout_s=60)
        async with running(listener):
            callers = [Caller(listener.port) for _ in range(8)]
            verdicts = [asyncio.ensure_future(caller.verdict()) for caller in callers]
            try:
                for verdict in itertools.islice(asyncio.as_completed(verdicts), 4):
                    assert (await verdict).reason == "too many connections wait for their hello"
                # Four are waited for as long as the four are refused, so that all eight have come by now.
                assert sum(verdict.done() for verdict in verdicts) == 4
            finally:
                for verdict in verdicts:
                    verdict.cancel()
                for caller in callers:
                    await caller.__aexit__(None, None, None)

    asyncio.run(story())


@pytest.mark.usefixtures("no_allowance_grows")
def test_a_neighbour_that_connects_without_end_is_asked_to_wait() -> None:
    async def story() -> None:
        listener = listen(Mind())
        async with running(listener):
            for _ in range(60):
                async with Caller(listener.port) as caller:
                    await caller.greet()
            async with Caller(listener.port) as caller:
                await caller.send(pb.Envelope(hello=hello()))
                assert (await caller.verdict()).reason == "'ben' connects too often; try again later"
            await unharmed(listener)

    asyncio.run(story())


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        listener = listen(Mind())
        async with running(listener):
            for _ in range(50):
                async with Caller(listener.port, credentials("eve")) as caller:
                    verdict = await caller.verdict()
                    assert "'eve' is no neighbour of peer 0, 'ada'" in verdict.reason

    with caplog.at_level("INFO"):
        asyncio.run(story())
    assert sum("eve" in line for line in caplog.text.splitlines()) == 20


def test_another_hello_of_the_same_process_replaces_the_first_stream() -> None:
    async def story() -> None:
        ada = Mind()
        listener = listen(ada)
        async with running(listener), Caller(listener.port) as first, Caller(listener.port) as second:
            await first.greet()
            await first.send(chunk(sequence=1, data=b"one"))
            await until(lambda: ada.frames)
            await second.greet()
            assert (await first.verdict()).kind == pb.Close.SUPERSEDED
            await second.send(chunk(sequence=2, data=b"two"))
            await until(lambda: len(ada.frames) == 2)
            assert ada.frames == [(1, b"one"), (1, b"two")]

    asyncio.run(story())


def test_calls_that_do_not_exist_are_answered_so() -> None:
    async def story() -> None:
        listener = build(0, Mind(), [passive(1)], security=None)
        async with running(listener), grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
            for method in ("/sottovoce.v1.Control/Explode", "/other.Service/Method"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"")
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            for arguments in (b"[1]", b"{", b"[" * 60_000):
                request = b"\x0a" + _varint(len(arguments)) + arguments
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/sottovoce.v1.Control/Status")(request)
                assert caught.value.details() == "the arguments are not a JSON object"

    asyncio.run(story())


def test_a_refusal_reads_the_same_on_both_sides() -> None:
    async def story() -> None:
        listener = build(0, Mind(), [passive(1)], hello=hello_of(0, algorithm="quant-sgp"))
        async with running(listener), Caller(listener.port) as caller:
            await caller.send(pb.Envelope(hello=hello()))
            sentence = (await caller.verdict()).reason
            assert sentence == listener.refusals[1]
            assert "'sgp'" in sentence
            assert "'quant-sgp'" in sentence

    asyncio.run(story())


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes((number & 127 | 128,))
        number >>= 7
    return out + bytes((number,))
