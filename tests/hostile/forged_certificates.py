"""Certificates, requests and lists that no library would write, with genuine signatures: DER, put together by hand."""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from peer.net.security.authority import CertificateAuthority
from peer.net.security.certificates import der as to_der

AUTHORITY = CertificateAuthority.create("tests")
KEY = ec.generate_private_key(ec.SECP256R1())

ECDSA_SHA256 = bytes.fromhex("06082a8648ce3d040302")
COMMON_NAME = bytes.fromhex("0603550403")
ALTERNATIVES = bytes.fromhex("0603551d11")
CONSTRAINTS = bytes.fromhex("0603551d13")
REASON = bytes.fromhex("300a0603551d1504030a0101")
CRL_NUMBER = bytes.fromhex("0603551d14")


def tlv(tag: int, *content: bytes) -> bytes:
    """Return one element: a tag, the length, the content."""
    body = b"".join(content)
    if len(body) < 128:
        return bytes((tag, len(body))) + body
    length = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes((tag, 128 + len(length))) + length + body


def seq(*content: bytes) -> bytes:
    return tlv(0x30, *content)


def integer(value: int) -> bytes:
    return tlv(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def name(value: bytes = b"ada", *, tag: int = 0x0C, times: int = 1) -> bytes:
    """Return a distinguished name of one common name, as UTF8String unless `tag` says otherwise."""
    return seq(*[tlv(0x31, seq(COMMON_NAME, tlv(tag, value)))] * times)


def time(text: bytes, tag: int = 0x17) -> bytes:
    return tlv(tag, text)


VALIDITY = seq(time(b"200101000000Z"), time(b"491231235959Z"))


def extension(oid: bytes, value: bytes, *, critical: bool = False) -> bytes:
    return seq(oid, *([b"\x01\x01\xff"] if critical else []), tlv(0x04, value))


def alternatives(*names: bytes) -> bytes:
    return extension(ALTERNATIVES, seq(*names))


def uri(text: bytes) -> bytes:
    return tlv(0x86, text)


ADA = (tlv(0x82, b"ada"), uri(b"urn:sottovoce:role:peer"))


def spki(key: PublicKeyTypes | None = None) -> bytes:
    return (key or KEY.public_key()).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def issuer() -> bytes:
    return AUTHORITY._certificate.subject.public_bytes()


def signed(tbs: bytes, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None) -> bytes:
    key = key or AUTHORITY._key
    if isinstance(key, rsa.RSAPrivateKey):
        signature = key.sign(tbs, padding.PKCS1v15(), hashes.SHA256())
    else:
        signature = key.sign(tbs, ec.ECDSA(hashes.SHA256()))
    return seq(tbs, seq(ECDSA_SHA256), tlv(0x03, b"\0", signature))


def certificate(
    *,
    version: int | None = 2,
    serial: bytes = integer(77),
    validity: bytes = VALIDITY,
    subject: bytes = name(),
    key: bytes | None = None,
    extensions: tuple[bytes, ...] | None = (alternatives(*ADA),),
    algorithm: bytes = seq(ECDSA_SHA256),
) -> bytes:
    """Return a certificate (DER) that the authority has signed; with no arguments, one that counts.

    `version` is as it is written: 2 for version 3, None for none.
    """
    return signed(
        seq(
            b"" if version is None else tlv(0xA0, integer(version)),
            serial,
            algorithm,
            issuer(),
            validity,
            subject,
            spki() if key is None else key,
            b"" if extensions is None else tlv(0xA3, seq(*extensions)),
        )
    )


def request(
    *,
    version: int = 0,
    subject: bytes = name(),
    key: bytes | None = None,
    names: tuple[bytes, ...] | None = (tlv(0x82, b"ada"),),
) -> bytes:
    """Return a request (DER), signed with its own key."""
    asked = b"" if names is None else seq(bytes.fromhex("06092a864886f70d01090e"), tlv(0x31, seq(alternatives(*names))))
    return signed(seq(integer(version), subject, spki() if key is None else key, tlv(0xA0, asked)), KEY)


def revocations(
    *,
    version: int | None = 1,
    number: bytes | None = extension(CRL_NUMBER, integer(5)),
    update: bytes = time(b"250101000000Z"),
    entries: tuple[bytes, ...] = (seq(integer(77), time(b"250101000000Z")),),
    more: tuple[bytes, ...] = (),
) -> bytes:
    """Return a list of revoked certificates (DER) that the authority has signed."""
    return signed(
        seq(
            b"" if version is None else integer(version),
            seq(ECDSA_SHA256),
            issuer(),
            update,
            seq(*entries) if entries else b"",
            b"" if number is None and not more else tlv(0xA0, seq(*([] if number is None else [number]), *more)),
        )
    )


def armoured(content: bytes, label: str) -> bytes:
    """Return DER as PEM."""
    return f"-----BEGIN {label}-----\n{base64.encodebytes(content).decode()}-----END {label}-----\n".encode()


def _rsa_512() -> bytes:
    # No library makes such a key any more: the modulus is any number of 512 bits.
    modulus = integer((1 << 511) | 0xB7E151628AED2A6ABF7158809CF4F3C7)
    algorithm = seq(bytes.fromhex("06092a864886f70d010101"), b"\x05\x00")
    return seq(algorithm, tlv(0x03, b"\0", seq(modulus, integer(65537))))


def _on_curve(oid: str, point: bytes) -> bytes:
    return seq(seq(bytes.fromhex("06072a8648ce3d0201"), bytes.fromhex(oid)), tlv(0x03, b"\0", point))


P256 = "06082a8648ce3d030107"

CERTIFICATES: dict[str, bytes] = {
    "version 1": certificate(version=None, extensions=None),
    "version 1 with extensions": certificate(version=None),
    "version 2": certificate(version=1, extensions=None),
    "version 4": certificate(version=3),
    "version 74": certificate(version=73),
    "a negative version": certificate(version=-1),
    "a version of 200 bits": certificate(version=1 << 200),
    "no extensions": certificate(extensions=None),
    "an empty list of extensions": certificate(extensions=()),
    "no alternative names": certificate(extensions=(extension(CONSTRAINTS, seq(), critical=True),)),
    "an extension twice": certificate(extensions=(alternatives(*ADA), alternatives(*ADA))),
    "alternative names that are none": certificate(extensions=(extension(ALTERNATIVES, b"\x05\x00"),)),
    "alternative names of another kind": certificate(extensions=(alternatives(*ADA, tlv(0xA3, seq())),)),
    "an IP address of 3 bytes": certificate(extensions=(alternatives(*ADA, tlv(0x87, b"abc")),)),
    "a URI that is no text": certificate(extensions=(alternatives(*ADA, uri(b"\xff\xfe")),)),
    "two roles": certificate(extensions=(alternatives(*ADA, uri(b"urn:sottovoce:role:operator")),)),
    "no role": certificate(extensions=(alternatives(ADA[0]),)),
    "an unknown role": certificate(extensions=(alternatives(ADA[0], uri(b"urn:sottovoce:role:king")),)),
    "two numbers": certificate(
        extensions=(alternatives(*ADA, uri(b"urn:sottovoce:index:4"), uri(b"urn:sottovoce:index:5")),)
    ),
    "a number that is none": certificate(extensions=(alternatives(*ADA, uri(b"urn:sottovoce:index:-1")),)),
    "a number of 5000 digits": certificate(
        extensions=(alternatives(*ADA, uri(b"urn:sottovoce:index:" + b"9" * 5000)),)
    ),
    "an unreadable extension": certificate(extensions=(alternatives(*ADA), extension(CONSTRAINTS, b"\xff\xff"))),
    "a serial of 60 bytes": certificate(serial=integer(1 << 479)),
    "a serial of 0": certificate(serial=integer(0)),
    "a negative serial": certificate(serial=integer(-5)),
    "an empty serial": certificate(serial=tlv(0x02)),
    "the 45th of a month": certificate(validity=seq(time(b"200145000000Z"), time(b"491231235959Z"))),
    "a date of letters": certificate(validity=seq(time(b"yesterday"), time(b"491231235959Z"))),
    "a date without a zone": certificate(validity=seq(time(b"200101000000"), time(b"491231235959Z"))),
    "the year 0": certificate(validity=seq(time(b"00000101000000Z", 0x18), time(b"491231235959Z"))),
    "an end before the beginning": certificate(validity=seq(time(b"491231235959Z"), time(b"200101000000Z"))),
    "no dates": certificate(validity=seq()),
    "no name": certificate(subject=seq()),
    "two names": certificate(subject=name(times=2)),
    "a name that is no UTF-8": certificate(subject=name(b"\xff\xfe\xfd")),
    "a name of half characters": certificate(subject=name(b"\xd8\x00", tag=0x1E)),
    "a name of bits": certificate(subject=name(b"\0ada", tag=0x03)),
    "a name with an escape": certificate(subject=name(b"ada\x1b[2J")),
    "an empty name": certificate(subject=name(b"")),
    "a name of 3000 characters": certificate(subject=name(b"a" * 3000)),
    "a key on P-384": certificate(key=spki(ec.generate_private_key(ec.SECP384R1()).public_key())),
    "a key on an unknown curve": certificate(key=_on_curve("06052b81040021", bytes(57))),
    "a key on a curve of its own": certificate(key=_on_curve("3003020101", bytes(65))),
    "a point off the curve": certificate(key=_on_curve(P256, b"\x04" + bytes(63) + b"\x01")),
    "the point at infinity": certificate(key=_on_curve(P256, b"\0")),
    "an RSA key of 512 bits": certificate(key=_rsa_512()),
    "an RSA key": certificate(key=spki(rsa.generate_private_key(65537, 2048).public_key())),
    "an Ed25519 key": certificate(key=spki(ed25519.Ed25519PrivateKey.generate().public_key())),
    "a DSA key": certificate(key=spki(dsa.generate_private_key(1024).public_key())),
    "a key of an unknown kind": certificate(key=seq(seq(bytes.fromhex("06032a0304")), tlv(0x03, b"\0"))),
    "another algorithm inside": certificate(algorithm=seq(bytes.fromhex("06092a864886f70d01010b"), b"\x05\x00")),
    "an unknown algorithm inside": certificate(algorithm=seq(bytes.fromhex("06032a0304"))),
    "bytes behind it": certificate() + b"more",
    "nothing": b"",
    "an empty sequence": seq(),
}

REQUESTS: dict[str, bytes] = {
    "version 8": request(version=7),
    "no name": request(subject=seq()),
    "two names": request(subject=name(times=2)),
    "a name that is no UTF-8": request(subject=name(b"\xff\xfe")),
    "a name of bits": request(subject=name(b"\0ada", tag=0x03)),
    "a name with an escape": request(subject=name(b"ada\x1b[2J")),
    "a name of two lines": request(subject=name(b"ada\nsigned: yes")),
    "a name of 300 characters": request(subject=name(b"a" * 300)),
    "no alternative names": request(names=None),
    "alternative names of another kind": request(names=(tlv(0xA3, seq()),)),
    "an address without a port": request(names=(uri(b"urn:sottovoce:address:10.0.0.9"),)),
    "an address with an escape": request(names=(uri(b"urn:sottovoce:address:ada\x1b[2J:7700"),)),
    "a port of 5000 digits": request(names=(uri(b"urn:sottovoce:address:ada:" + b"7" * 5000),)),
    "two addresses": request(names=(uri(b"urn:sottovoce:address:a:1"), uri(b"urn:sottovoce:address:b:1"))),
    "a key on P-384": request(key=spki(ec.generate_private_key(ec.SECP384R1()).public_key())),
    "a key on an unknown curve": request(key=_on_curve("06052b81040021", bytes(57))),
    "an RSA key of 512 bits": request(key=_rsa_512()),
    "somebody else's key": request(key=spki(ec.generate_private_key(ec.SECP256R1()).public_key())),
    "a certificate": to_der(AUTHORITY.certificate),
    "nothing": b"",
}

REVOCATIONS: dict[str, bytes] = {
    "version 1": revocations(version=None, number=None),
    "version 3": revocations(version=2),
    "version 74": revocations(version=73),
    "no number": revocations(number=None),
    "a number twice": revocations(more=(extension(CRL_NUMBER, integer(6)),)),
    "a number that is none": revocations(number=extension(CRL_NUMBER, b"\x05\x00")),
    "a negative number": revocations(number=extension(CRL_NUMBER, integer(-3))),
    "a number of 5000 bits": revocations(number=extension(CRL_NUMBER, integer(1 << 5000))),
    "a month 13": revocations(update=time(b"251301000000Z")),
    "an entry of the 45th": revocations(entries=(seq(integer(77), time(b"250145000000Z")),)),
    "an entry without a date": revocations(entries=(seq(integer(77)),)),
    "an entry of nothing": revocations(entries=(seq(),)),
    "an entry's extension twice": revocations(entries=(seq(integer(77), time(b"250101000000Z"), seq(REASON, REASON)),)),
    "a certificate": to_der(AUTHORITY.certificate),
    "nothing": b"",
}
