"""Malformed certificates, requests and revocation lists: whatever the bytes are, the error is a SecurityError.

The library has errors of several unrelated kinds for them; one that escaped would end the peer that reads the bytes.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
from collections.abc import Callable, Iterator
from random import Random

import pytest

from peer.errors import SecurityError
from peer.net.rpc import Channel, ServedStream, Server, Status, StreamLost
from peer.net.security.certificates import Identity, Role, der, identify, is_signed_by, vouched_identity
from peer.net.security.credentials import Credentials
from peer.net.security.keys import key_pem
from peer.net.security.proofs import check_proof
from peer.net.security.requests import read_request, request_certificate
from peer.net.security.revocation_list import RevocationList
from peer.net.services import CONTROL_SERVICE, PEER_SERVICE
from peer.proto.sottovoce.v1 import control_pb2
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from tests.hostile.forged_certificates import (
    AUTHORITY,
    CERTIFICATES,
    KEY,
    REQUESTS,
    REVOCATIONS,
    armoured,
    certificate,
    request,
    revocations,
)
from tests.hostile.transport.caller import Caller, hello
from tests.net.transport_peers import QUICK, Mind, build, dialled, passive, running, until

# The library warns of what it will refuse one day.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ADA = AUTHORITY.issue("ada")
BEN = AUTHORITY.credentials(AUTHORITY.issue("ben"))
MUTANTS = 400
UNSIGNED = {"another algorithm inside", "an unknown algorithm inside"}
"""Whose signature cannot be the authority's: where that is for others to say, they are as good as any."""


def unarmoured(pem: bytes) -> bytes:
    return base64.b64decode(b"".join(line for line in pem.splitlines() if not line.startswith(b"-")))


def shown(certificate: bytes) -> None:
    check_proof(BEN, certificate, b"signature", bytes(16), prover="ada")


def introduced(certificate: bytes) -> None:
    vouched_identity(certificate, AUTHORITY.certificate)


def passed_through_tls(certificate: bytes) -> None:
    identify(armoured(certificate, "CERTIFICATE"))
    is_signed_by(armoured(certificate, "CERTIFICATE"), AUTHORITY.certificate)


def requested(content: bytes) -> None:
    read_request(armoured(content, "CERTIFICATE REQUEST"))


def revoked(content: bytes) -> None:
    RevocationList(AUTHORITY.certificate).take(armoured(content, "X509 CRL"))


CERTIFICATE = der(ADA.certificate)
REQUEST = unarmoured(request_certificate("gus", ["gus.example.org"])[0])
LISTED = unarmoured(AUTHORITY.revoke(b"", [ADA.identity.serial]))


def mutants(content: bytes, seed: int) -> Iterator[bytes]:
    """Yield the bytes with a few of them changed, and those with another version of the format."""
    random = Random(seed)
    for _ in range(MUTANTS):
        changed = bytearray(content)
        for _ in range(random.choice((1, 1, 2, 5))):
            changed[random.randrange(len(changed))] = random.randrange(256)
        yield bytes(changed)
    for number in range(3):
        yield content.replace(b"\x02\x01" + bytes((number,)), b"\x02\x01\x49", 1)
    yield b""
    yield content[: len(content) // 2]


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (shown, CERTIFICATE),
        (introduced, CERTIFICATE),
        (passed_through_tls, CERTIFICATE),
        (requested, REQUEST),
        (revoked, LISTED),
    ],
    ids=["proof", "introduction", "tls", "request", "revocations"],
)
def test_malformed_bytes_raise_security_errors_only(read: Callable[[bytes], None], content: bytes) -> None:
    refused = 0
    for mutant in mutants(content, seed=20):
        try:
            read(mutant)
        except SecurityError:
            refused += 1
    assert refused > MUTANTS // 4


def test_what_is_forged_below_differs_in_one_thing_from_what_counts() -> None:
    assert vouched_identity(certificate(), AUTHORITY.certificate).name == "ada"
    assert read_request(armoured(request(), "CERTIFICATE REQUEST")).name == "ada"
    assert RevocationList(AUTHORITY.certificate).take(armoured(revocations(), "X509 CRL"))


@pytest.mark.parametrize("forged", CERTIFICATES)
def test_a_certificate_of_no_run_is_refused_although_the_authority_signed_it(forged: str) -> None:
    content = CERTIFICATES[forged]
    for read in (shown, introduced):
        with pytest.raises(SecurityError):
            read(content)
    if forged not in UNSIGNED:
        with pytest.raises(SecurityError):
            passed_through_tls(content)


@pytest.mark.parametrize("forged", REQUESTS)
def test_a_request_that_no_device_makes_is_refused(forged: str) -> None:
    with pytest.raises(SecurityError) as refused:
        requested(REQUESTS[forged])
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("forged", REVOCATIONS)
def test_a_list_of_no_run_is_refused_although_the_authority_signed_it(forged: str) -> None:
    with pytest.raises(SecurityError):
        revoked(REVOCATIONS[forged])


def test_what_stands_beside_a_list_goes_no_further() -> None:
    listed = RevocationList(AUTHORITY.certificate)
    genuine = AUTHORITY.revoke(b"", [77])
    assert listed.take(b"\x1b[2J rubbish\n" + genuine + b"more rubbish\n")
    assert listed.pem == genuine


# Live, over TLS


def holding(content: bytes) -> Credentials:
    """Return what connects with a forged certificate."""
    now = datetime.datetime.now(datetime.UTC)
    said = Identity("ben", Role.PEER, "", 77, now, now)
    return Credentials(said, AUTHORITY.certificate, armoured(content, "CERTIFICATE"), key_pem(KEY))


def test_callers_with_forged_certificates_leave_a_listener_as_it_was() -> None:
    """TLS lets many of them through: it looks at signature and dates, and knows no roles."""

    async def attack(port: int | None, content: bytes) -> str:
        """Return the listener's verdict; "" if TLS gave it."""
        async with Caller(port, holding(content)) as caller:
            try:
                await caller.send(pb.Envelope(hello=hello()))
                verdict = await caller.verdict()
            except StreamLost:
                return ""
        assert verdict.kind == pb.Close.REFUSED
        return verdict.reason

    async def story() -> None:
        mind = Mind()
        listener = build(0, mind, [passive(1)], security=AUTHORITY.credentials(ADA))
        async with running(listener):
            reasons = [await attack(listener.port, each) for each in CERTIFICATES.values()]
            assert sum("not issued by `sotto`" in reason for reason in reasons) >= 5
            assert not mind.events
            ben = build(1, Mind(), [dialled(0, listener.port)], listen=None, security=BEN)
            async with running(ben):
                await until(lambda: ben.is_up(0) and listener.is_up(1))

    asyncio.run(story())


def test_listeners_that_prove_forged_certificates_leave_a_dialler_as_it_was() -> None:
    proven: list[bytes] = []

    async def answer(stream: ServedStream) -> None:
        await stream.read()
        said = hello(index=0, name="ada", certificate=proven[-1], proof=b"signature")
        await stream.write(pb.Envelope(hello=said).SerializeToString())
        await stream.read()

    async def story() -> None:
        server = Server([], max_concurrent=8)
        server.serve_streams(PEER_SERVICE, {"Exchange": answer})
        port = server.bind("127.0.0.1:0", AUTHORITY.credentials(ADA))
        await server.start()
        mind = Mind()
        try:
            for content in CERTIFICATES.values():
                proven.append(content)
                ben = build(1, mind, [dialled(0, port)], listen=None, security=BEN, options=QUICK)
                async with running(ben):
                    await until(lambda dialler=ben: 0 in dialler.refusals)  # type: ignore[misc]
        finally:
            await server.stop(0)
        assert "up" not in [event[0] for event in mind.events]

    asyncio.run(story())


@pytest.mark.parametrize(
    "arguments",
    [{}, {"list": None}, {"list": 7}, {"list": "\ud800"}, {"list": "ü" * 9}, {"list": ["-----BEGIN X509 CRL-----"]}]
    + [{"list": armoured(each, "X509 CRL").decode()} for each in REVOCATIONS.values()],
)
def test_a_call_with_a_list_of_no_run_is_refused_and_the_peer_goes_on(arguments: dict[str, object]) -> None:
    async def story() -> None:
        listener = build(0, Mind(), [passive(1)], security=AUTHORITY.credentials(ADA))
        async with running(listener):
            channel = Channel(f"127.0.0.1:{listener.port}", "ada", BEN)
            call = control_pb2.ControlRequest(arguments=json.dumps(arguments)).SerializeToString()
            with pytest.raises(StreamLost) as refused:
                await channel.call(CONTROL_SERVICE, "Revoke", call, timeout_s=10)
            # What is no text in Unicode is refused before anybody asks what it is for.
            is_text = arguments != {"list": "\ud800"}
            assert refused.value.status is (Status.FAILED_PRECONDITION if is_text else Status.INVALID_ARGUMENT)
            await channel.close()

    asyncio.run(story())
