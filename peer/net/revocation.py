"""Which certificates of a run's authority are no longer good.

The list is an X.509 CRL (RFC 5280, section 5), signed by the authority and numbered. A peer takes it from the file
beside its certificate, or from any neighbour: the signature says that it is genuine and the number which of two is
newer, so that it does not matter who brought it. A newer list is kept on disk; an older one never replaces it.

gRPC's Python API cannot hand such a list to TLS. So the transport asks here, on every stream and call.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from peer.errors import SecurityError

MAX_BYTES = 60 * 1024
"""Small enough to travel as one note between peers; about 1,500 certificates."""
# A list says what is so until a newer one comes; that there is none must not stop a run.
_VALID_DAYS = 3653


class RevocationList:
    """The newest list that this process knows of."""

    def __init__(self, authority: bytes, path: Path | None = None) -> None:
        """Read the list of `authority` (PEM) from `path`, if that exists. Raises SecurityError if it is not one."""
        self.number = 0
        """Of the list; 0 where there is none."""
        self.pem = b""
        self.path = path
        self._authority = x509.load_pem_x509_certificate(authority)
        self._revoked: dict[int, datetime.datetime] = {}
        self._stamp: tuple[int, int] | None = None
        self.reload()

    def reload(self) -> bool:
        """Return whether the file held a newer list. Raises SecurityError if it holds anything else.

        Costs one `stat` while the file stays the same.
        """
        if self.path is None:
            return False
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            data = self.path.read_bytes()
        except FileNotFoundError:
            self._stamp = None
            return False
        except OSError as error:
            raise SecurityError(f"{self.path} cannot be read: {error.strerror}") from None
        return self._adopt(data, str(self.path))

    def take(self, pem: bytes) -> bool:
        """Return whether a list that somebody brought is newer than ours; then it is ours now, also on disk.

        Raises SecurityError if the authority did not sign it, or if it could not be written: it holds all the same.
        """
        if not self._adopt(pem, "the list of revoked certificates"):
            return False
        self._save()
        return True

    def check(self, serial: int, name: str) -> None:
        """Raise SecurityError if the certificate with this serial number, made out to `name`, was revoked."""
        when = self._revoked.get(serial)
        if when is not None:
            raise SecurityError(f"the certificate of {name!r} was revoked on {when:%Y-%m-%d %H:%M} UTC")

    def __contains__(self, serial: int) -> bool:
        return serial in self._revoked

    def __len__(self) -> int:
        return len(self._revoked)

    def _adopt(self, pem: bytes, source: str) -> bool:
        if len(pem) > MAX_BYTES:
            raise SecurityError(
                f"{source} has {len(pem)} bytes; a list of revoked certificates has {MAX_BYTES} at most"
            )
        try:
            listed = x509.load_pem_x509_crl(pem)
            number = int(listed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number)
            public_key = self._authority.public_key()
            assert isinstance(public_key, ec.EllipticCurvePublicKey)
            genuine = listed.issuer == self._authority.subject and listed.is_signature_valid(public_key)
            revoked = {each.serial_number: each.revocation_date_utc for each in listed}
        except (ValueError, TypeError, x509.ExtensionNotFound, x509.DuplicateExtension):
            raise SecurityError(f"{source} is not a list of revoked certificates; `sotto revoke` writes one") from None
        if not genuine:
            raise SecurityError(f"{source} is not signed by this run's CA; take the revoked.pem that lies beside it")
        if number <= self.number:
            return False
        self.number, self.pem, self._revoked = number, pem, revoked
        return True

    def _save(self) -> None:
        if self.path is None:
            return
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(beside, "wb") as file:
                file.write(self.pem)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
            status = self.path.stat()
            self._stamp = (status.st_mtime_ns, status.st_size)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise SecurityError(f"{self.path} cannot be written: {error.strerror}") from None


def sign_list(
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    older: bytes,
    serials: Iterable[int],
    *,
    now: datetime.datetime,
) -> bytes:
    """Return a list (PEM) that revokes `serials` beside what the `older` one (PEM, may be empty) holds.

    Raises SecurityError if the older one is none of this authority's, or the new one would be too long to travel.
    """
    pem = authority.public_bytes(serialization.Encoding.PEM)
    known = RevocationList(pem)
    if older:
        known.take(older)
    entries = dict.fromkeys(serials, now) | known._revoked
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now)
        .next_update(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.CRLNumber(known.number + 1), critical=False)
    )
    for serial, when in sorted(entries.items()):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
        builder = builder.add_revoked_certificate(entry)
    made = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    if len(made) > MAX_BYTES:
        raise SecurityError(f"{len(entries)} revoked certificates are more than one list holds; make a new authority")
    return made
