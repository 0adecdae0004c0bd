"""Asking a running peer: whom to ask, and with which certificate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peer.config import Config, PeerAddress
from peer.errors import ConfigError, PeerUnreachable, RemoteError, SecurityError
from peer.net.control import LOCAL, call_control
from peer.net.security.certificates import Role
from peer.net.security.credentials import Access, Credentials, load_credentials
from peer.net.security.orders import loss_order
from peer.net.services import OWN_SOCKET

TIMEOUT_S = 5.0

_OPERATOR = {"ca": "ca.pem", "certificate": "operator.pem", "key": "operator.key"}


def call(
    config: Config, base: Path, peer: int | PeerAddress | None, verb: str, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a peer answers to a control call (`CONTROL_VERBS`); None asks the configuration's own peer, an entry
    one that the configuration does not list (`newcomers`).

    `base` is where the relative paths of the configuration start. Raises RemoteError (PeerUnreachable if there is no
    answer, or the peer listens nowhere), SecurityError if the certificate does not allow the call.
    """
    return asyncio.run(ask(config, base, peer, verb, arguments))


async def ask(
    config: Config, base: Path, peer: int | PeerAddress | None, verb: str, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Do what `call` does, on the running event loop."""
    index = config.peer.index if peer is None else peer
    if isinstance(index, int) and not 0 <= index < config.num_peers:
        raise ConfigError(
            "is not a peer of this run", key="peer.index", value=index, valid=f"0 to {config.num_peers - 1}"
        )
    entry = config.peers[index] if isinstance(index, int) else index
    is_own = index == config.peer.index
    how: dict[str, Any] = {"name": entry.name, "security": _credentials(config, base), "timeout_s": TIMEOUT_S}
    try:
        if is_own and (local := _own_socket(config, base)) is not None:
            # Whoever listens there may be a process that a script of the peer's left behind.
            with contextlib.suppress(PeerUnreachable):
                return await call_control(local, verb, arguments, **how)
        address = _address(entry, config.peer.listen if is_own else None)
        return await call_control(address, verb, arguments, **how)
    except RemoteError as error:
        raise type(error)(error.problem, peer=index if isinstance(index, int) else None) from None


async def remove(config: Config, base: Path, name: str) -> dict[str, Any]:
    """Have a peer that can announce that another one is lost, by the operator's order; return its answer. Raises
    RemoteError with the reason of one that refused, or that no peer can be reached; SecurityError where the operator's
    certificate is not at hand."""
    operator = _operator(config, base)
    refusals: list[RemoteError] = []
    # Only those who hear the peer can tell in which round it was lost.
    own = config.peer.index
    asked: list[int | PeerAddress] = [own]
    asked += [index for index, peer in enumerate(config.peers) if index != own and peer.name != name]
    with contextlib.suppress(RemoteError):
        asked += newcomers(config, await ask(config, base, own, "status"))
    for peer in asked:
        try:
            known = (await ask(config, base, peer, "status")).get("peers", {}).get(name, {})
            order = loss_order(name, config.run.name, operator, int(known.get("incarnation", 0)))
            return await ask(config, base, peer, "remove", {"name": name, "order": order.hex()})
        except RemoteError as error:
            refusals.append(error)
    # That a peer cannot be reached says less than why one that can be has refused.
    raise min(refusals, key=lambda error: isinstance(error, PeerUnreachable))


def _operator(config: Config, base: Path) -> Credentials | None:
    """Return the certificate with which an order is signed; None in a run without certificates. Raises SecurityError
    where it is not at hand."""
    if config.security.mode != "mtls":
        return None
    access = _credentials(config, base)
    if not isinstance(access, Credentials) or access.identity.role is not Role.OPERATOR:
        raise SecurityError(
            "no peer believes that another one is lost without the operator's signature: run this where operator.pem"
            " and operator.key are, beside ca.pem or above the peer's folder"
        )
    return access


def may_operate(config: Config, base: Path) -> bool:
    """Return whether the operator's certificate is at hand, or calls need none."""
    return config.security.mode != "mtls" or _operator_folder(config, base) is not None


def newcomers(config: Config, status: Mapping[str, Any]) -> list[PeerAddress]:
    """Return the peers that a status names and the configuration does not list."""
    listed = {peer.name for peer in config.peers}
    entries = [
        PeerAddress(name=each["name"], advertise=each["advertise"], relay=each["relay"], admitted=True)
        for each in status.get("newcomers", [])
    ]
    return [entry for entry in entries if entry.name not in listed]


def _address(entry: PeerAddress, listen: str | None) -> str:
    if entry.advertise is not None:
        return entry.advertise
    if listen:
        host, _, port = listen.rpartition(":")
        return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "") else f"{host}:{port}"
    raise PeerUnreachable("cannot be queried because it accepts no connections; see the log on its device")


def _own_socket(config: Config, base: Path) -> str | None:
    """Return the address of the socket that the own peer listens on in its state folder; None where it does not. Calls
    by it share no connections with strangers."""
    path = base / config.state.directory / OWN_SOCKET
    # Its folder is its owner's alone, and it may be that of a process that is gone.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return f"{LOCAL}{path}" if config.security.mode == "mtls" else None
    return None


def _credentials(config: Config, base: Path) -> Access | None:
    """Return the operator's certificate where it lies beside the CA, else the peer's own."""
    options = config.security
    if options.mode != "mtls":
        return load_credentials(options, base, None)
    folder = _operator_folder(config, base)
    if folder is not None:
        operator = {**_OPERATOR, "revoked": "revoked.pem"}
        # Not readable for this user, or of another run: the own certificate may do.
        with contextlib.suppress(SecurityError):
            return load_credentials(options.model_copy(update=operator), folder, None, role=Role.OPERATOR)
    return load_credentials(options, base, config.peers[config.peer.index].name)


def _operator_folder(config: Config, base: Path) -> Path | None:
    """Return the folder of the CA that holds the operator's certificate too: that of the peer, or the one above it."""
    own_folder = (base / config.security.ca).resolve().parent
    for folder in (own_folder, own_folder.parent):
        if all((folder / file).exists() for file in _OPERATOR.values()):
            return folder
    return None
