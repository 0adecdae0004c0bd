"""Requests for certificates: what a device sends to the machine that holds the authority.

The private key never leaves the device, and the request is no secret.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from peer.errors import SecurityError
from peer.net.security.certificates import ADDRESS_URI, MALFORMED
from peer.net.security.keys import key_pem, new_key

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")


@dataclass(frozen=True)
class Request:
    """What a device asks for."""

    name: str
    alternatives: tuple[str, ...]
    """Host names and IP addresses that stand in the certificate beside the name."""
    address: str | None
    """Where the others shall dial the device, "host:port"; None if they cannot."""
    key: ec.EllipticCurvePublicKey


def request_certificate(name: str, addresses: Iterable[str] = (), *, address: str | None = None) -> tuple[bytes, bytes]:
    """Return a request for a peer's certificate made out to `name`, and its new private key, both PEM.

    `addresses` (host names, IP addresses) stand beside the name; `address` ("host:port") is where the others shall
    dial the device. Raises SecurityError for names that cannot stand in a certificate.
    """
    key = new_key()
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
    """Return what a request asks for. Raises SecurityError if it is not one, or not of a key that this version uses."""
    try:
        request = x509.load_pem_x509_csr(pem)
        (common_name,) = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        alternatives = (
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        )
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        genuine = request.is_signature_valid
        key = request.public_key()
    except MALFORMED:
        raise SecurityError("this is not a request for a certificate; `sotto init --join` writes one") from None
    if not genuine or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SecurityError("the request is not signed by an ECDSA key on P-256, the only kind that this version uses")
    address = next((uri.removeprefix(ADDRESS_URI) for uri in uris if uri.startswith(ADDRESS_URI)), None)
    return Request(str(common_name.value), alternatives, address, key)


def request_thumbprint(request: bytes) -> str:
    """Return SHA-256 of the public key of a request, for people to compare on both machines."""
    encoded = read_request(request).key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(encoded).digest().hex(":").upper()


def general_name(name: str) -> x509.GeneralName:
    """Return a host name or IP address as it stands in a certificate. Raises SecurityError if it cannot."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if len(name) > 63 or not _NAME.fullmatch(name):
        raise SecurityError(
            f"no certificate can be made out to {name!r}; a name has letters, digits, '-' and '.', at most 63"
        )
    return x509.DNSName(name)
