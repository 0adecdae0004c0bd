"""Adding devices to a cluster, and taking certificates back.

A new device makes its own key and a request (`request`). The machine that holds the authority shows what it would sign
(`propose`) and, once the operator has confirmed that, signs it (`admit`). Nothing changes on the other devices: the
certificate gives the new peer's position and address, so that running peers believe it when it joins. Signed
certificates are kept in `issued/`, so that they can be revoked (`revoke`) when a device is lost. The folder is the one
that `sotto init cluster` wrote.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peer.config.options import Config, PeerAddress, load, load_device
from peer.config.writer import write_bytes, write_peer_file
from peer.errors import ConfigError, SecurityError
from peer.files import instead_of
from peer.net.address import dialled_address, is_loopback, split_address, why_no_name
from peer.net.security.authority import PEER_DAYS, CertificateAuthority
from peer.net.security.certificates import Identity, Place, identify, is_signed_by, parse_certificate, public_key
from peer.net.security.keys import is_encrypted, parse_key, read_secret, write_secret
from peer.net.security.requests import Request, read_request, request_certificate
from peer.ops.cluster_files import join_address, listening_address, place_peers, read_named, refuse_mixed_loopback
from peer.run.plan import why_no_changes

REQUEST_FILE = "request.pem"
KEY_FILE = "peer.key"
CONFIG_FILE = "peer.toml"
LIST_FILE = "revoked.pem"
ISSUED = "issued"
_CA_KEY = "ca.key"


@dataclass(frozen=True)
class Proposal:
    """The part of a request that can be granted."""

    request: Request
    index: int
    """Position of the peer in its own `[[peers]]`."""
    entry: PeerAddress
    """Entry with the name and the address that are signed."""
    known: bool
    """Whether the list of peers has it already: then its certificate is renewed."""
    left_out: tuple[str, ...]
    """Other names in the request, in printable form; not signed."""
    takes_seat: bool = False
    """Whether it gets a seat that `sotto init cluster` reserved, with that name."""


@dataclass(frozen=True)
class Admitted:
    """The result of a request."""

    identity: Identity
    index: int
    """Position of the peer in its own `[[peers]]`."""
    folder: Path
    """The folder to copy to the device."""


def request(directory: Path, name: str, host: str | None, port: int, *, again: bool = False) -> str:
    """Write a private key and a request for a certificate into the device's folder; return the key's thumbprint.

    `host` is where the others will reach it, HOST[:PORT]; "-" or None where nobody can. With `again`, a key that is
    there stays, and the request is made anew. Raises ConfigError, SecurityError if a key is there already.
    """
    (place,) = place_peers(None, [host or "-"], port)
    address = None if place.address is None else join_address(place.address, place.port)
    file = directory / KEY_FILE
    kept = parse_key(read_secret(file), file) if again and file.exists() else None
    pem, key = request_certificate(name, [place.address] if place.address else [], address=address, key=kept)
    # As whoever signs it reads it, before anything is written.
    thumbprint = read_request(pem).thumbprint
    if kept is None:
        write_secret(file, key)
    write_bytes(directory / REQUEST_FILE, pem)
    return thumbprint


def needs_passphrase(directory: Path) -> bool:
    """Return whether the key of the authority in a cluster's folder is encrypted."""
    return is_encrypted(directory / _CA_KEY)


def propose(
    directory: Path,
    request_pem: bytes,
    *,
    relay: str | None = None,
    passphrase: bytes | None = None,
    may_take_seat: bool = False,
) -> Proposal:
    """Return the proposal that `admit` would sign for a request, with the authority in the cluster's folder.

    `relay`: the peer at which the device waits for callers, where nobody can dial it. `passphrase`: of the
    authority's key, if it has one. With `may_take_seat` it gets a seat, if one is free, and without `relay` the first
    peer that others can dial, where it may have a neighbour that nobody can. Raises ConfigError, SecurityError.
    """
    authority = read_authority(directory, passphrase)
    model, _ = any_peer_file(directory)
    names = [peer.name for peer in model.peers]
    asked = read_request(request_pem)
    seats = free_seats(directory) if may_take_seat else []
    if may_take_seat and asked.address is None:
        relay = relay or _relay_among(model, seats[0] if seats else None)
    if seats:
        return Proposal(asked, *_seated(model, seats[0], asked.address, relay), False, asked.beyond, True)
    left_out = asked.beyond
    if asked.name in names:
        index = names.index(asked.name)
        entry = model.peers[index]
        # Where a listed peer is reached is for the lists to say.
        if asked.address not in (None, entry.advertise):
            left_out = (ascii(asked.address), *left_out)
        return Proposal(asked, index, entry, True, left_out)
    if (why := why_no_changes(model)) is not None:
        raise ConfigError(f"{asked.name} cannot join: {why}", key="peers")
    entry = _new_entry(model, asked.name, asked.address, relay)
    _refuse_taken_number(directory, authority, len(names))
    return Proposal(asked, len(names), entry, False, left_out)


def admit(directory: Path, proposal: Proposal, *, days: int | None = None, passphrase: bytes | None = None) -> Admitted:
    """Sign a proposal; write the device's files into a folder in the cluster's folder.

    That is its certificate, the authority's, and a peer.toml in which it stands at the end of `[[peers]]`. For a peer
    that the list has already, a new certificate alone. It is valid for `days`. Raises ConfigError, SecurityError.
    """
    # Two must never get one number.
    with locked(directory):
        return _admit(directory, proposal, days or PEER_DAYS, passphrase)


def _admit(directory: Path, proposal: Proposal, days: int, passphrase: bytes | None) -> Admitted:
    authority = read_authority(directory, passphrase)
    model, base = any_peer_file(directory)
    index, entry, known = proposal.index, proposal.entry, proposal.known
    # Others may have been admitted since it was shown.
    if proposal.takes_seat:
        if not (seats := free_seats(directory)):
            raise ConfigError("all seats have been taken meanwhile", file=str(directory))
        index, entry = _seated(model, seats[0], entry.advertise, entry.relay)
    elif not known:
        entry, index = _new_entry(model, entry.name, entry.advertise, entry.relay), model.num_peers
        _refuse_taken_number(directory, authority, index)
    place = Place(index, entry.advertise, entry.relay) if entry.admitted else None
    asked = replace(proposal.request, name=entry.name)
    identity, certificate = authority.grant(asked, address=entry.advertise, place=place, days=days)
    folder = base.parent if known and model.peer.index == index else directory / f"peer-{index}"
    if not known and not proposal.takes_seat and (folder / CONFIG_FILE).exists():
        raise ConfigError("already exists and belongs to another peer; move it away", file=str(folder))
    start = model.training.warm_start
    # One of the cluster's own files lies in every folder of it.
    copied = None
    if not known and start is not None and (base.parent / start).parent == base.parent:
        copied = base.parent / start, read_named(base.parent, start, key="training.warm_start")
    older = folder / "peer.pem"
    if older.exists() and is_signed_by(older.read_bytes(), authority.certificate):
        _keep(directory, identify(older.read_bytes(), str(older)), older.read_bytes())
    _keep(directory, identity, certificate)
    _set_aside_other_key(folder / "peer.key", certificate)
    revoked = (directory / LIST_FILE).read_bytes() if (directory / LIST_FILE).exists() else b""
    if copied is not None:
        write_bytes(folder / copied[0].name, copied[1])
    config = None if known else _of_new_peer(model, index, entry)
    if proposal.takes_seat:
        _announce(directory, index, entry)
    fill(folder, certificate, authority.certificate, revoked, config)
    return Admitted(identity, index, folder)


def _set_aside_other_key(file: Path, certificate: bytes) -> None:
    """Rename a key that is not that of the certificate: the device has made another one, and the two, copied together,
    would be refused."""
    granted = public_key(parse_certificate(certificate, file), file)
    if file.exists() and parse_key(read_secret(file), file).public_key() != granted:
        file.replace(file.with_name(f"{file.name}.old"))


def fill(folder: Path, certificate: bytes, authority: bytes, revoked: bytes, config: Config | None) -> None:
    """Write the files of a device's folder beside its key: certificates, the list of revoked ones (PEM; empty: none),
    and last its configuration, if it gets one. Raises ConfigError."""
    write_bytes(folder / "peer.pem", certificate)
    write_bytes(folder / "ca.pem", authority)
    if revoked:
        write_bytes(folder / LIST_FILE, revoked)
    if config is not None:
        # A seat's file is there, and has no address yet.
        write_peer_file(folder / CONFIG_FILE, config, force=True)


def add_unsigned(directory: Path, name: str, advertise: str | None) -> Path:
    """Write the peer.toml of one more peer of a cluster without certificates; return the file. Raises ConfigError."""
    model, _ = any_peer_file(directory)
    if (why := why_no_changes(model)) is not None:
        raise ConfigError(f"{name} cannot join: {why}", key="peers")
    file = directory / f"peer-{model.num_peers}" / "peer.toml"
    write_peer_file(file, _of_new_peer(model, model.num_peers, _new_entry(model, name, advertise, None)))
    return file


def revoke(
    directory: Path, name: str, *, keep_newest: bool = False, passphrase: bytes | None = None
) -> tuple[list[Identity], bytes]:
    """Revoke the certificates made out to `name`; return them and the new list (PEM), which is also written.

    `keep_newest` spares the one issued last: for a device that got a new certificate after its key was lost. Raises
    SecurityError if there is nothing to revoke.
    """
    authority = read_authority(directory, passphrase)
    found = [each for each in _certificates(directory, authority) if each.name == name]
    if keep_newest:
        found = found[:-1]
    older = (directory / LIST_FILE).read_bytes() if (directory / LIST_FILE).exists() else b""
    if not found:
        names = sorted({each.name for each in _certificates(directory, authority)})
        raise SecurityError(
            f"{directory} has not issued {'an older' if keep_newest else 'a'} certificate to {name!r}; "
            f"certificates were issued to {', '.join(names) or 'nobody'}"
        )
    pem = authority.revoke(older, [each.serial for each in found])
    write_bytes(directory / LIST_FILE, pem)
    # Folders copied to a device from now on hold the new list.
    for file in directory.glob("peer-*/ca.pem"):
        write_bytes(file.with_name(LIST_FILE), pem)
    return found, pem


def _keep(directory: Path, identity: Identity, certificate: bytes) -> None:
    """Keep a copy of an issued certificate, so that it can be revoked when its device is gone."""
    write_bytes(directory / ISSUED / f"{identity.name}-{identity.serial:040x}.pem", certificate)


def _certificates(directory: Path, authority: CertificateAuthority) -> list[Identity]:
    """Return the certificates issued from this folder, the newest last."""
    found: dict[int, tuple[Identity, int]] = {}
    for pattern in (f"{ISSUED}/*.pem", "peer-*/peer.pem", "operator.pem"):
        for file in directory.glob(pattern):
            data = file.read_bytes()
            if is_signed_by(data, authority.certificate):
                identity = identify(data, str(file))
                # Certificates count whole seconds; within one, the file tells.
                written = max(file.stat().st_mtime_ns, found.get(identity.serial, (identity, 0))[1])
                found[identity.serial] = (identity, written)
    return [each for each, _ in sorted(found.values(), key=lambda pair: (pair[0].not_before, pair[1]))]


@contextlib.contextmanager
def locked(directory: Path, *, waits: bool = True) -> Iterator[None]:
    """Let no other process hold a folder meanwhile. Raises BlockingIOError if one does, unless this one `waits`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def read_authority(directory: Path, passphrase: bytes | None) -> CertificateAuthority:
    """Return the authority in a cluster's folder. Raises SecurityError."""
    key = directory / _CA_KEY
    if not key.exists():
        raise SecurityError(
            f"{key} does not exist; run this command where the cluster was created, with the folder that "
            "`sotto init cluster` wrote"
        )
    return CertificateAuthority.load(directory / "ca.pem", key, passphrase)


def any_peer_file(directory: Path) -> tuple[Config, Path]:
    """Return the configuration with the longest list of peers in the cluster's folder, and its file."""
    files = sorted(directory.glob(f"peer-*/{CONFIG_FILE}"))
    if not files:
        problem = "contains no peers (peer-*/peer.toml)" if directory.is_dir() else "no such folder"
        problem += f"; `sotto init cluster {directory} --peers N` writes them{instead_of(directory)}"
        raise ConfigError(problem, file=str(directory))
    return max(((load_device(file, environment={}), file) for file in files), key=lambda pair: pair[0].num_peers)


def _new_entry(model: Config, name: str, advertise: str | None, relay: str | None) -> PeerAddress:
    """Return how a new peer is listed. Raises ConfigError if it could never join or be reached."""
    if (why := why_no_name(name, (peer.name for peer in model.peers))) is not None:
        raise ConfigError(f"cannot be the name of a new peer: {why}", key="name", value=name)
    if advertise is not None:
        host, _ = dialled_address(advertise, key="advertise")
        if is_loopback(host):
            listed = [split_address(each.advertise, key="advertise")[0] for each in model.peers if each.advertise]
            refuse_mixed_loopback([host, *listed])
    dialled = {peer.name for peer in model.peers if peer.advertise is not None}
    if relay is not None and advertise is not None:
        raise ConfigError(f"is not needed: {name} can be dialled at {advertise}", key="--relay", value=relay)
    if relay is not None and relay not in dialled:
        problem = "is not a peer that others can dial"
        raise ConfigError(problem, key="--relay", value=relay, valid=", ".join(sorted(dialled)))
    return PeerAddress(name=name, advertise=advertise, relay=relay, admitted=True)


def free_seats(directory: Path) -> list[int]:
    """Return the indices of peers that are listed, and of which no device has a certificate yet."""
    folders = {file.parent for file in directory.glob(f"peer-*/{CONFIG_FILE}")}
    free = [load(each / CONFIG_FILE, environment={}).peer for each in folders if not (each / "peer.pem").exists()]
    return sorted(peer.index for peer in free)


def _seated(model: Config, index: int, advertise: str | None, relay: str | None) -> tuple[int, PeerAddress]:
    """Return a seat's index, and how it is listed once a device has it. Raises ConfigError."""
    seat = model.peers[index].model_copy(update={"advertise": None})
    others = model.model_copy(update={"peers": tuple(peer for peer in model.peers if peer.name != seat.name)})
    reached = _new_entry(others, seat.name, advertise, relay or (None if advertise else seat.relay))
    return index, seat.model_copy(update={"advertise": reached.advertise, "relay": reached.relay})


def _relay_among(model: Config, index: int | None) -> str | None:
    """Return the name of a peer that can forward to one that nobody can dial, at `index` if it is listed; None where
    all others can be dialled."""
    others = [peer for number, peer in enumerate(model.peers) if number != index]
    dialled = [peer.name for peer in others if peer.advertise is not None]
    return dialled[0] if 0 < len(dialled) < len(others) else None


def _announce(directory: Path, index: int, entry: PeerAddress) -> None:
    """Write where a seat's device is reached into the files of all: for those that are started or given out later."""
    for file in directory.glob(f"peer-*/{CONFIG_FILE}"):
        config = load(file, environment={})
        peers = (*config.peers[:index], entry, *config.peers[index + 1 :])
        write_peer_file(file, config.model_copy(update={"peers": peers}), force=True)


def _refuse_taken_number(directory: Path, authority: CertificateAuthority, index: int) -> None:
    """Two peers must never have one number, and a number that was given away may be in use anywhere."""
    for other in _certificates(directory, authority):
        if other.index == index:
            raise ConfigError(
                f"index {index} belongs to {other.name!r}, whose folder peer-{index} is missing; restore it first",
                file=str(directory),
            )


def _of_new_peer(model: Config, index: int, entry: PeerAddress) -> Config:
    peers = (*model.peers[:index], entry, *model.peers[index + 1 :])
    own = model.peer.model_copy(update={"index": index, "listen": listen_of(peers, entry)})
    return model.model_copy(update={"peers": peers, "peer": own})


def listen_of(peers: Sequence[PeerAddress], entry: PeerAddress) -> str:
    """Return where one of the peers listens: nowhere ("") if nobody dials it, on loopback alone if all are there."""
    if entry.advertise is None:
        return ""
    places = [split_address(each.advertise, key="advertise") for each in peers if each.advertise is not None]
    local = len(places) == len(peers) and all(is_loopback(host) for host, _ in places)
    return listening_address(*split_address(entry.advertise, key="advertise"), local=local)
