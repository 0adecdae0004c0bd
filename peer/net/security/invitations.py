"""Invitations: one line of text with which a device finds a run, knows its authority, and proves that it was invited.

    "sotto-invitation-1-", then in base32, lower case, without padding:
    SHA-256 of the CA's certificate (32 bytes) | ID (8) | secret (16) | expiry, in seconds since 1970 (8)
    | run | number of addresses (1) | each address, "host:port" | checksum: first 4 bytes of the SHA-256 of the rest

Texts are UTF-8 after a length of one byte. An invitation holds no key, certificate, setting, code or path: whoever
reads it can ask for a certificate, and gets none unless somebody confirms its name, address and key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from peer.errors import ConfigError, SecurityError
from peer.net.address import dialled_address

MOST_CHARACTERS = 4096
"""Far more than an invitation has: three addresses of the longest names take 1,400."""
MOST_ADDRESSES = 3
MOST_HOURS = 168
NONCE_BYTES = 32
ID_BYTES, SECRET_BYTES = 8, 16
_DIGEST_BYTES, _TIME_BYTES, _CHECKSUM_BYTES = 32, 8, 4
_TEXT = re.compile(r"sotto-invitation-([0-9]{1,4})-([a-z2-7]+)")
_VERSION = "1"
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LAST_SECOND = 1 << 36
"""Bound of expiries, in the year 4147: a date can hold it."""


@dataclass(frozen=True)
class Invitation:
    """What an invitation says."""

    run: str
    addresses: tuple[str, ...]
    """Where `sotto invite` listens, "host:port"."""
    authority: bytes
    """SHA-256 of the CA's certificate (DER)."""
    id: bytes
    secret: bytes = field(repr=False)
    expires: int
    """In seconds since 1970."""

    def text(self) -> str:
        """Return the invitation as one line."""
        data = self.authority + self.id + self.secret + self.expires.to_bytes(_TIME_BYTES, "big")
        data += _packed(self.run) + bytes([len(self.addresses)]) + b"".join(map(_packed, self.addresses))
        encoded = base64.b32encode(data + _checksum(data)).decode().rstrip("=").lower()
        return f"sotto-invitation-{_VERSION}-{encoded}"

    def proof(self, who: str, shown: bytes, nonces: Sequence[bytes], content: bytes) -> str:
        """Return the proof (hex) that `who`, "device" or "operator", knows the secret and says `content`, in the one
        connection with these nonces in which TLS showed the certificate `shown` (DER)."""
        parts = [who.encode(), self.run.encode(), self.authority, _digest(shown), self.id, *nonces, _digest(content)]
        # With lengths, two different lists of parts are never the same bytes.
        said = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.new(self.secret, said, hashlib.sha256).hexdigest()

    def is_proven(self, proof: str, who: str, shown: bytes, nonces: Sequence[bytes], content: bytes) -> bool:
        """Return whether a proof is the right one, in a time that does not tell how much of it is."""
        return hmac.compare_digest(proof.encode(), self.proof(who, shown, nonces, content).encode())


def read_invitation(text: str) -> Invitation:
    """Return the invitation in a text, which may be broken into lines. Raises SecurityError with what to do."""
    if len(text) > MOST_CHARACTERS:
        raise SecurityError("this is no invitation: none is so long; paste the one line that `sotto invite` printed")
    found = _TEXT.fullmatch("".join(text.split()).lower())
    if found is None:
        raise SecurityError(
            "this is no invitation; paste the line of `sotto invite`, from sotto-invitation- to its end"
        )
    if found[1] != _VERSION:
        raise SecurityError(
            f"this invitation has version {int(found[1])}, and this release reads {_VERSION}; install the release of"
            " the operator's machine here"
        )
    encoded = found[2].upper()
    try:
        data = base64.b32decode(encoded + "=" * (-len(encoded) % 8))
    except ValueError:
        data = b""
    content, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if not content or not hmac.compare_digest(checksum, _checksum(content)):
        raise SecurityError("this invitation is incomplete or was changed on its way; copy the whole line again")
    try:
        return _unpacked(content)
    except (ValueError, IndexError, ConfigError):
        # Its checksum is right, so that nobody truncated it.
        raise SecurityError("this invitation says what none can say; ask for another one") from None


def _unpacked(data: bytes) -> Invitation:
    """Return the invitation in checked bytes. Raises ValueError, IndexError or ConfigError."""
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        if at > len(data):
            raise ValueError("truncated")
        return data[at - count : at]

    authority, id_, secret = take(_DIGEST_BYTES), take(ID_BYTES), take(SECRET_BYTES)
    expires = int.from_bytes(take(_TIME_BYTES), "big")
    run = take(take(1)[0]).decode()
    count = take(1)[0]
    addresses = tuple(take(take(1)[0]).decode() for _ in range(count))
    if at != len(data) or not _RUN.fullmatch(run) or not 0 < count <= MOST_ADDRESSES or expires >= _LAST_SECOND:
        raise ValueError
    for address in addresses:
        dialled_address(address, key="address")
    return Invitation(run, addresses, authority, id_, secret, expires)


def _packed(text: str) -> bytes:
    encoded = text.encode()
    return bytes([len(encoded)]) + encoded


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _checksum(data: bytes) -> bytes:
    return _digest(data)[:_CHECKSUM_BYTES]
