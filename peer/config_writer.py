"""Writes configuration files: one commented peer.toml, the folder of a whole cluster, and the resolved file of a run.

The comments come from the schema in `config.py`, so that no copy of them can grow stale. Nothing is overwritten unless
the caller says so.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomlkit

from peer import config_schema
from peer.config import SECTIONS, Config, PeerAddress, Section
from peer.errors import ConfigError

_SHARED_PATHS = (("graph", "file"), ("training", "warm_start"), ("data", "directory"))
"""Keys of the job whose value is a path relative to the file."""

_WIDTH = 116

_PEER_HEADER = """\
Sottovoce: the configuration of one peer.

  sotto validate --config FILE    check it, and the graph and algorithm it describes
  sotto run --config FILE         start the peer

Every key is here, with a sentence that says what it does, what it accepts and its default.
run, graph, algorithm, compressor, training, data, rounds and evaluation describe the job: they must be
the same on every device of a run. The other sections are this device's own business.
A key may be overridden by the environment (SOTTO_TRAINING__LEARNING_RATE=0.05). "none" leaves a key unset.
"""

_RESOLVED_HEADER = """\
Sottovoce: the configuration of this run as it was resolved from file, environment and command line.
"""

_PEERS_EXAMPLE = """\
All peers of the run, in the same order on every device. name: what the peer's certificate is made out to.
advertise: address and port under which the others reach it; without one it dials all its neighbours itself.
relay: without an address, the peer that connects it with neighbours that have none either.
joins_later: the run begins without it, and it becomes a member when it is started; such peers come last.
admitted: `sotto sign` writes this for a device that is added later; the others need not list it.

[[peers]]
name = "kitchen"
advertise = "192.168.1.10:7700"

[[peers]]
name = "garage"
relay = "kitchen"

[[peers]]
name = "attic"
advertise = "192.168.1.12:7700"
joins_later = true

[[peers]]
name = "shed"
advertise = "192.168.1.13:7700"
admitted = true
"""


@dataclass(frozen=True)
class Host:
    """Where one peer of a cluster runs."""

    address: str | None
    """Name or IP address under which the others reach it; None where nobody can (it dials out only)."""
    port: int


def write_peer_file(path: Path, config: Config | None = None, *, force: bool = False) -> None:
    """Write a commented peer.toml. Raises ConfigError if the file exists, unless `force`, or cannot be written."""
    write_bytes(path, render(config or Config(), header=_PEER_HEADER).encode(), force=force)


def write_resolved(config: Config, path: Path) -> None:
    """Write the configuration so that `config.load` returns an equal one; an existing file is replaced."""
    write_bytes(path, render(config, header=_RESOLVED_HEADER).encode())


def write_cluster(
    directory: Path,
    config: Config,
    hosts: Sequence[Host],
    *,
    base: Path = Path(),
    force: bool = False,
    relay: int | None = None,
    join_later: int = 0,
) -> list[Path]:
    """Write a CA, an operator's certificate and one folder peer-K for each host; return the peer files.

    A folder peer-K is all that its device needs. Peers find each other through `advertise`; a peer without an address
    listens nowhere and dials out; peer `relay` connects such peers with each other. The last `join_later` are not yet
    members when the run begins. Where every host is this machine, peers listen on loopback only, otherwise on all
    interfaces. `base` is where the relative paths of `config` start; in the new files they lead to the same places.
    With `security.mode = "insecure"` no certificates are made. Raises ConfigError if the folder already holds a
    cluster, unless `force`.
    """
    from peer.net.security import CertificateAuthority, Role

    names = [peer.name for peer in config.peers] or [f"peer-{index}" for index in range(len(hosts))]
    if len(names) != len(hosts):
        raise ConfigError(
            f"the configuration lists {len(names)} [[peers]], but {len(hosts)} are to be made", key="--peers"
        )
    if relay is not None and (relay >= len(hosts) or hosts[relay].address is None):
        raise ConfigError("is no peer that others can dial", key="--relay", value=relay)
    if join_later >= len(hosts):
        raise ConfigError("leaves nobody to begin", key="--join-later", value=join_later)
    folders = [directory / f"peer-{index}" for index in range(len(hosts))]
    authority_files = (directory / "ca.pem", directory / "ca.key")
    operator_files = (directory / "operator.pem", directory / "operator.key")
    peer_files = [(folder / "peer.pem", folder / "peer.key") for folder in folders]
    certificates = [*authority_files, *operator_files, *(file for pair in peer_files for file in pair)]
    # All are looked at before the first is written: half of an old cluster is worse than an error.
    if not force:
        for file in (*certificates, *(folder / "peer.toml" for folder in folders)):
            _refuse_existing(file)
    for file in certificates:
        file.unlink(missing_ok=True)
    for index, folder in enumerate(folders):
        mine = _peer_config(config, index, hosts, names, None if relay is None else names[relay], join_later)
        write_peer_file(folder / "peer.toml", _move_paths(mine, base, folder), force=force)
    if config.security.mode == "mtls":
        authority = CertificateAuthority.create(config.run.name)
        authority.write(*authority_files)
        authority.issue("operator", role=Role.OPERATOR).write(*operator_files)
        (directory / "revoked.pem").unlink(missing_ok=True)
        for folder, name, host, files in zip(folders, names, hosts, peer_files, strict=True):
            addresses = [host.address] if host.address is not None else []
            authority.issue(name, addresses).write(*files)
            # A copy in each folder: one folder is all that a device needs.
            write_bytes(folder / "ca.pem", authority.certificate)
    return [folder / "peer.toml" for folder in folders]


def place_peers(num_peers: int | None, hosts: Sequence[str], port: int) -> list[Host]:
    """Return where each peer runs, from HOST[:PORT] for each of them, one for all, or none (all on this machine).

    Peers on one host get ports that count up. "-" is a peer that cannot be reached. Raises ConfigError.
    """
    count = num_peers or len(hosts)
    if not count:
        raise ConfigError("is missing", key="--peers", valid="a number, or --host once for each peer")
    if len(hosts) not in {0, 1, count}:
        problem = f"is given {len(hosts)} times for {count} peers"
        raise ConfigError(problem, key="--host", valid="once for each peer, once for all, or not at all")
    if count > 1 and len(hosts) < 2:
        address, first = _split_address(hosts[0] if hosts else "127.0.0.1", port)
        if address is None:
            raise ConfigError("no peer could be reached by another", key="--host", value="-")
        if first + count > 65536:
            raise ConfigError(f"leaves no room for {count} ports", key="--port", value=first)
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
        raise ConfigError("is no address", key="--host", value=text, valid="HOST, HOST:PORT or -")
    return host.strip("[]"), int(port)


def _peer_config(
    config: Config, index: int, hosts: Sequence[Host], names: Sequence[str], relay: str | None, join_later: int
) -> Config:
    local = all(host.address in {"127.0.0.1", "localhost", "::1"} for host in hosts)
    host = hosts[index]
    listen = "" if host.address is None else join_address("127.0.0.1" if local else "0.0.0.0", host.port)
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


def _move_paths(config: Config, old_base: Path, new_base: Path) -> Config:
    """Return the configuration with relative paths that lead from `new_base` to where they led from `old_base`."""
    for name, key in _SHARED_PATHS:
        section = getattr(config, name)
        value = getattr(section, key)
        if value is not None and not Path(value).is_absolute():
            moved = os.path.relpath(old_base / value, new_base)
            config = config.model_copy(update={name: section.model_copy(update={key: moved})})
    return config


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def render(config: Config, *, header: str) -> str:
    """Return the configuration as TOML in which a comment above each key says what it does and accepts."""
    document = tomlkit.document()
    _comment(document, header)
    for name in SECTIONS:
        document.add(tomlkit.nl())
        if name != "peers":
            document.add(name, _table(getattr(config, name)))
        elif config.peers:
            document.add(name, _peers(config.peers))
        else:
            _comment(document, _PEERS_EXAMPLE)
            document.add(tomlkit.nl())
    return tomlkit.dumps(document)


def write_bytes(path: Path, data: bytes, *, force: bool = True) -> None:
    """Write a file and the folders above it. Raises ConfigError if it exists, unless `force`, or cannot be written."""
    if not force:
        _refuse_existing(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError("cannot be written: a file stands where a folder should be", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=str(path)) from None


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ConfigError("exists already; --force overwrites it", file=str(path))


def _table(section: Section) -> tomlkit.items.Table:
    table = tomlkit.table()
    kind = type(section)
    _comment(table, (kind.__doc__ or "").strip())
    table.add(tomlkit.nl())
    for key in kind.model_fields:
        value, default = getattr(section, key), kind.model_fields[key].get_default(call_default_factory=True)
        _comment(table, config_schema.sentence(kind, key))
        _comment(table, f"{_capital(config_schema.accepts(kind, key))}. Default: {spell(default)}.")
        if value is None and default is None:
            table.add(tomlkit.comment(f"{key} ="))
        else:
            table.add(key, "none" if value is None else _plain(value))
        table.add(tomlkit.nl())
    return table


def _peers(peers: Sequence[PeerAddress]) -> tomlkit.items.AoT:
    tables = tomlkit.aot()
    for peer in peers:
        table = tomlkit.table()
        table.add("name", peer.name)
        if peer.advertise is not None:
            table.add("advertise", peer.advertise)
        if peer.relay is not None:
            table.add("relay", peer.relay)
        if peer.joins_later:
            table.add("joins_later", True)
        if peer.admitted:
            table.add("admitted", True)
        tables.append(table)
    return tables


def spell(value: object) -> str:
    """Return a value as TOML spells it, or "not set"."""
    return "not set" if value is None else tomlkit.item(_plain(value)).as_string()


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        inline = tomlkit.inline_table()
        inline.update(value)
        return inline
    return value


def _comment(container: tomlkit.TOMLDocument | tomlkit.items.Table, text: str) -> None:
    for line in text.splitlines():
        for piece in textwrap.wrap(line, _WIDTH) or [""]:
            container.add(tomlkit.comment(piece) if piece else tomlkit.items.Comment(tomlkit.items.Trivia(comment="#")))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
