"""The list of peers that a run began with, and the meaning of entries in a peer's file that differ from it.

Peers are numbered by their place in `[[peers]]`, and numbers must never change during a run. The first list is
therefore kept beside the state. A peer that is added to the file later gets the next number; a peer that is removed
from it keeps its number and is to be declared lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peer.config.options import SECTIONS, Config, PeerAddress
from peer.errors import ConfigError, StateError
from peer.state.disk import Disk
from peer.state.kept_file import KeptFile

PEER_LIST = KeptFile[Sequence[PeerAddress]](
    "peers.json",
    lambda peers: [peer.model_dump() for peer in peers],
    # pydantic raises a ValueError.
    lambda tree: [PeerAddress.model_validate(each) for each in tree],
    "restore it from a copy, or delete it if peer.toml lists the peers that the run began with",
    indent=1,
)


def settle(config: Config, base: Path) -> Config:
    """Return the configuration of a file, renumbered as in the run that its state folder belongs to, if there is one.
    Raises StateError if the folder belongs to another peer."""
    folder = base / config.state.directory
    # Opening a folder that cannot be one will name the fault.
    kept = PEER_LIST.read(Disk(folder))
    if kept is None:
        return config
    listed = {peer.name: peer for peer in config.peers}
    names = [peer.name for peer in kept]
    own = config.own.name
    if own not in names:
        raise StateError(
            f"{folder} holds the state of another run: its list of peers does not include {own!r}; if this"
            " device was renamed, give it back its name in [[peers]] on all devices"
        )
    added = tuple(peer.model_copy(update={"admitted": True}) for peer in config.peers if peer.name not in names)
    peers = (*(_moved(peer, listed.get(peer.name)) for peer in kept), *added)
    own_options = config.peer.model_copy(update={"index": names.index(own)})
    return config.model_copy(update={"peers": peers, "peer": own_options})


def keep(disk: Disk, peers: Sequence[PeerAddress]) -> None:
    """Save the list that a run begins with beside its state, unless one is there. Raises StateError."""
    if PEER_LIST.name not in disk.names():
        PEER_LIST.keep(disk, peers)


def refuse_other_changes(old: Config, new: Config) -> None:
    """Raise ConfigError for the first key in which two files differ, other than peers that were added or removed."""
    for section, kind in SECTIONS.items():
        if section == "peers":
            continue
        for key in kind.model_fields:
            before, now = getattr(getattr(old, section), key), getattr(getattr(new, section), key)
            # Numbers follow from the list. Below, the own names are compared instead.
            if before != now and (section, key) != ("peer", "index"):
                raise _cannot_change(f"{section}.{key}", before, now)
    own, own_now = old.own.name, new.own.name
    if own != own_now:
        raise ConfigError(f"is the place of {own_now!r} in the new list, but this peer is {own!r}", key="peer.index")
    before_by_name = {peer.name: peer for peer in old.peers}
    for peer in new.peers:
        known = before_by_name.get(peer.name, peer)
        for key in PeerAddress.model_fields:
            before, now = getattr(known, key), getattr(peer, key)
            if before != now:
                raise _cannot_change(f"peers.{peer.name}.{key}", before, now)


def _cannot_change(key: str, before: object, now: object) -> ConfigError:
    return ConfigError(
        f"was {before!r} when this peer was started. While it runs, only entries of [[peers]] can be added or removed; "
        "restore the old value, or stop the peer and start it again",
        key=key,
        value=now,
    )


def _moved(kept: PeerAddress, listed: PeerAddress | None) -> PeerAddress:
    """Return the entry that the run began with, at the address that the file has now."""
    if listed is None:
        return kept
    return kept.model_copy(update={"advertise": listed.advertise, "relay": listed.relay})
