"""Identities in a run: names and addresses of the peers that everybody lists, and of newcomers.

Rounds know numbers; people, certificates and sockets know names and addresses. Statements about a newcomer must agree
with its certificate, which the CA of the run has signed. In a run without certificates, only its sponsor vouches for
it.

A device that takes part again after it was lost has another number and the same name (`gossip.incarnations`). Its name
then stands for the newest of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from peer.config.options import Config, PeerAddress
from peer.errors import ConfigError, HandshakeRefused, SecurityError
from peer.foreign_text import quote
from peer.gossip.incarnations import MAX_INCARNATIONS, MAX_NEWCOMERS, Numbering
from peer.gossip.membership import Newcomer
from peer.net.address import split_address
from peer.net.neighbor import Neighbor, RelayAddress
from peer.net.security.certificates import der, vouched_identity
from peer.net.security.credentials import Access, Credentials, check_current


class Roster:
    """All peers that this one knows, by number."""

    def __init__(self, config: Config, access: Access | None, incarnation: int = 0) -> None:
        """`access`: what this peer proves its identity with. `incarnation`: which one of its device it is. Raises
        SecurityError if its certificate is for another place in the list."""
        self.numbering = Numbering(config.num_listed)
        self.index = config.peer.index
        self.me = self.numbering.number(self.index, incarnation)
        self._listens = config.peer.listen is not None
        self._num_listed = config.num_listed
        self._entries = dict(enumerate(config.peers))
        self._expected = {peer for peer, entry in self._entries.items() if entry.admitted and peer != self.index}
        """Peers that only this device lists and that have not joined yet. Their numbers are guesses: the certificate of
        each has the right one."""
        self._entries[self.me] = self._entries[self.index]
        self._callers: dict[int, str] = {}
        """Names of callers that have not been introduced yet."""
        self._certificates: dict[int, bytes] = {}
        """Certificates of introduced peers, DER."""
        self._credentials = access if isinstance(access, Credentials) else None
        if self._credentials is not None and config.peers[self.index].admitted:
            index = self._credentials.identity.index
            if index != self.index:
                place = "no place in the list" if index is None else f"peer {index}"
                raise SecurityError(
                    f"{config.security.certificate} is made out to {place}, and peer.index is {self.me}; take the "
                    "whole folder that `sotto admin sign` wrote"
                )

    def __getitem__(self, peer: int) -> PeerAddress:
        return self._entries[peer]

    def __contains__(self, peer: object) -> bool:
        return peer in self._entries

    def name(self, peer: int) -> str:
        """Return the name of a peer, which is that of its device; "peer N" if that is not known."""
        if peer in self._callers and (peer not in self._entries or peer in self._expected):
            return self._callers[peer]
        entry = self._entries.get(peer) or self._entries.get(self.numbering.device(peer))
        return f"peer {peer}" if entry is None else entry.name

    def index_of(self, name: str) -> int | None:
        """Return the number of the peer of that name, the newest of its device; None if there is none."""
        return max((peer for peer, entry in self._entries.items() if entry.name == name), default=None)

    def newest(self, peer: int) -> int:
        """Return the newest known number of the device that has this one."""
        device = self.numbering.device(peer)
        return max((each for each in self._entries if self.numbering.device(each) == device), default=peer)

    def is_former(self, peer: int) -> bool:
        """Return whether a number is that of a device which takes part again under a newer one."""
        return self.newest(peer) != peer

    @property
    def names(self) -> list[str]:
        """The names of all known peers, in the order of their numbers."""
        return list(dict.fromkeys(entry.name for _, entry in sorted(self._entries.items())))

    @property
    def newcomers(self) -> dict[int, PeerAddress]:
        """The peers that are not in everybody's list, each under the newest number of its device."""
        admitted = {peer: entry for peer, entry in sorted(self._entries.items()) if entry.admitted}
        return {peer: entry for peer, entry in admitted.items() if not self.is_former(peer)}

    def certificate(self, peer: int) -> bytes:
        """Return the certificate of a peer beyond everybody's list, DER; empty where it was not introduced, or nobody
        has certificates."""
        if peer == self.me and self._credentials is not None:
            return der(self._credentials.certificate)
        return self._certificates.get(peer, b"")

    @property
    def others(self) -> list[int]:
        """The other devices that this peer knows, each by the newest of its numbers, ascending."""
        newest = {self.numbering.device(peer): peer for peer in sorted(self._entries)}
        return sorted(peer for device, peer in newest.items() if device != self.index)

    @property
    def expected(self) -> frozenset[int]:
        """The peers that the file of this one lists beyond everybody's list, and that have not been introduced."""
        return frozenset(self._expected)

    def expect(self, entry: PeerAddress) -> None:
        """Add a peer that was added to the file and may join."""
        if self.index_of(entry.name) is None:
            number = max(map(self.numbering.device, self._entries)) + 1
            self._entries[number] = entry.model_copy(update={"admitted": True})
            self._expected.add(number)

    def forget(self, name: str) -> None:
        """Remove a peer that was taken out of the file before it joined."""
        number = self.index_of(name)
        if number in self._expected:
            self._expected.discard(number)
            del self._entries[number]

    def introduction(self) -> Newcomer | None:
        """Return what this peer says about itself when it asks to join; None if everybody lists it, under the number
        that it has. Everybody knows the address of a listed device."""
        own = self._entries[self.me]
        if not own.admitted and self.me == self.index:
            return None
        certificate = b"" if self._credentials is None else der(self._credentials.certificate)
        place = (own.advertise, own.relay) if own.admitted else (None, None)
        return Newcomer(own.name, *place, certificate)

    def check(self, peer: int, newcomer: Newcomer) -> None:
        """Raise ConfigError or SecurityError unless a newcomer is who it is said to be. The answer never changes: a
        replay of the journal asks again."""
        device = self.numbering.device(peer)
        if device < self._num_listed:
            self._check_listed(device, newcomer)
            return
        try:
            entry = _entry(newcomer)
        except ValidationError:
            raise ConfigError("no peer can have such a name", key="name", value=newcomer.name[:80]) from None
        if entry.advertise is not None:
            split_address(entry.advertise, key="advertise")
        if any(entry.name == self._entries[listed].name for listed in range(self._num_listed)):
            raise ConfigError(f"there is another {entry.name!r} in everybody's list")
        if self._credentials is None:
            return
        identity = vouched_identity(newcomer.certificate, self._credentials.ca)
        said = (identity.index, identity.name, identity.address, identity.relay)
        if said != (device, entry.name, entry.advertise, entry.relay):
            raise SecurityError(f"its certificate is that of peer {identity.index}, {identity.name!r}, or elsewhere")

    def _check_listed(self, device: int, newcomer: Newcomer) -> None:
        """Raise ConfigError or SecurityError unless a device that everybody lists is the one that is said to take part
        again."""
        name = self._entries[device].name
        if (newcomer.name, newcomer.advertise, newcomer.relay) != (name, None, None):
            raise ConfigError(f"peer {device} is {name!r} in everybody's list", key="name", value=newcomer.name[:80])
        if self._credentials is None:
            return
        identity = vouched_identity(newcomer.certificate, self._credentials.ca)
        if identity.name != name or identity.index not in (None, device):
            raise SecurityError(f"its certificate is that of {identity.name!r}")

    def check_today(self, newcomer: Newcomer) -> None:
        """Raise SecurityError if the certificate of a newcomer is not valid now or was revoked."""
        if self._credentials is not None:
            identity = vouched_identity(newcomer.certificate, self._credentials.ca)
            check_current(identity, self._credentials.revoked)

    def introduce(self, newcomers: Mapping[int, Newcomer]) -> list[int]:
        """Add newcomers that were checked; return the numbers of those that were not known."""
        fresh = []
        for peer, newcomer in newcomers.items():
            self._certificates[peer] = newcomer.certificate
            device = self.numbering.device(peer)
            entry = self._entries[device] if device < self._num_listed else _entry(newcomer)
            if peer != self.me and (peer in self._expected or self._entries.get(peer) != entry):
                if device >= self._num_listed:
                    self.forget(entry.name)
                self._expected.discard(peer)
                self._entries[peer] = entry
                fresh.append(peer)
        return fresh

    def met(self, numbers: Iterable[int]) -> bool:
        """Take note that known devices are members under these numbers; return whether any of them is new."""
        known = len(self._entries)
        for number in numbers:
            device = self.numbering.device(number)
            if self.numbering.is_possible(number) and device != self.index and device in self._entries:
                self._entries.setdefault(number, self._entries[device])
        return len(self._entries) > known

    def hear(self, peer: int, name: str, *, is_member: bool) -> Neighbor | None:
        """Return the entry for a caller that is not in everybody's list and may ask to join, or that is listed and a
        member; None for any other caller. Raises HandshakeRefused if the number belongs to another peer."""
        if peer < self._num_listed:
            knows = is_member and peer != self.index and self._entries[peer].name == name
            return self.neighbor(peer) if knows else None
        device = self.numbering.device(peer)
        if device in self._entries and device not in self._expected and self._entries[device].name != name:
            here = quote(self._entries[device].name)
            raise HandshakeRefused(f"it says it is peer {peer}, {quote(name)}, which is {here} here")
        if not self.numbering.is_possible(peer):
            raise HandshakeRefused(
                f"it says it is peer {peer}; this version knows {MAX_NEWCOMERS} devices beside its list, each of which"
                f" may take part {MAX_INCARNATIONS} times"
            )
        self._callers[peer] = name
        if peer in self._entries and self._entries[peer].name == name:
            return self.neighbor(peer)
        return Neighbor(peer, name, address=None, dial=False)

    def neighbor(self, peer: int) -> Neighbor:
        """Return the address of a neighbour, and whether this peer dials it first. Each pair has one connection.

        The lower number dials, unless only one of the two can be dialled. If neither can, the lower number dials
        through the relay of the other, unless only the lower one has a relay. A peer that joins later dials those that
        were there before it.
        """
        own, other = self._entries[self.me], self._entries[peer]
        begins, other_begins = self._begins(self.me), self._begins(peer)
        if begins != other_begins and own.advertise is not None and other.advertise is not None:
            # Otherwise the others would dial it in vain until it joins.
            return _neighbor(peer, other, own, dial=other_begins)
        if own.advertise is None and other.advertise is None:
            relay = self.relay_of(peer)
            dial = relay is not None and (self.me < peer or own.relay is None)
            calls = None if dial or own.relay is None else f"the relay {own.relay}"
            return Neighbor(peer, other.name, None, dial, relay, calls)
        can_be_dialled = self._listens and own.advertise is not None
        dial = other.advertise is not None and (self.me < peer or not can_be_dialled)
        return _neighbor(peer, other, own, dial=dial)

    def _begins(self, peer: int) -> bool:
        """Return whether the run begins with a peer."""
        return self._entries[peer].is_first and self.numbering.former(peer) is None

    def relay_of(self, peer: int) -> RelayAddress | None:
        """Return the relay at which a peer without an address waits for callers; None if there is none."""
        entry = self._entries[peer]
        if entry.advertise is not None or entry.relay is None:
            return None
        relay = self.index_of(entry.relay)
        address = None if relay is None else self._entries[relay].advertise
        # A newcomer may name a relay that has no address itself. The lists of this device were checked for that.
        return None if address is None else RelayAddress(entry.relay, address)


def _neighbor(peer: int, other: PeerAddress, own: PeerAddress, *, dial: bool) -> Neighbor:
    return Neighbor(peer, other.name, other.advertise, dial, calls=None if dial else own.advertise)


def _entry(newcomer: Newcomer) -> PeerAddress:
    return PeerAddress(name=newcomer.name, advertise=newcomer.advertise, relay=newcomer.relay, admitted=True)
