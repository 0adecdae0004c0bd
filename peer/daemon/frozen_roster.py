"""The list of peers that a run goes by, and what it means when the file of a peer lists others.

Peers are numbered by their place in `[[peers]]`, and numbers must never change while a run lasts. So the list that a
run began with is kept beside the state. Whoever is added to the file later gets a number after those; whoever is taken
out keeps its number, and is to be declared lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from peer.config import SECTIONS, Config, PeerAddress
from peer.errors import ConfigError, StateError
from peer.state.disk import Disk, replace

FILE = "peers.json"


@dataclass(frozen=True)
class Settled:
    """A configuration in the numbering of its run."""

    config: Config
    taken_out: tuple[str, ...]
    """Names that the run began with and the file does not list."""


def settle(config: Config, base: Path) -> Settled:
    """Return the configuration of a file in the numbering of the run that its state folder belongs to, if there is one.
    Raises StateError if the two are not of one peer."""
    path = base / config.state.directory / FILE
    kept = _read(path)
    if kept is None:
        return Settled(config, ())
    listed = {peer.name: peer for peer in config.peers}
    names = [peer.name for peer in kept]
    own = config.peers[config.peer.index].name
    if own not in names:
        raise StateError(f"{path.parent} is the state of a peer of another run: nobody in its list is {own!r}")
    added = tuple(peer.model_copy(update={"admitted": True}) for peer in config.peers if peer.name not in names)
    peers = (*(_moved(peer, listed.get(peer.name)) for peer in kept), *added)
    own_options = config.peer.model_copy(update={"index": names.index(own)})
    taken_out = tuple(name for name in names if name not in listed)
    settled = config.model_copy(update={"peers": peers, "peer": own_options})
    return Settled(settled, taken_out)


def keep(disk: Disk, peers: Sequence[PeerAddress]) -> None:
    """Keep the list that a run begins with beside its state, if none is kept there. Raises StateError."""
    if FILE in disk.names():
        return
    data = json.dumps([peer.model_dump() for peer in peers], indent=1).encode()
    try:
        replace(disk, FILE, [data])
    except OSError as error:
        raise StateError(f"{FILE} cannot be written: {error.strerror}") from None


def refuse_other_changes(old: Config, new: Config) -> None:
    """Raise ConfigError, with the key, for the first thing in which two files differ beside who is in their lists."""
    for section, kind in SECTIONS.items():
        if section == "peers":
            continue
        for key in kind.model_fields:
            before, now = getattr(getattr(old, section), key), getattr(getattr(new, section), key)
            # Numbers follow from the list; who this peer is, is compared below.
            if before != now and (section, key) != ("peer", "index"):
                raise _cannot_change(f"{section}.{key}", before, now)
    own, own_now = old.peers[old.peer.index].name, new.peers[new.peer.index].name
    if own != own_now:
        raise ConfigError(f"is the place of {own_now!r} in the new list; this is {own!r}", key="peer.index")
    before_by_name = {peer.name: peer for peer in old.peers}
    for peer in new.peers:
        known = before_by_name.get(peer.name, peer)
        for key in PeerAddress.model_fields:
            before, now = getattr(known, key), getattr(peer, key)
            if before != now:
                raise _cannot_change(f"peers.{peer.name}.{key}", before, now)


def _cannot_change(key: str, before: object, now: object) -> ConfigError:
    return ConfigError(
        f"was {before!r} when this peer was started, and only [[peers]] can gain or lose entries while it runs; put it "
        "back, or stop the peer and start it again",
        key=key,
        value=now,
    )


def _moved(kept: PeerAddress, listed: PeerAddress | None) -> PeerAddress:
    """Return a peer as the run knows it, at the address that the file has now."""
    if listed is None:
        return kept
    return kept.model_copy(update={"advertise": listed.advertise, "relay": listed.relay})


def _read(path: Path) -> list[PeerAddress] | None:
    try:
        return [PeerAddress.model_validate(each) for each in json.loads(path.read_bytes())]
    except (FileNotFoundError, NotADirectoryError):
        return None  # What is wrong with the folder is told by whoever opens it.
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, ValidationError):
        raise StateError(f"{path} is damaged; delete it if peer.toml lists those that the run began with") from None
