"""The list of certificates that a run's authority revoked.

It is an X.509 CRL (RFC 5280, section 5), signed by the authority and numbered. A peer takes it from the file beside its
certificate or from any neighbour: the signature proves that it is genuine and the number tells which of two is newer,
so it does not matter who brought it. A newer list is kept on disk; an older one never replaces it.

gRPC's Python API cannot hand such a list to TLS, so the transport consults it for every stream and call.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from peer.errors import SecurityError
from peer.files import write_whole
from peer.net.security.certificates import parse_certificate, public_key, refused_as

MAX_BYTES = 60 * 1024
"""Small enough to travel as one note between peers; about 1,500 certificates."""
# No number of this length is ever reached by counting, and RFC 5280 allows no longer one.
_MAX_NUMBER_BITS = 160


class RevocationList:
    """The newest list that this process knows of."""

    def __init__(self, authority: bytes, path: Path | None = None) -> None:
        """Read the list of `authority` (PEM) from `path`, if that exists. Raises SecurityError if it is not one."""
        self.number = 0
        """The list's number; 0 without a list."""
        self.pem = b""
        self.path = path
        self._authority = parse_certificate(authority, "the authority")
        self._key = public_key(self._authority, "the authority")
        self.entries: dict[int, datetime.datetime] = {}
        """Serial number of a revoked certificate → when that was."""
        self._stamp: tuple[int, int] | None = None
        self.reload()

    def reload(self) -> bool:
        """Return whether the file held a newer list. Raises SecurityError if it holds anything else."""
        data = self.read_if_changed()
        return data is not None and self.adopt(data, str(self.path))

    def read_if_changed(self) -> bytes | None:
        """Return the file's contents if they changed since the last read. Raises SecurityError if it is unreadable.

        Costs one `stat` while the file stays the same, and changes nothing that `check` uses: it may run in a thread of
        its own.
        """
        if self.path is None:
            return None
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            return self.path.read_bytes()
        except FileNotFoundError:
            self._stamp = None
            return None
        except OSError as error:
            raise SecurityError(f"{self.path} cannot be read: {error.strerror}") from None

    def take(self, pem: bytes) -> bool:
        """Return whether a list from elsewhere is newer than ours; then it replaces ours, also on disk.

        Raises SecurityError if the authority did not sign it, or if it could not be written: then it holds until this
        process ends.
        """
        if not self.adopt(pem, "the list of revoked certificates"):
            return False
        self._save()
        return True

    def check(self, serial: int, name: str) -> None:
        """Raise SecurityError if the certificate with this serial number, made out to `name`, was revoked."""
        when = self.entries.get(serial)
        if when is not None:
            raise SecurityError(f"the certificate of {name!r} was revoked on {when:%Y-%m-%d %H:%M} UTC")

    def adopt(self, pem: bytes, source: str) -> bool:
        """Return whether a list is newer than ours; then it replaces ours in memory. Raises SecurityError."""
        if len(pem) > MAX_BYTES:
            raise SecurityError(
                f"{source} has {len(pem)} bytes; a list of revoked certificates has {MAX_BYTES} at most"
            )
        malformed = f"{source} is not a list of revoked certificates; `sotto admin revoke` writes one"
        with refused_as(malformed):
            listed = x509.load_pem_x509_crl(pem)
            genuine = listed.issuer == self._authority.subject and listed.is_signature_valid(self._key)
        if not genuine:
            raise SecurityError(f"{source} is not signed by this run's CA; take the revoked.pem beside it")
        with refused_as(malformed):
            number = listed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            if not 0 < number < 1 << _MAX_NUMBER_BITS:
                raise ValueError("no list has such a number")
            revoked = {}
            for each in listed:
                list(each.extensions)  # Decoded no earlier than here.
                revoked[each.serial_number] = each.revocation_date_utc
            # The rest of the text goes no further: neither to the disk nor to other peers.
            plain = listed.public_bytes(serialization.Encoding.PEM)
        if number <= self.number:
            return False
        self.number, self.pem, self.entries = number, plain, revoked
        return True

    def _save(self) -> None:
        if self.path is None:
            return
        try:
            write_whole(self.path, self.pem)
            status = self.path.stat()
            self._stamp = (status.st_mtime_ns, status.st_size)
        except OSError as error:
            raise SecurityError(f"{self.path} cannot be written: {error.strerror}") from None
