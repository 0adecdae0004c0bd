"""Certificates: who a peer is, and how the others know.

A run has a certificate authority of its own. Each peer holds a certificate made out to its name in `[[peers]]`, and
shows it in both directions (mutual TLS); an operator holds one that may ask and stop peers but not be one. Nobody is
admitted by certificate alone, the list of peers counts too; and a certificate can be revoked (`peer.net.revocation`).

TLS tells a listener whose certificate the caller holds. gRPC's Python API does not tell a dialler whose certificate the
listener holds, only that its name was right; so a listener proves it once more in its hello (`prove`, `check_proof`).

Keys are ECDSA on P-256, since gRPC's TLS library accepts no Ed25519 certificates. Names are checked here and by the
transport, addresses by nobody: a device keeps its identity when it moves.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from peer.config import SecurityOptions
from peer.errors import SecurityError
from peer.net.revocation import RevocationList, sign_list

CA_DAYS = 3653
PEER_DAYS = 731
# Devices without a battery clock start years behind and are often hours off.
CLOCK_SLACK = datetime.timedelta(days=1)
ROLE_URI = "urn:sottovoce:role:"
_ADDRESS_URI = "urn:sottovoce:address:"
_INDEX_URI = "urn:sottovoce:index:"
_RELAY_URI = "urn:sottovoce:relay:"

SYSTEM_AUTHORITIES = "system"
CHALLENGE_BYTES = 16

_MAX_CERTIFICATE = 8 * 1024
_MIN_TOKEN = 16
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{{_MIN_TOKEN},512}}")
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
    serial: int
    """What a list of revoked certificates names it by."""
    not_before: datetime.datetime
    not_after: datetime.datetime
    index: int | None = None
    """Of a peer that was admitted when the others had their lists: its position in its own."""
    address: str | None = None
    """Of such a peer: where it can be dialled, "host:port"."""
    relay: str | None = None
    """Of such a peer: at which peer it waits for callers."""


@dataclass(frozen=True)
class Place:
    """Where a peer stands that is admitted when the others have their lists."""

    index: int
    """In its own list."""
    address: str | None
    """Where it can be dialled, "host:port"; None where nobody can."""
    relay: str | None = None
    """Name of the peer at which it waits for callers, if it cannot be dialled."""

    def uris(self) -> Iterator[str]:
        """Yield what a certificate says of it."""
        yield f"{_INDEX_URI}{self.index}"
        if self.address is not None:
            yield _ADDRESS_URI + self.address
        if self.relay is not None:
            yield _RELAY_URI + self.relay


@dataclass(frozen=True)
class Credentials:
    """A certificate with its key, and the authority that it and all the others must be signed by; all PEM."""

    identity: Identity
    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    revoked: RevocationList | None = field(default=None, repr=False, compare=False)
    """What the run's authority took back; the transport keeps it up to date."""


@dataclass(frozen=True)
class TokenAccess:
    """What a peer shows where something on the way ends TLS: a secret that all peers of the run share.

    It says that its holder belongs to the run, not which of its peers it is.
    """

    token: str = field(repr=False)
    ca: bytes | None = None
    """Authorities (PEM) that sign the certificates of listeners or of what stands before them; None: the system's."""
    certificate: bytes | None = None
    """Of our listener, PEM; None: it speaks without TLS, to a load balancer that ends it."""
    key: bytes | None = field(default=None, repr=False)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what goes along with every call."""
        return (("authorization", f"Bearer {self.token}"),)

    def admits(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether what came along with a call holds the token."""
        shown = [value for key, value in metadata if key == "authorization"]
        expected = f"Bearer {self.token}".encode()
        return len(shown) == 1 and hmac.compare_digest(
            shown[0].encode() if isinstance(shown[0], str) else shown[0], expected
        )


Access = Credentials | TokenAccess


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
            _builder(name, name, key.public_key(), now, CA_DAYS)
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
        key = _parse_key(_read_secret(key_file), key_file)
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
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(key.public_key(), name, addresses, role, days, now or _now())
        return Issued(_identity(certificate), certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))

    def grant(
        self,
        request: bytes,
        *,
        place: Place | None = None,
        days: int = PEER_DAYS,
        now: datetime.datetime | None = None,
    ) -> tuple[Identity, bytes]:
        """Return whom a request (PEM, see `request_certificate`) comes from, and the peer's certificate for it, PEM.

        `place` stands in the certificate of a peer that the others do not list, so that they need believe nobody else
        about it. Raises SecurityError if it is not a request, or its key is not one that this version uses.
        """
        name, addresses, key = _read_request(request)
        certificate = self._sign(key, name, addresses, Role.PEER, days, now or _now(), place)
        return _identity(certificate), certificate.public_bytes(serialization.Encoding.PEM)

    def revoke(self, older: bytes, serials: Iterable[int], *, now: datetime.datetime | None = None) -> bytes:
        """Return a list (PEM) that revokes `serials` beside what the `older` list holds (empty where there is none).

        Raises SecurityError if the older list is another authority's.
        """
        return sign_list(self._certificate, self._key, older, serials, now=now or _now())

    def credentials(self, issued: Issued) -> Credentials:
        """Return what the holder of `issued` connects with."""
        return Credentials(
            issued.identity, self.certificate, issued.certificate, issued.key, RevocationList(self.certificate)
        )

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        addresses: Iterable[str],
        role: Role,
        days: int,
        now: datetime.datetime,
        place: Place | None = None,
    ) -> x509.Certificate:
        names = [_general_name(each) for each in dict.fromkeys((name, *addresses))]
        uris = [ROLE_URI + role.value, *(() if place is None else place.uris())]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role is Role.PEER:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        authority_key = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            _builder(subject, self._certificate.subject, key, now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([*names, *map(x509.UniformResourceIdentifier, uris)]),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_key), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )


def load_credentials(
    options: SecurityOptions,
    base_dir: Path,
    name: str | None,
    *,
    role: Role = Role.PEER,
    now: datetime.datetime | None = None,
) -> Access | None:
    """Return the checked credentials that `options` names (paths relative to `base_dir`); None in insecure mode.

    The certificate must be made out to `name` (any name if None). Raises SecurityError with what to do.
    """
    if options.mode == "insecure":
        return None
    if options.mode == "tls+token":
        return _load_token(options, base_dir)
    now = now or _now()
    ca_file, certificate_file, key_file = (base_dir / each for each in (options.ca, options.certificate, options.key))
    ca_pem, certificate_pem, key_pem = _read(ca_file), _read(certificate_file), _read_secret(key_file)
    ca = _parse_certificate(ca_pem, ca_file)
    certificate = _parse_certificate(certificate_pem, certificate_file)
    key = _parse_key(key_pem, key_file)

    if not _is_authority(ca):
        raise SecurityError(f"{ca_file} is not the certificate of an authority; security.ca wants the run's ca.pem")
    _check_dates(ca, ca_file, now)
    _check_dates(certificate, certificate_file, now)
    if certificate.public_key() != key.public_key():
        raise SecurityError(f"{key_file} is not the key of {certificate_file}; take both from the same device's folder")
    if not _is_signed_by(certificate, ca):
        raise SecurityError(
            f"{certificate_file} is not signed by {ca_file}; they belong to different runs, issue the certificate anew"
        )
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
    revoked = RevocationList(ca_pem, base_dir / options.revoked)
    try:
        revoked.check(identity.serial, identity.name)
    except SecurityError as error:
        raise SecurityError(f"{certificate_file}: {error}; ask for a new one with `sotto init --join`") from None
    return Credentials(identity, ca_pem, certificate_pem, key_pem, revoked)


def _load_token(options: SecurityOptions, base_dir: Path) -> TokenAccess:
    file = base_dir / options.token
    token = _read_secret(file).decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(token):
        raise SecurityError(
            f"{file} does not hold a token: {_MIN_TOKEN} or more letters, digits, '-' and '_', the same on every "
            "device; `openssl rand -hex 32` prints a good one"
        )
    ca = None if options.ca == SYSTEM_AUTHORITIES else _read(base_dir / options.ca)
    if options.plain_listener:
        return TokenAccess(token, ca)
    certificate_file, key_file = base_dir / options.certificate, base_dir / options.key
    certificate, key = _read(certificate_file), _read_secret(key_file)
    if _parse_certificate(certificate, certificate_file).public_key() != _parse_key(key, key_file).public_key():
        raise SecurityError(f"{key_file} is not the key of {certificate_file}; take both from the same device's folder")
    return TokenAccess(token, ca, certificate, key)


def request_certificate(name: str, addresses: Iterable[str] = (), *, address: str | None = None) -> tuple[bytes, bytes]:
    """Return a request for a peer's certificate made out to `name`, and its new private key, both PEM.

    The key never leaves the device; the request is nothing secret. It also carries where the others shall dial the
    device (`address`, "host:port"). Raises SecurityError for names that cannot stand in a certificate.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_general_name(each) for each in dict.fromkeys((name, *addresses))]
    if address is not None:
        names.append(x509.UniformResourceIdentifier(_ADDRESS_URI + address))
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM), _key_pem(key)


def request_name(request: bytes) -> str:
    """Return what a request asks a certificate to be made out to. Raises SecurityError if it is none."""
    return _read_request(request)[0]


def request_address(request: bytes) -> str | None:
    """Return where the others shall dial the device that made a request; None where they cannot."""
    names = x509.load_pem_x509_csr(request).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier):
        if uri.startswith(_ADDRESS_URI):
            return uri.removeprefix(_ADDRESS_URI)
    return None


def vouched_identity(certificate: bytes, authority: bytes) -> Identity:
    """Return whom a certificate (DER) of a peer is made out to. Raises SecurityError if the authority (PEM) did not
    sign it for a peer. Whether it is valid today, or was revoked, is not asked: that has another answer each day."""
    shown = _parse_shown(certificate, "it")
    if not _is_signed_by(shown, x509.load_pem_x509_certificate(authority)):
        raise SecurityError("it is introduced by a certificate that this run's CA did not sign")
    identity = _identity(shown)
    if identity.role is not Role.PEER:
        raise SecurityError(f"it is introduced by the certificate of {_with_article(identity.role)}")
    return identity


def check_current(identity: Identity, revoked: RevocationList | None, *, now: datetime.datetime | None = None) -> None:
    """Raise SecurityError if a certificate is not valid today, or was revoked."""
    now = now or _now()
    if not identity.not_before <= now <= identity.not_after:
        raise SecurityError(
            f"the certificate of {identity.name!r} is valid from {identity.not_before:%Y-%m-%d} to "
            f"{identity.not_after:%Y-%m-%d}, and not today"
        )
    if revoked is not None:
        revoked.check(identity.serial, identity.name)


def der(certificate: bytes) -> bytes:
    """Return a certificate (PEM) in its shorter form."""
    return _parse_certificate(certificate, "the certificate").public_bytes(serialization.Encoding.DER)


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    """Return whether a certificate (PEM) is one of this authority (PEM)."""
    try:
        return _is_signed_by(x509.load_pem_x509_certificate(certificate), x509.load_pem_x509_certificate(authority))
    except ValueError:
        return False


def request_thumbprint(request: bytes) -> str:
    """Return SHA-256 of the public key of a request, for people to compare on both machines."""
    _, _, key = _read_request(request)
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).digest().hex(":").upper()


def write_secret(path: Path, data: bytes) -> None:
    """Write a new file readable by its owner alone. Raises SecurityError if it is there already."""
    _write_new(path, data, mode=0o600)


def prove(credentials: Credentials, challenge: bytes, *, verifier: str) -> tuple[bytes, bytes]:
    """Return our certificate (DER) and the signature by which its key answers the challenge of peer `verifier`."""
    certificate = x509.load_pem_x509_certificate(credentials.certificate)
    key = serialization.load_pem_private_key(credentials.key, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    statement = _statement(challenge, credentials.identity.name, verifier)
    return certificate.public_bytes(serialization.Encoding.DER), key.sign(statement, ec.ECDSA(hashes.SHA256()))


def check_proof(
    credentials: Credentials,
    certificate: bytes,
    signature: bytes,
    challenge: bytes,
    *,
    prover: str,
    now: datetime.datetime | None = None,
) -> Identity:
    """Return whose certificate (DER) answered our challenge. Raises SecurityError unless it is `prover`'s, and good.

    Bound to both names and to a challenge that is drawn for each stream: the answer to one is of no use elsewhere.
    """
    shown = _parse_shown(certificate, prover)
    key = shown.public_key()
    if not _is_signed_by(shown, x509.load_pem_x509_certificate(credentials.ca)):
        raise SecurityError(f"{prover} proves a certificate that this run's CA did not sign")
    _check_dates(shown, f"the certificate of {prover}", now or _now())
    identity = _identity(shown, f"the certificate of {prover}")
    if identity.name != prover or identity.role is not Role.PEER:
        raise SecurityError(f"{prover} proves the certificate of {identity.role.value} {identity.name!r}")
    try:
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(signature, _statement(challenge, prover, credentials.identity.name), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise SecurityError(f"{prover} does not hold the key of the certificate that it shows") from None
    if credentials.revoked is not None:
        credentials.revoked.check(identity.serial, identity.name)
    return identity


def _statement(challenge: bytes, prover: str, verifier: str) -> bytes:
    # Names have no zero bytes, and the challenge has a fixed length: no two statements look alike.
    return b"sottovoce: I am the listener\0" + challenge + prover.encode() + b"\0" + verifier.encode()


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
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
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


def _read_secret(path: Path) -> bytes:
    data = _read(path)
    mode = path.stat().st_mode
    # Groups are left alone: orchestrators hand out secrets to the group of the container.
    if mode & 0o007:
        raise SecurityError(
            f"every user of this machine may read {path} (mode {mode & 0o777:04o}); it is a secret: chmod 600 {path}, "
            "and replace it if others may have read it"
        )
    return data


def _read_request(pem: bytes) -> tuple[str, list[str], ec.EllipticCurvePublicKey]:
    try:
        request = x509.load_pem_x509_csr(pem)
        (common_name,) = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = [
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        ]
        genuine = request.is_signature_valid
        key = request.public_key()
    except (ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        raise SecurityError("this is not a request for a certificate; `sotto init --join` writes one") from None
    if not genuine or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SecurityError("the request is not signed by an ECDSA key on P-256, the only kind that this version uses")
    return str(common_name.value), addresses, key


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _parse_certificate(pem: bytes, source: Path | str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise SecurityError(f"{source} does not hold a PEM certificate") from None


def _parse_shown(certificate: bytes, prover: str) -> x509.Certificate:
    """Return a certificate (DER) that somebody shows, with a key that can be read."""
    try:
        if not 0 < len(certificate) <= _MAX_CERTIFICATE:
            raise ValueError
        shown = x509.load_der_x509_certificate(certificate)
        shown.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise SecurityError(f"{prover} does not prove whose certificate it holds") from None
    return shown


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


def _check_dates(certificate: x509.Certificate, source: Path | str, now: datetime.datetime) -> None:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        raise SecurityError(f"{source} is valid from {begin:%Y-%m-%d %H:%M} UTC on; is the clock of this device right?")
    if now > end:
        raise SecurityError(f"{source} expired on {end:%Y-%m-%d}; issue a new one")


def _identity(certificate: x509.Certificate, source: str = "the certificate") -> Identity:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        (role,) = _after(ROLE_URI, uris)
        index = next(map(int, _after(_INDEX_URI, uris)), None)
        (common_name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return Identity(
            str(common_name.value),
            Role(role),
            _thumbprint(certificate),
            certificate.serial_number,
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
            index,
            next(_after(_ADDRESS_URI, uris), None),
            next(_after(_RELAY_URI, uris), None),
        )
    except (x509.ExtensionNotFound, ValueError):
        raise SecurityError(f"{source} was not issued by `sotto`: it names no peer and no role") from None


def _after(prefix: str, uris: Iterable[str]) -> Iterator[str]:
    return (uri.removeprefix(prefix) for uri in uris if uri.startswith(prefix))


def _thumbprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def _with_article(role: Role) -> str:
    return "an operator" if role is Role.OPERATOR else "a peer"
