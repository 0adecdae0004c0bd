"""Requests for certificates: a device sends one to the machine that holds the authority.

The private key never leaves the device, and the request is no secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from peer.errors import ConfigError, SecurityError
from peer.net.address import dialled_address, is_host_name, why_no_name
from peer.net.security.certificates import ADDRESS_URI, refused_as
from peer.net.security.keys import key_pem, new_key

_MAX_BYTES = 16 * 1024


@dataclass(frozen=True)
class Request:
    """A device's request for a certificate."""

    name: str
    address: str | None
    """Address at which others are to dial the device, "host:port"; None if they cannot."""
    beyond: tuple[str, ...]
    """Other names in the request, in printable form. No certificate is made out to them."""
    thumbprint: str
    """SHA-256 of its public key, for people to compare on both machines."""
    key: ec.EllipticCurvePublicKey


def request_certificate(
    name: str,
    addresses: Iterable[str] = (),
    *,
    address: str | None = None,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> tuple[bytes, bytes]:
    """Return a request for a peer's certificate made out to `name`, and its private key, both PEM.

    `addresses` (host names, IP addresses) stand beside the name; `address` ("host:port") is where the others shall
    dial the device. `key`: by default a new one. Raises SecurityError for names that cannot stand in a certificate.
    """
    check_name(name)
    key = key or new_key()
    names = [general_name(each) for each in dict.fromkeys((name, *addresses))]
    if address is not None:
        names.append(x509.UniformResourceIdentifier(ADDRESS_URI + address))
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM), key_pem(key)


def read_request(pem: bytes) -> Request:
    """Return the contents of a request. Raises SecurityError if it is not one, or not of a key that this version uses,
    or asks for a name or address that nobody can have."""
    with refused_as("this is not a request for a certificate; `sotto init --join` writes one"):
        if len(pem) > _MAX_BYTES:
            raise ValueError("no request is so long")
        request = x509.load_pem_x509_csr(pem)
        (common_name,) = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        name = common_name.value
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        asked = [str(each.value) for each in names]
        genuine = request.is_signature_valid
        key = request.public_key()
        if not isinstance(name, str):
            raise ValueError("a name is a text")
    if not genuine or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SecurityError("the request is not signed by an ECDSA key on P-256, the only kind that this version uses")
    check_name(name)  # Also before it is shown to anybody.
    addresses = [each.removeprefix(ADDRESS_URI) for each in asked if each.startswith(ADDRESS_URI)]
    if len(addresses) > 1:
        raise SecurityError(f"the request gives {len(addresses)} addresses, where a device has one")
    address = addresses[0] if addresses else None
    expected = {name, _written(name), *address_names(address), f"{ADDRESS_URI}{address}"}
    beyond = tuple(ascii(each[:80]) for each in asked if each not in expected)
    return Request(name, address, beyond, key_thumbprint(key), key)


def address_names(address: str | None) -> list[str]:
    """Return the entries in a certificate beside the name of a device that is dialled at `address`, if it is.

    Raises SecurityError for an address that nobody can have.
    """
    if address is None:
        return []
    try:
        host, _ = dialled_address(address, key="the address")
    except ConfigError as error:
        raise SecurityError(f"the request asks for an impossible address: {error}") from None
    return [_written(host)]


def check_name(name: str) -> None:
    """Raise SecurityError for a name that no peer can have."""
    if (why := why_no_name(name)) is not None:
        raise SecurityError(f"no certificate can be made out to {name[:80]!a}: {why}")


def general_name(name: str) -> x509.GeneralName:
    """Return a host name or IP address as it stands in a certificate. Raises SecurityError if it cannot."""
    with contextlib.suppress(ValueError):
        # An address with a scope means something else on each device.
        if "%" not in name:
            return x509.IPAddress(ipaddress.ip_address(name))
    if not is_host_name(name):
        raise SecurityError(
            f"no certificate can be made out to {name[:80]!r}; a host name has letters, digits, '-' and '.', at most "
            "253 in all and 63 between two dots"
        )
    return x509.DNSName(name)


def _written(host: str) -> str:
    """Return a host as certificates write it: an IP address has one form of many."""
    return str(general_name(host).value)


def key_thumbprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a public key, for people to compare."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).digest().hex(":").upper()
