"""Malformed certificates, requests and revocation lists: whatever the bytes are, the error is a SecurityError.

The library has errors of several unrelated kinds for them; one that escaped would end the peer that reads the bytes.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Iterator
from random import Random

import pytest
from cryptography.utils import CryptographyDeprecationWarning

from peer.errors import SecurityError
from peer.net.security.authority import CertificateAuthority
from peer.net.security.certificates import der, identify, is_signed_by, vouched_identity
from peer.net.security.proofs import check_proof
from peer.net.security.requests import read_request, request_certificate
from peer.net.security.revocation_list import RevocationList

AUTHORITY = CertificateAuthority.create("tests")
ADA = AUTHORITY.issue("ada")
VERIFIER = AUTHORITY.credentials(AUTHORITY.issue("ben"))
MUTANTS = 400


def unarmoured(pem: bytes) -> bytes:
    return base64.b64decode(b"".join(line for line in pem.splitlines() if not line.startswith(b"-")))


def armoured(content: bytes, label: str) -> bytes:
    return b"-----BEGIN %s-----\n%s-----END %s-----\n" % (
        label.encode(), base64.encodebytes(content), label.encode(),
    )  # fmt: skip


def shown(certificate: bytes) -> None:
    check_proof(VERIFIER, certificate, b"signature", bytes(16), prover="ada")


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        for mutant in mutants(content, seed=20):
            try:
                read(mutant)
            except SecurityError:
                refused += 1
    assert refused > MUTANTS // 4
