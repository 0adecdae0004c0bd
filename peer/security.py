"""Certificates: who a peer is, and how the others know.

A run has a certificate authority of its own. Each peer holds a certificate made out to its name in `[[peers]]`, and
shows it in both directions (mutual TLS); an operator holds one that may ask and stop peers but not be one. Leaving a
run means leaving the list of peers: nobody is admitted by certificate alone.

Keys are ECDSA on P-256, since gRPC's TLS library accepts no Ed25519 certificates. Names are checked here and by the
transport, addresses by nobody: a device keeps its identity when it moves.
"""

from __future__ import annotations

import datetime
import enum
import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from peer.config import SecurityOptions
from peer.errors import SecurityError

CA_DAYS = 3653
PEER_DAYS = 731
# Devices without a battery clock start years behind and are often hours off.
CLOCK_SLACK = datetime.timedelta(days=1)
ROLE_URI = "urn:sottovoce:role:"

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")


class Role(enum.Enum):
    """What the holder of a certificate may do."""

    PEER = "peer"
    """Take part in the run, and control itself."""
    OPERATOR = "operator"
    """Ask and stop every peer of the run."""


@dataclass(frozen=True)
class Identity:
    """What a certificate says of its holder."""

    name: str
    role: Role
    thumbprint: str
    """SHA-256 of the certificate, as `openssl x509 -fingerprint -sha256` prints it."""
    not_before: datetime.datetime
    not_after: datetime.datetime


@dataclass(frozen=True)
class Credentials:
    """A certificate with its key, and the authority that it and all the others must be signed by; all PEM."""

    identity: Identity
    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Issued:
    """A new certificate and its private key, both PEM."""

    identity: Identity
    certificate: bytes
    key: bytes = field(repr=False)

    def write(self, certificate_file: Path, key_file: Path) -> None:
        """Write both files, the key readable by its owner alone. Raises SecurityError if one is there already."""
        _write_new(key_file, self.key, mode=0o600)
        _write_new(certificate_file, self.certificate, mode=0o644)


class CertificateAuthority:
    """The authority of one run: signs the certificates of its peers and operators."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def create(cls, run: str, *, now: datetime.datetime | None = None) -> CertificateAuthority:
        """Return a new authority, valid for ten years."""
        now = now or _now()
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Sottovoce run {run}"[:64])])
        certificate = (
            _builder(name, name, key, now, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, certificate_file: Path, key_file: Path) -> CertificateAuthority:
        """Return the authority that `write` saved. Raises SecurityError if the files do not hold one."""
        certificate = _parse_certificate(_read(certificate_file), certificate_file)
        key = _parse_key(_read(key_file), key_file)
        if certificate.public_key() != key.public_key():
            raise SecurityError(f"{key_file} is not the key of {certificate_file}")
        if not _is_authority(certificate):
            raise SecurityError(f"{certificate_file} is not the certificate of an authority")
        return cls(certificate, key)

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate, PEM; every peer gets a copy."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def write(self, certificate_file: Path, key_file: Path) -> None:
        """Write both files, the key readable by its owner alone. Raises SecurityError if one is there already."""
        _write_new(key_file, _key_pem(self._key), mode=0o600)
        _write_new(certificate_file, self.certificate, mode=0o644)

    def issue(
        self,
        name: str,
        addresses: Iterable[str] = (),
        *,
        role: Role = Role.PEER,
        days: int = PEER_DAYS,
        now: datetime.datetime | None = None,
    ) -> Issued:
        """Return a new certificate made out to `name`, with `addresses` (host names, IP addresses) beside it.

        Raises SecurityError if a name cannot stand in a certificate.
        """
        now = now or _now()
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_general_name(each) for each in dict.fromkeys((name, *addresses))]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role is Role.PEER:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        authority_key = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            _builder(subject, self._certificate.subject, key, now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([*names, x509.UniformResourceIdentifier(ROLE_URI + role.value)]),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_key), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return Issued(_identity(certificate), certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))

    def credentials(self, issued: Issued) -> Credentials:
        """Return what the holder of `issued` connects with."""
        return Credentials(issued.identity, self.certificate, issued.certificate, issued.key)


def load_credentials(
    options: SecurityOptions,
    base_dir: Path,
    name: str | None,
    *,
    role: Role = Role.PEER,
    now: datetime.datetime | None = None,
) -> Credentials | None:
    """Return the checked credentials that `options` names (paths relative to `base_dir`); None in insecure mode.

    The certificate must be made out to `name` (any name if None). Raises SecurityError with what to do.
    """
    if options.mode == "insecure":
        return None
    now = now or _now()
    ca_file, certificate_file, key_file = (base_dir / each for each in (options.ca, options.certificate, options.key))
    ca_pem, certificate_pem, key_pem = _read(ca_file), _read(certificate_file), _read(key_file)
    ca = _parse_certificate(ca_pem, ca_file)
    certificate = _parse_certificate(certificate_pem, certificate_file)
    key = _parse_key(key_pem, key_file)

    if not _is_authority(ca):
        raise SecurityError(f"{ca_file} is not the certificate of an authority; security.ca wants the run's ca.pem")
    _check_dates(ca, ca_file, now)
    _check_dates(certificate, certificate_file, now)
    if certificate.public_key() != key.public_key():
        raise SecurityError(f"{key_file} is not the key of {certificate_file}; take both from the same device's folder")
    try:
        certificate.verify_directly_issued_by(ca)
    except (InvalidSignature, ValueError, TypeError):
        raise SecurityError(
            f"{certificate_file} is not signed by {ca_file}; they belong to different runs, issue the certificate anew"
        ) from None
    identity = identify(certificate_pem, str(certificate_file))
    if identity.role is not role:
        raise SecurityError(
            f"{certificate_file} is the certificate of {_with_article(identity.role)}, "
            f"where one of {_with_article(role)} is needed"
        )
    if name is not None and identity.name != name:
        raise SecurityError(
            f"{certificate_file} is made out to {identity.name!r}, but this peer is {name!r}; "
            "correct peer.index or use the certificate of this peer"
        )
    return Credentials(identity, ca_pem, certificate_pem, key_pem)


def identify(certificate: bytes, source: str = "the certificate") -> Identity:
    """Return whom a PEM certificate is made out to. Raises SecurityError if it is not one of a run's certificates.

    The signature is not checked here; TLS has done that, or `load_credentials`.
    """
    return _identity(_parse_certificate(certificate, source), source)


def thumbprint(certificate: bytes) -> str:
    """Return SHA-256 of a PEM certificate in the way people compare it: "3F:A9:…"."""
    return _thumbprint(_parse_certificate(certificate, "the certificate"))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if len(name) > 63 or not _NAME.fullmatch(name):
        raise SecurityError(
            f"no certificate can be made out to {name!r}; a name has letters, digits, '-' and '.', at most 63"
        )
    return x509.DNSName(name)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_new(path: Path, data: bytes, *, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Created with its final mode, so that there is no moment in which others can read a key.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise SecurityError(f"{path} exists already and is not overwritten; move it away first") from None
    except OSError as error:
        raise SecurityError(f"{path} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SecurityError(
            f'{path} does not exist; `sotto init` makes certificates, security.mode = "insecure" goes without'
        ) from None
    except OSError as error:
        raise SecurityError(f"{path} cannot be read: {error.strerror}") from None


def _parse_certificate(pem: bytes, source: Path | str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise SecurityError(f"{source} does not hold a PEM certificate") from None


def _parse_key(pem: bytes, source: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except TypeError:
        raise SecurityError(f"{source} is protected by a password; a daemon needs a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise SecurityError(f"{source} does not hold a PEM private key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SecurityError(f"{source} is not an ECDSA key on P-256, the only kind that this version uses")
    return key


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _check_dates(certificate: x509.Certificate, source: Path, now: datetime.datetime) -> None:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        raise SecurityError(f"{source} is valid from {begin:%Y-%m-%d %H:%M} UTC on; is the clock of this device right?")
    if now > end:
        raise SecurityError(f"{source} expired on {end:%Y-%m-%d}; issue a new one")


def _identity(certificate: x509.Certificate, source: str = "the certificate") -> Identity:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        roles = [
            uri.removeprefix(ROLE_URI)
            for uri in names.get_values_for_type(x509.UniformResourceIdentifier)
            if uri.startswith(ROLE_URI)
        ]
        (role,) = roles
        (common_name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return Identity(
            str(common_name.value),
            Role(role),
            _thumbprint(certificate),
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
        )
    except (x509.ExtensionNotFound, ValueError):
        raise SecurityError(f"{source} was not issued by `sotto`: it names no peer and no role") from None


def _thumbprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def _with_article(role: Role) -> str:
    return "an operator" if role is Role.OPERATOR else "a peer"
