"""Statements that are passed on, signed with the key of who says them.

A signature is bound to the run, to the statement's subject, to the name in the certificate and to a counter, so that it
proves nothing else. Dates and revocation are not checked: what a peer said while it was trusted stays said, and all
peers have to agree on what was.
"""

from __future__ import annotations

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from peer.errors import SecurityError
from peer.net.security.certificates import (
    Identity,
    Role,
    parse_certificate,
    parse_shown,
    public_key,
    read_identity,
    refused_as,
    was_signed_by,
)

_MOST_KNOWN = 512
"""Certificates that are kept parsed: more than most runs have peers."""


def _ecdsa() -> ec.ECDSA:
    """Return the way to sign: without random numbers (RFC 6979) where the library can, since a device that has just
    booted may have bad ones."""
    try:
        return ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
    except (TypeError, UnsupportedAlgorithm):
        return ec.ECDSA(hashes.SHA256())


_ECDSA = _ecdsa()


def signature_of(
    key: ec.EllipticCurvePrivateKey, *, run: str, topic: str, name: str, counter: int, statement: bytes
) -> bytes:
    """Return the signature with which the holder of a certificate made out to `name` says something."""
    return key.sign(_bound(run, topic, name, counter, statement), _ECDSA)


class StatementVerifier:
    """Tells who said something. Keeps the certificates that it has checked."""

    def __init__(self, authority: bytes, run: str) -> None:
        """`authority`: PEM."""
        self._authority, self._run = parse_certificate(authority, "our CA"), run
        self._known: dict[bytes, tuple[Identity, ec.EllipticCurvePublicKey]] = {}

    def check(
        self,
        certificate: bytes,
        signature: bytes,
        *,
        topic: str,
        counter: int,
        statement: bytes,
        role: Role = Role.PEER,
    ) -> Identity:
        """Return whose certificate (DER) signed a statement. Raises SecurityError unless it is one of this run, of that
        role, and signed exactly this."""
        identity, key = self._holder(certificate)
        if identity.role is not role:
            raise SecurityError(f"it is signed with the certificate of {identity.role.with_article}")
        with refused_as("its signature is not that of the certificate that it names"):
            key.verify(
                signature, _bound(self._run, topic, identity.name, counter, statement), ec.ECDSA(hashes.SHA256())
            )
        return identity

    def _holder(self, certificate: bytes) -> tuple[Identity, ec.EllipticCurvePublicKey]:
        known = self._known.get(certificate)
        if known is None:
            shown = parse_shown(certificate, "it")
            if not was_signed_by(shown, self._authority):
                raise SecurityError("it is signed with a certificate that this run's CA did not sign")
            known = read_identity(shown), public_key(shown, "its certificate")
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[certificate] = known
        return known


def _bound(run: str, topic: str, name: str, counter: int, statement: bytes) -> bytes:
    # Names have no zero bytes, and the counter has a fixed length: no two statements look alike.
    texts = "\0".join(("sottovoce: I state", run, topic, name, ""))
    return texts.encode() + counter.to_bytes(8, "big") + statement
