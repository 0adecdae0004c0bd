"""A peer's credentials in each mode of security: certificates, or a token.

In insecure mode there are no credentials: None stands for them.
"""

from __future__ import annotations

import datetime
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from peer.config.options import SecurityOptions
from peer.errors import SecurityError
from peer.net.security.certificates import (
    Identity,
    Role,
    check_dates,
    identify,
    is_authority,
    parse_certificate,
    public_key,
    utc_now,
    was_signed_by,
)
from peer.net.security.keys import parse_key, read_file, read_secret
from peer.net.security.revocation_list import RevocationList

SYSTEM_AUTHORITIES = "system"
_MIN_TOKEN = 16
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{{_MIN_TOKEN},512}}")


@dataclass
class Credentials:
    """A certificate with its key, and the authority that must have signed it and those of all others; all PEM.

    All parts of a peer share one, which `renew` changes while it runs.
    """

    identity: Identity
    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    revoked: RevocationList | None = field(default=None, repr=False, compare=False)
    """Certificates that the run's authority revoked; the transport keeps the list up to date."""

    @property
    def authority_until(self) -> datetime.datetime:
        """When the authority's own certificate ends, and all others with it."""
        return parse_certificate(self.ca, "our CA").not_valid_after_utc

    def renew(self, newer: Credentials) -> bool:
        """Take over certificate and key from here on; return whether they are others. Links that are open stay. Raises
        SecurityError unless they are the same holder's, of the same run."""
        before, now = self.identity, newer.identity
        if (now.name, now.role, now.index) != (before.name, before.role, before.index) or newer.ca != self.ca:
            raise SecurityError(f"the new certificate is not that of {before.name!r} in this run; restore the old one")
        if now.thumbprint == before.thumbprint:
            return False
        # The key first: gRPC's threads look at the certificate to see whether there is a new pair.
        self.key = newer.key
        self.certificate, self.identity = newer.certificate, now
        return True


@dataclass(frozen=True)
class TokenAccess:
    """Access where something on the way ends TLS: a secret that all peers of the run share.

    It proves that its holder belongs to the run, not which of its peers it is.
    """

    token: str = field(repr=False)
    ca: bytes | None = None
    """Authorities (PEM) that sign for listeners, or for the load balancers before them; None: the system's."""
    certificate: bytes | None = None
    """Our listener's, PEM; None: it speaks without TLS, to a load balancer that ends it."""
    key: bytes | None = field(default=None, repr=False)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every stream and call."""
        return (("authorization", f"Bearer {self.token}"),)

    def admits(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether the metadata of a stream or call holds the token."""
        shown = [value for key, value in metadata if key == "authorization"]
        expected = f"Bearer {self.token}".encode()
        return len(shown) == 1 and hmac.compare_digest(
            shown[0].encode() if isinstance(shown[0], str) else shown[0], expected
        )


Access = Credentials | TokenAccess


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
    now = now or utc_now()
    ca_file, certificate_file, key_file = (base_dir / each for each in (options.ca, options.certificate, options.key))
    ca_pem, certificate_pem, key_pem = read_file(ca_file), read_file(certificate_file), read_secret(key_file)
    ca = parse_certificate(ca_pem, ca_file)
    certificate = parse_certificate(certificate_pem, certificate_file)
    key = parse_key(key_pem, key_file)

    if not is_authority(ca):
        raise SecurityError(f"{ca_file} is not the certificate of an authority; security.ca wants the run's ca.pem")
    check_dates(ca, ca_file, now)
    check_dates(certificate, certificate_file, now)
    if public_key(certificate, certificate_file) != key.public_key():
        raise SecurityError(f"{key_file} is not the key of {certificate_file}; take both from the same device's folder")
    if not was_signed_by(certificate, ca):
        raise SecurityError(
            f"{certificate_file} is not signed by {ca_file}; they belong to different runs, issue the certificate anew"
        )
    identity = identify(certificate_pem, str(certificate_file))
    if identity.role is not role:
        raise SecurityError(
            f"{certificate_file} is the certificate of {identity.role.with_article}, "
            f"where one of {role.with_article} is needed"
        )
    if name is not None and identity.name != name:
        raise SecurityError(
            f"{certificate_file} is made out to {identity.name!r}, but this peer is {name!r}; a run knows peers by"
            f" their names: give a renamed device the name {identity.name!r} again in [[peers]] on all devices, or let"
            f" it join as a new one (`sotto init --join {name} --name {name}`); otherwise, correct peer.index"
        )
    revoked = RevocationList(ca_pem, base_dir / options.revoked)
    try:
        revoked.check(identity.serial, identity.name)
    except SecurityError as error:
        ask = f"`sotto init --join renewed --name {identity.name}`"
        raise SecurityError(f"{certificate_file}: {error}; ask for a new one with {ask}") from None
    return Credentials(identity, ca_pem, certificate_pem, key_pem, revoked)


def check_current(identity: Identity, revoked: RevocationList | None) -> None:
    """Raise SecurityError if a certificate is not valid today, or was revoked."""
    if not identity.not_before <= utc_now() <= identity.not_after:
        raise SecurityError(
            f"the certificate of {identity.name!r} is valid from {identity.not_before:%Y-%m-%d} to "
            f"{identity.not_after:%Y-%m-%d}, and not today"
        )
    if revoked is not None:
        revoked.check(identity.serial, identity.name)


def _load_token(options: SecurityOptions, base_dir: Path) -> TokenAccess:
    file = base_dir / options.token
    token = read_secret(file).decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(token):
        raise SecurityError(
            f"{file} does not hold a token: {_MIN_TOKEN} or more letters, digits, '-' and '_', the same on every "
            "device; `openssl rand -hex 32` prints a good one"
        )
    ca = None if options.ca == SYSTEM_AUTHORITIES else read_file(base_dir / options.ca)
    if options.plain_listener:
        return TokenAccess(token, ca)
    certificate_file, key_file = base_dir / options.certificate, base_dir / options.key
    certificate, key = read_file(certificate_file), read_secret(key_file)
    shown = parse_certificate(certificate, certificate_file)
    if public_key(shown, certificate_file) != parse_key(key, key_file).public_key():
        raise SecurityError(f"{key_file} is not the key of {certificate_file}; take both from the same device's folder")
    return TokenAccess(token, ca, certificate, key)
