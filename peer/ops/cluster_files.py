"""Writes the folder of a whole cluster: certificates, and for each device a folder with all that its peer needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.config.options import Config, PeerAddress
from peer.config.writer import moved, with_path, write_bytes, write_peer_file
from peer.errors import ConfigError
from peer.files import instead_of
from peer.net.address import dialled_address, is_loopback, why_no_name
from peer.net.security.authority import CA_DAYS, PEER_DAYS, CertificateAuthority, Issued
from peer.net.security.certificates import Role
from peer.run.plan import build_schedule, unreachable_pairs


@dataclass(frozen=True)
class Host:
    """Place of one peer of a cluster."""

    address: str | None
    """Name or IP address under which the others reach it; None where nobody can (it dials out only)."""
    port: int


def peer_files(directory: Path) -> list[Path]:
    """Return the peer.toml of every peer below a run folder or cluster folder. Raises ConfigError if there is none."""
    files = [*directory.glob("peers/peer-*/peer.toml"), *directory.glob("peer-*/peer.toml")]
    if not files:
        problem = "contains no peers (peer-*/peer.toml)" if directory.is_dir() else "no such folder"
        raise ConfigError(problem + instead_of(directory), file=str(directory))
    return sorted(files, key=lambda file: (len(file.parent.name), file.parent.name))


def write_cluster(
    directory: Path,
    config: Config,
    hosts: Sequence[Host],
    *,
    base: Path = Path(),
    force: bool = False,
    relay: int | None = None,
    join_later: int = 0,
    seats: int = 0,
    to_be_copied: bool = False,
    all_keys: bool = False,
    days: int | None = None,
    ca_days: int | None = None,
    passphrase: bytes | None = None,
) -> list[Path]:
    """Write a CA, an operator's certificate and one folder peer-K for each host; return the peer files.

    A device needs only its folder peer-K. Peers find each other through `advertise`; a peer without an address listens
    nowhere and dials out; peer `relay` connects such peers with each other. The last `join_later` are not yet members
    when the run begins. The last `seats` get no certificate and no address: devices that are invited take these places.
    Where every host is this machine, peers listen on loopback only, otherwise on all interfaces.
    `base` is where the relative paths of `config` start; in the new files they lead to the same places. With
    `to_be_copied` they lead to places in the folders: files are copied into them, and a data folder is linked. With
    `all_keys` the files name also what is at its default. Certificates are valid for `days` (by default two years), the
    authority for `ca_days` (ten); its key is encrypted with `passphrase`, if any. With `security.mode = "insecure"` no
    certificates are made. Raises ConfigError if the folder already holds a cluster, unless `force`, or more of an
    earlier run than its keys and settings, and for contents that it cannot hold, before anything is written.
    """
    names = [peer.name for peer in config.peers] or [f"peer-{index}" for index in range(len(hosts))]
    if len(names) != len(hosts):
        raise ConfigError(
            f"the configuration lists {len(names)} [[peers]], but --peers and --host ask for {len(hosts)}",
            key="--peers",
        )
    for number, (name, host) in enumerate(zip(names, hosts, strict=True)):
        if (why := why_no_name(name, names[:number])) is not None:
            raise ConfigError(f"cannot be the name of a peer: {why}", key="peers.name", value=name)
        if host.address is not None:
            dialled_address(join_address(host.address, host.port), key="--host")
    refuse_mixed_loopback([host.address for host in hosts if host.address is not None])
    if relay is not None and (relay >= len(hosts) or hosts[relay].address is None):
        raise ConfigError(
            "is not the number of a peer that others can dial; give that peer a --host", key="--relay", value=relay
        )
    if join_later >= len(hosts):
        raise ConfigError(
            "leaves no peer to begin the run", key="--join-later", value=join_later, valid=f"0 to {len(hosts) - 1}"
        )
    taken = len(hosts) - seats
    reached = any(host.address is not None for host in hosts[: max(taken, 0)])
    if seats and (join_later or config.security.mode != "mtls" or not reached):
        raise ConfigError(
            "needs certificates, no --join-later, and a peer beside the seats that others can dial",
            key="--seats",
            value=seats,
        )
    by = None if relay is None else names[relay]
    planned = _peer_config(
        config, 0, [*hosts[:taken], *(Host("seat", 0) for _ in hosts[taken:])], names, by, join_later
    )
    for sentence in unreachable_pairs(planned, build_schedule(planned, base, planned.num_members(len(hosts)))):
        raise ConfigError(sentence, key="--host", value="-")
    hosts = [*hosts[:taken], *(Host(None, host.port) for host in hosts[taken:])]
    folders = [directory / f"peer-{index}" for index in range(len(hosts))]
    authority_files = (directory / "ca.pem", directory / "ca.key")
    operator_files = (directory / "operator.pem", directory / "operator.key")
    peer_files = [(folder / "peer.pem", folder / "peer.key") for folder in folders]
    certificates = [*authority_files, *operator_files, *(file for pair in peer_files for file in pair)]
    # All are looked at before the first is written: half of an old cluster is worse than an error.
    wanted = (*certificates, *(folder / "peer.toml" for folder in folders))
    if not force and (old := next(filter(Path.exists, wanted), None)) is not None:
        elsewhere = "name another folder (DIRECTORY of `sotto init cluster`, -o of `sotto init --peers`)"
        raise ConfigError(f"already exists; {elsewhere}, or replace the keys of all with --force", file=str(old))
    # State, invitations and figures of the run whose keys go belong to no other.
    kept = (*directory.glob(f"peer-*/{config.state.directory}"), directory / "invitations", directory / "collected")
    for old in (*kept, *(each for each in directory.glob("peer-*") if each not in folders)):
        if old.exists():
            problem = "is of an earlier run, and its keys would be replaced; name another folder, or delete"
            raise ConfigError(f"{problem} {directory}", file=str(old))
    copied = _copied_files(config, base) if to_be_copied else {}
    authority = CertificateAuthority.create(config.run.name, days=ca_days or CA_DAYS)
    issued: list[Issued] = []
    if config.security.mode == "mtls":
        addresses = [[host.address] if host.address is not None else [] for host in hosts]
        issued = [
            authority.issue("operator", role=Role.OPERATOR, days=days or PEER_DAYS),
            *(authority.issue(*each, days=days or PEER_DAYS) for each in zip(names[:taken], addresses, strict=False)),
        ]
    # From here on only the disk can object.
    for file in certificates:
        file.unlink(missing_ok=True)
    for index, folder in enumerate(folders):
        mine = _peer_config(config, index, hosts, names, by, join_later)
        mine = _self_contained(mine, base, folder, copied) if to_be_copied else moved(mine, base, folder)
        write_peer_file(folder / "peer.toml", mine, force=force, all_keys=all_keys)
    if issued:
        authority.write(*authority_files, passphrase)
        for certificate, files in zip(issued, (operator_files, *peer_files[:taken]), strict=True):
            certificate.write(*files)
        (directory / "revoked.pem").unlink(missing_ok=True)
        for folder in folders:
            # A copy in each folder: one folder is all that a device needs.
            write_bytes(folder / "ca.pem", authority.certificate)
    return [folder / "peer.toml" for folder in folders]


def place_peers(num_peers: int | None, hosts: Sequence[str], port: int) -> list[Host]:
    """Return where each peer runs, from HOST[:PORT] for each of them, one for all, or none (all on this machine).

    Peers on one host get ports that count up. "-" is a peer that cannot be reached. Raises ConfigError.
    """
    count = num_peers or len(hosts)
    if not count:
        raise ConfigError("is missing", key="--peers", valid="a number of peers, or --host once for each peer")
    if len(hosts) not in {0, 1, count}:
        problem = f"is given {len(hosts)} times, but there are {count} peers"
        raise ConfigError(problem, key="--host", valid="once for each peer, once for all, or not at all")
    if count > 1 and len(hosts) < 2:
        address, first = _split_address(hosts[0] if hosts else "127.0.0.1", port)
        if address is None:
            raise ConfigError("at least one peer needs an address that others can dial", key="--host", value="-")
        if first + count > 65536:
            raise ConfigError(
                f"leaves no room for {count} ports", key="--port", value=first, valid=f"at most {65536 - count}"
            )
        return [Host(address, first + index) for index in range(count)]
    placed: list[Host] = []
    for text in hosts or ("127.0.0.1",):
        address, own_port = _split_address(text, port)
        while address is not None and Host(address, own_port) in placed:
            own_port += 1
        placed.append(Host(address, own_port))
    return placed


def _split_address(text: str, default_port: int) -> tuple[str | None, int]:
    """Return address and port of HOST, HOST:PORT, [IPV6]:PORT or a bare IPv6 address; None for "-"."""
    if text == "-":
        return None, default_port
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text, str(default_port)
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("is not an address", key="--host", value=text, valid="HOST, HOST:PORT or -")
    return host.strip("[]"), int(port)


def _peer_config(
    config: Config, index: int, hosts: Sequence[Host], names: Sequence[str], relay: str | None, join_later: int
) -> Config:
    host, local = hosts[index], all(host.address is not None and is_loopback(host.address) for host in hosts)
    listen = "" if host.address is None else listening_address(host.address, host.port, local=local)
    relays = {peer.name: peer.relay for peer in config.peers}
    later = {peer.name for peer in config.peers if peer.joins_later} | {*names[len(names) - join_later :]}
    peers = tuple(
        PeerAddress(
            name=name,
            advertise=None if each.address is None else join_address(each.address, each.port),
            relay=(relays.get(name) or relay) if each.address is None else None,
            joins_later=name in later,
        )
        for name, each in zip(names, hosts, strict=True)
    )
    own = config.peer.model_copy(update={"index": index, "listen": listen})
    security = config.security.model_copy(update={"ca": "ca.pem", "certificate": "peer.pem", "key": "peer.key"})
    return config.model_copy(update={"peers": peers, "peer": own, "security": security})


def _copied_files(config: Config, base: Path) -> dict[tuple[str, str], tuple[str, bytes]]:
    """Return the files that each folder gets a copy of: section and key → name, content. Raises ConfigError."""
    found = {}
    for section, key in (("graph", "file"), ("training", "warm_start")):
        value = getattr(getattr(config, section), key)
        if value is not None:
            found[section, key] = Path(value).name, read_named(base, value, key=f"{section}.{key}")
    return found


def read_named(base: Path, file: str, *, key: str) -> bytes:
    """Return the content of a file that a setting names, relative to `base`. Raises ConfigError."""
    try:
        return (base / file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key=key, value=file) from None


def _self_contained(
    config: Config, base: Path, folder: Path, copied: Mapping[tuple[str, str], tuple[str, bytes]]
) -> Config:
    """Return the configuration of a folder that stays right wherever the folder is copied to."""
    for (section, key), (name, content) in copied.items():
        write_bytes(folder / name, content)
        config = with_path(config, section, key, name)
    directory = config.data.directory
    if directory is None or Path(directory).is_absolute():
        return config
    # A path that leaves the folder of the configuration would lead anywhere on another device.
    inside = Path(os.path.normpath(directory))
    inside = Path(inside.name or "data") if ".." in inside.parts or inside == Path() else inside
    link, source = folder / inside, base / directory
    # A device's own data are only on that device.
    if source.is_dir() and config.data.partition != "own" and not (link.exists() or link.is_symlink()):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(source.resolve(), link.parent.resolve()), target_is_directory=True)
    return with_path(config, "data", "directory", str(inside))


def refuse_mixed_loopback(hosts: Sequence[str]) -> None:
    """Raise ConfigError where hosts of several devices name this device itself, which each device would dial."""
    own = [host for host in hosts if is_loopback(host)]
    if own and len(own) < len(hosts):
        other = next(host for host in hosts if not is_loopback(host))
        raise ConfigError(
            f"leads each device to itself, and {other} is another one",
            key="--host",
            value=own[0],
            valid="the address that the other devices dial",
        )


def listening_address(host: str, port: int, *, local: bool) -> str:
    """Return the listening host of a peer that others dial at `host`: all interfaces, or where all are `local`, that
    one."""
    return join_address(host if local else "0.0.0.0", port)


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
