"""Authorisation at this peer: to open a stream as a neighbour, to wait or call at its relay, to make a control call.

Each mode of security answers in its own way. With certificates, everybody has a name and a role, and a certificate can
be revoked. A token says only that its holder belongs to the run. In insecure mode everybody may say that they are
anybody, and only this machine may control the peer. A caller that is turned away gets the sentence of a SecurityError.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping

from peer.errors import SecurityError
from peer.foreign_text import quote
from peer.net import tcp_info
from peer.net.neighbor import Neighbor
from peer.net.rpc import Caller
from peer.net.security.certificates import Identity, Role, identify
from peer.net.security.credentials import Access, Credentials, TokenAccess

CONTROL_VERBS = ("status", "stop", "snapshot", "reload", "leave", "remove", "metrics", "revoke", "probe")
_OPEN_VERBS = ("status", "revoke", "probe")
"""Calls that every peer of the run may make."""

_NO_TOKEN = "the caller does not show this run's token; security.mode and the token must be the same on every peer"


class Admission:
    """The rules of one peer."""

    def __init__(
        self, access: Access | None, *, me: int, name: str, neighbors: Mapping[int, Neighbor], hears_newcomers: bool
    ) -> None:
        """`neighbors` are looked at on each call; `hears_newcomers`: whether peers that are none may ask to join."""
        self.members: set[str] = set()
        """Names of all peers of the run that are known: this peer may relay for them."""
        self.dropped: dict[str, str] = {}
        """Name → why that peer is no neighbour any more."""
        self._access = access
        self._me, self._name, self._neighbors, self._hears_newcomers = me, name, neighbors, hears_newcomers

    @property
    def is_certified(self) -> bool:
        """Whether callers have names that they cannot choose."""
        return isinstance(self._access, Credentials)

    def identity(self, caller: Caller) -> Identity | None:
        """Return whose certificate a caller showed; None in modes without. Raises SecurityError if it was revoked."""
        if not isinstance(self._access, Credentials):
            return None
        if caller.certificate is None:
            raise SecurityError("the caller showed no certificate")
        identity = identify(caller.certificate, "the caller's certificate")
        if self._access.revoked is not None:
            self._access.revoked.check(identity.serial, identity.name)
        return identity

    def account(self, caller: Caller) -> str:
        """Return the key under which a caller's streams are counted: its name, or its IP address without names."""
        identity = self.identity(caller)
        if identity is not None:
            return identity.name
        address = tcp_info.parse_peer(caller.address)
        return caller.address if address is None else address[0]

    def check_stream(self, caller: Caller) -> None:
        """Raise SecurityError if a caller may not even say hello."""
        self._check_token(caller)
        identity = self.identity(caller)
        if identity is None:
            return
        if identity.role is not Role.PEER:
            raise SecurityError(
                f"{quote(identity.name)} shows an operator's certificate, which does not admit it as a peer"
            )
        # A certificate with a number is that of a newcomer, and a device that was lost may come back under another
        # number; its hello says more.
        if self._hears_newcomers and (identity.index is not None or identity.name in self.members):
            return
        if identity.name in self.dropped:
            raise SecurityError(self.dropped[identity.name])
        if all(identity.name != neighbor.name for neighbor in self._neighbors.values()):
            same = "graph" if identity.name in self.members else "name of that device in [[peers]]"
            raise SecurityError(
                f"{quote(identity.name)} is no neighbour of peer {self._me}, {quote(self._name)}; compare the {same} on"
                " both devices"
            )

    def relay_user(self, caller: Caller, claimed: str) -> str:
        """Return the name of a member that wants to use this peer as a relay. Raises SecurityError."""
        self._check_token(caller)
        identity = self.identity(caller)
        if identity is not None:
            if identity.role is not Role.PEER or identity.name != claimed:
                raise SecurityError(
                    f"{quote(claimed)} shows the certificate of {identity.role.value} {identity.name!r}"
                )
            if identity.index is not None:
                return claimed  # A newcomer, perhaps on its way to a sponsor: the CA vouches for it.
        if claimed not in self.members:
            raise SecurityError(f"{quote(claimed)} is no peer of this run; compare the lists of peers")
        return claimed

    def check_control(self, verb: str, caller: Caller) -> None:
        """Raise SecurityError if a caller may not make a control call."""
        self._check_token(caller)
        if isinstance(self._access, TokenAccess):
            return
        identity = self.identity(caller)
        if identity is not None:
            if identity.role is not Role.OPERATOR and identity.name != self._name and verb not in _OPEN_VERBS:
                raise SecurityError(
                    f"{verb} needs an operator's certificate, or this peer's own; {quote(identity.name)} has neither"
                )
            return
        address = tcp_info.parse_peer(caller.address)
        if verb not in _OPEN_VERBS and (address is None or not ipaddress.ip_address(address[0]).is_loopback):
            raise SecurityError(f'with security.mode = "insecure", {verb} is only taken from this machine')

    def is_trusted(self, caller: Caller) -> bool:
        """Return whether the calls of a caller are not counted: an operator's, this peer's own, and where nobody has a
        certificate everybody's. Raises SecurityError like `identity`."""
        identity = self.identity(caller)
        return identity is None or identity.role is Role.OPERATOR or identity.name == self._name

    def _check_token(self, caller: Caller) -> None:
        if isinstance(self._access, TokenAccess) and not self._access.admits(caller.metadata):
            raise SecurityError(_NO_TOKEN)


@contextlib.contextmanager
def counted(waiting: Counter[str], account: str) -> Iterator[None]:
    """Count one more stream of an account meanwhile. Accounts that are at 0 are not kept."""
    waiting[account] += 1
    try:
        yield
    finally:
        waiting[account] -= 1
        waiting += Counter()
