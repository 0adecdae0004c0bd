"""The contents of certificates, and whether to believe them.

Certificates arrive from disk, from TLS, and from other peers in hellos and introductions. No bytes make this module
raise anything but SecurityError.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from peer.errors import SecurityError

ROLE_URI = "urn:sottovoce:role:"
ADDRESS_URI = "urn:sottovoce:address:"
_INDEX_URI = "urn:sottovoce:index:"
_RELAY_URI = "urn:sottovoce:relay:"

_MAX_CERTIFICATE_BYTES = 8 * 1024

_MAX_SERIAL_BITS = 160
_MAX_NAME = 64
# With a leading zero or another script's digits, one number could be written in two ways.
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")


class Role(enum.Enum):
    """The rights of a certificate's holder."""

    PEER = "peer"
    """Take part in the run, and control itself."""
    OPERATOR = "operator"
    """Query and stop every peer of the run."""

    @property
    def with_article(self) -> str:
        return "an operator" if self is Role.OPERATOR else "a peer"


@dataclass(frozen=True)
class Identity:
    """The identity stated in a certificate."""

    name: str
    role: Role
    thumbprint: str
    """SHA-256 of the certificate, as `openssl x509 -fingerprint -sha256` prints it."""
    serial: int
    """The serial number in a revocation list."""
    not_before: datetime.datetime
    not_after: datetime.datetime
    index: int | None = None
    """A newcomer's position in its own list of peers."""
    address: str | None = None
    """Address at which a newcomer can be dialled, "host:port"."""
    relay: str | None = None
    """Name of the peer at which a newcomer waits for callers."""


@dataclass(frozen=True)
class Place:
    """A newcomer's position in its own list of peers, and the way to reach it."""

    index: int
    address: str | None
    """Address to dial, "host:port"; None if it cannot be dialled."""
    relay: str | None = None
    """Name of the peer at which it waits for callers, if it cannot be dialled."""

    def uris(self) -> Iterator[str]:
        """Yield the entries of its certificate that say so."""
        yield f"{_INDEX_URI}{self.index}"
        if self.address is not None:
            yield ADDRESS_URI + self.address
        if self.relay is not None:
            yield _RELAY_URI + self.relay


def utc_now() -> datetime.datetime:
    """Return the time against which certificates are checked."""
    return datetime.datetime.now(datetime.UTC)


def identify(certificate: bytes, source: str = "the certificate") -> Identity:
    """Return the identity in a PEM certificate. Raises SecurityError if it is not one of a run's certificates.

    The signature is not checked here: TLS has done that, or `load_credentials`.
    """
    return read_identity(parse_certificate(certificate, source), source)


def vouched_identity(certificate: bytes, authority: bytes) -> Identity:
    """Return the identity in a peer's certificate (DER). Raises SecurityError unless the authority (PEM) signed it for
    a peer.

    Neither dates nor revocation are checked: their answer changes from day to day (`credentials.check_current`).
    """
    shown = parse_shown(certificate, "it")
    if not was_signed_by(shown, parse_certificate(authority, "the authority")):
        raise SecurityError("it is introduced by a certificate that this run's CA did not sign")
    identity = read_identity(shown)
    if identity.role is not Role.PEER:
        raise SecurityError(f"it is introduced by the certificate of {identity.role.with_article}")
    return identity


def der(certificate: bytes) -> bytes:
    """Return a PEM certificate as DER, which is shorter."""
    return parse_certificate(certificate, "the certificate").public_bytes(serialization.Encoding.DER)


def pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM, with nothing before or after it."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    """Return whether the authority (PEM) signed a certificate (PEM)."""
    try:
        return was_signed_by(parse_certificate(certificate, "it"), parse_certificate(authority, "the authority"))
    except SecurityError:
        return False


def was_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether the authority signed a certificate."""
    try:
        with refused_as("the signature is not the authority's"):
            certificate.verify_directly_issued_by(authority)
    except SecurityError:
        return False
    return True


def is_authority(certificate: x509.Certificate) -> bool:
    """Return whether a certificate may sign others."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def check_dates(certificate: x509.Certificate, source: Path | str, now: datetime.datetime) -> None:
    """Raise SecurityError, with what to do, if a certificate is not valid at `now`."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        error = SecurityError(
            f"{source} is valid from {begin:%Y-%m-%d %H:%M} UTC on; is the clock of this device right?"
        )
        # A device without a battery for its clock boots in the past.
        error.may_pass = True
        raise error
    if now > end:
        raise SecurityError(f"{source} expired on {end:%Y-%m-%d}; issue a new one")


@contextlib.contextmanager
def refused_as(problem: str) -> Iterator[None]:
    """Raise a SecurityError that says `problem` in place of the library's errors for bytes from outside."""
    try:
        yield
    except SecurityError:
        raise
    except Exception:  # Its errors have no common base, and which of them a property can raise is written nowhere.
        raise SecurityError(problem) from None


def parse_certificate(pem: bytes, source: Path | str) -> x509.Certificate:
    """Return a PEM certificate. Raises SecurityError if it is not one of the kind that this version uses."""
    with refused_as(f"{source} does not hold a PEM certificate"):
        certificate = x509.load_pem_x509_certificate(pem)
    _read_through(certificate, source)
    return certificate


def parse_shown(certificate: bytes, holder: str) -> x509.Certificate:
    """Return a certificate (DER) that another peer shows. Raises SecurityError if it is not one of the kind that this
    version uses."""
    with refused_as(f"{holder} does not prove whose certificate it holds"):
        if not 0 < len(certificate) <= _MAX_CERTIFICATE_BYTES:
            raise ValueError("no certificate has such a length")
        shown = x509.load_der_x509_certificate(certificate)
    _read_through(shown, f"the certificate that {holder} shows")
    return shown


def public_key(certificate: x509.Certificate, source: Path | str) -> ec.EllipticCurvePublicKey:
    """Return the key of a certificate. Raises SecurityError if it is not of the kind that every key of a run has."""
    with refused_as(f"{source} has a key that cannot be read"):
        key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SecurityError(f"the key of {source} is not an ECDSA key on P-256, the only kind that this version uses")
    return key


def _read_through(certificate: x509.Certificate, source: Path | str) -> None:
    """Read once the fields needed later, which the library leaves undecoded until then. Raises SecurityError."""
    public_key(certificate, source)
    with refused_as(f"{source} is malformed, or of a version that no run uses"):
        if (
            certificate.version is not x509.Version.v3
            or not 0 < certificate.serial_number < 1 << _MAX_SERIAL_BITS
            or certificate.not_valid_before_utc > certificate.not_valid_after_utc
        ):
            raise ValueError
        for part in (certificate.subject, certificate.issuer, certificate.extensions):
            list(part)


def read_identity(certificate: x509.Certificate, source: str = "the certificate") -> Identity:
    """Return the identity in a certificate. Raises SecurityError if it is not one of a run's certificates."""
    with refused_as(f"{source} was not issued by `sotto`: it names no peer and no role"):
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        index = _only(_INDEX_URI, uris)
        if index is not None and not _INDEX.fullmatch(index):
            raise ValueError
        (common_name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        name = common_name.value
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise ValueError
        return Identity(
            name,
            Role(_only(ROLE_URI, uris)),
            _thumbprint(certificate),
            certificate.serial_number,
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
            None if index is None else int(index),
            _only(ADDRESS_URI, uris),
            _only(_RELAY_URI, uris),
        )


def _only(prefix: str, uris: Iterable[str]) -> str | None:
    """Return the rest of the one entry that has a prefix; None if none has. Raises ValueError for several."""
    found = [uri.removeprefix(prefix) for uri in uris if uri.startswith(prefix)]
    if len(found) > 1:
        raise ValueError
    return found[0] if found else None


def _thumbprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()
