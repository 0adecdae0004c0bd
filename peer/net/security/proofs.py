"""A listener's proof that it holds its certificate: a signature over the caller's challenge.

One opens each stream, in the hello, and one comes with the answer to each control call.
"""

from __future__ import annotations

import datetime
import hashlib

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from peer.errors import SecurityError
from peer.net.security.certificates import (
    Identity,
    Role,
    check_dates,
    der,
    parse_certificate,
    parse_shown,
    public_key,
    read_identity,
    refused_as,
    utc_now,
    was_signed_by,
)
from peer.net.security.credentials import Credentials
from peer.net.security.keys import parse_key

CHALLENGE_BYTES = 16


def prove(
    credentials: Credentials, challenge: bytes, *, verifier: str, answer: bytes | None = None
) -> tuple[bytes, bytes]:
    """Return our certificate (DER) and the signature with which its key answers the challenge of `verifier`.

    `answer` is the answer to a call; None in a hello.
    """
    statement = _statement(challenge, credentials.identity.name, verifier, answer)
    signature = parse_key(credentials.key, "our key").sign(statement, ec.ECDSA(hashes.SHA256()))
    return der(credentials.certificate), signature


def check_proof(
    credentials: Credentials,
    certificate: bytes,
    signature: bytes,
    challenge: bytes,
    *,
    prover: str,
    answer: bytes | None = None,
    now: datetime.datetime | None = None,
) -> Identity:
    """Return whose certificate (DER) answered our challenge. Raises SecurityError unless it is `prover`'s and valid.

    The signature is bound to both names, to a challenge drawn for each stream or call, and to the answer to a call: it
    is of no use elsewhere.
    """
    shown = parse_shown(certificate, prover)
    if not was_signed_by(shown, parse_certificate(credentials.ca, "our CA")):
        raise SecurityError(f"{prover} proves a certificate that this run's CA did not sign")
    check_dates(shown, f"the certificate of {prover}", now or utc_now())
    identity = read_identity(shown, f"the certificate of {prover}")
    if identity.name != prover or identity.role is not Role.PEER:
        raise SecurityError(f"{prover} proves the certificate of {identity.role.value} {identity.name!r}")
    statement = _statement(challenge, prover, credentials.identity.name, answer)
    with refused_as(f"{prover} does not hold the key of the certificate that it shows"):
        public_key(shown, prover).verify(signature, statement, ec.ECDSA(hashes.SHA256()))
    if credentials.revoked is not None:
        credentials.revoked.check(identity.serial, identity.name)
    return identity


def _statement(challenge: bytes, prover: str, verifier: str, answer: bytes | None) -> bytes:
    # Names have no zero bytes, and the challenge has a fixed length: no two statements look alike.
    names = prover.encode() + b"\0" + verifier.encode()
    if answer is None:
        return b"sottovoce: I am the listener\0" + challenge + names
    return b"sottovoce: I answer the call\0" + challenge + hashlib.sha256(answer).digest() + names
