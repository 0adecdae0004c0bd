"""The certificate authority of a run: it signs the certificates of peers and operators, and revokes them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from peer.errors import SecurityError
from peer.net.security.certificates import (
    ROLE_URI,
    Identity,
    Place,
    Role,
    is_authority,
    parse_certificate,
    public_key,
    read_identity,
    utc_now,
)
from peer.net.security.credentials import Credentials
from peer.net.security.keys import key_pem, new_key, parse_key, read_file, read_secret, write_new
from peer.net.security.requests import Request, address_names, check_name, general_name
from peer.net.security.revocation_list import MAX_BYTES, RevocationList

CA_DAYS = 3653
PEER_DAYS = 731
# A list holds until a newer one comes; that none comes must not stop a run.
_LIST_DAYS = 3653
# Devices without a battery clock start years behind and are often hours off.
CLOCK_SLACK = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A new certificate and its private key, both PEM."""

    identity: Identity
    certificate: bytes
    key: bytes = field(repr=False)

    def write(self, certificate_file: Path, key_file: Path) -> None:
        """Write both files, the key readable by its owner alone. Raises SecurityError if one exists already."""
        write_new(key_file, self.key, mode=0o600)
        write_new(certificate_file, self.certificate, mode=0o644)


class CertificateAuthority:
    """The authority of one run: signs the certificates of its peers and operators."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def create(cls, run: str, *, days: int = CA_DAYS, now: datetime.datetime | None = None) -> CertificateAuthority:
        """Return a new authority, by default valid for ten years."""
        now = now or utc_now()
        key = new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Sottovoce run {run}"[:64])])
        certificate = (
            _builder(name, name, key.public_key(), now, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, certificate_file: Path, key_file: Path, passphrase: bytes | None = None) -> CertificateAuthority:
        """Return the authority that `write` saved. Raises SecurityError if the files do not hold one."""
        certificate = parse_certificate(read_file(certificate_file), certificate_file)
        key = parse_key(read_secret(key_file), key_file, passphrase)
        if public_key(certificate, certificate_file) != key.public_key():
            raise SecurityError(f"{key_file} is not the key of {certificate_file}")
        if not is_authority(certificate):
            raise SecurityError(f"{certificate_file} is not the certificate of an authority")
        return cls(certificate, key)

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate, PEM; every peer gets a copy."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def write(self, certificate_file: Path, key_file: Path, passphrase: bytes | None = None) -> None:
        """Write both files, the key readable by its owner alone, and encrypted if there is a passphrase. Raises
        SecurityError if one exists already."""
        write_new(key_file, key_pem(self._key, passphrase), mode=0o600)
        write_new(certificate_file, self.certificate, mode=0o644)

    @property
    def not_after(self) -> datetime.datetime:
        """The end of its own certificate: no other is of use after that."""
        return self._certificate.not_valid_after_utc

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
        key = new_key()
        certificate = self._sign(key.public_key(), name, addresses, role, days, now or utc_now())
        return Issued(read_identity(certificate), certificate.public_bytes(serialization.Encoding.PEM), key_pem(key))

    def grant(
        self,
        request: Request,
        *,
        address: str | None = None,
        place: Place | None = None,
        days: int = PEER_DAYS,
        now: datetime.datetime | None = None,
    ) -> tuple[Identity, bytes]:
        """Return the identity granted to a request, and the certificate (PEM).

        It is made out to the name of the request and the host of `address` ("host:port"), and to nothing else that the
        request names. `place` stands in the certificate of a newcomer, so that the others need to believe nobody else
        about it. Raises SecurityError for an address that nobody can have.
        """
        names = address_names(address)
        certificate = self._sign(request.key, request.name, names, Role.PEER, days, now or utc_now(), place)
        return read_identity(certificate), certificate.public_bytes(serialization.Encoding.PEM)

    def revoke(self, older: bytes, serials: Iterable[int], *, now: datetime.datetime | None = None) -> bytes:
        """Return a list (PEM) that revokes `serials` beside those of the `older` list (empty where there is none).

        Raises SecurityError if the older list is another authority's.
        """
        now, known = now or utc_now(), RevocationList(self.certificate)
        if older:
            known.take(older)
        entries = dict.fromkeys(serials, now) | known.entries
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now)
            .next_update(now + datetime.timedelta(days=_LIST_DAYS))
            .add_extension(x509.CRLNumber(known.number + 1), critical=False)
        )
        for serial, when in sorted(entries.items()):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
            builder = builder.add_revoked_certificate(entry)
        made = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        if len(made) > MAX_BYTES:
            raise SecurityError(
                f"{len(entries)} revoked certificates are more than one list holds; make a new authority"
            )
        return made

    def credentials(self, issued: Issued) -> Credentials:
        """Return the credentials of the holder of `issued`."""
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
        # Nothing that the authority signed is of use after its own end.
        days = min(days, (self.not_after - now).days)
        if days <= 0:
            raise SecurityError(f"the authority expired on {self.not_after:%Y-%m-%d}; make a new cluster folder")
        if role is Role.PEER:
            check_name(name)
        names = [general_name(each) for each in dict.fromkeys((name, *addresses))]
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
