"""Asking a running peer: whom to ask, and with which certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peer.config import Config, PeerAddress
from peer.errors import ConfigError, PeerUnreachable, RemoteError, SecurityError
from peer.net.control import call_control
from peer.net.security.certificates import Role
from peer.net.security.credentials import Access, load_credentials

TIMEOUT_S = 5.0


def call(
    config: Config, base: Path, peer: int | PeerAddress | None, verb: str, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a peer answers to a control call (`CONTROL_VERBS`); None asks the configuration's own peer, an entry
    one that the configuration does not list (`newcomers`).

    `base` is where the relative paths of the configuration start. Raises RemoteError (PeerUnreachable if there is no
    answer, or the peer listens nowhere), SecurityError if the certificate does not allow the call.
    """
    index = config.peer.index if peer is None else peer
    if isinstance(index, int) and not 0 <= index < config.num_peers:
        raise ConfigError(
            "is not a peer of this run", key="peer.index", value=index, valid=f"0 to {config.num_peers - 1}"
        )
    entry = config.peers[index] if isinstance(index, int) else index
    listen = config.peer.listen if index == config.peer.index else None
    security = _credentials(config, base)
    try:
        address = _address(entry, listen)
        return asyncio.run(
            call_control(address, verb, arguments, name=entry.name, security=security, timeout_s=TIMEOUT_S)
        )
    except RemoteError as error:
        raise type(error)(error.problem, peer=index if isinstance(index, int) else None) from None


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


def _credentials(config: Config, base: Path) -> Access | None:
    """Return the operator's certificate where it lies beside the CA, else the peer's own."""
    options = config.security
    if options.mode != "mtls":
        return load_credentials(options, base, None)
    own_folder = (base / options.ca).resolve().parent
    for folder in (own_folder, own_folder.parent):
        operator = {"ca": "ca.pem", "certificate": "operator.pem", "key": "operator.key"}
        if all((folder / file).exists() for file in operator.values()):
            operator["revoked"] = "revoked.pem"
            try:
                return load_credentials(options.model_copy(update=operator), folder, None, role=Role.OPERATOR)
            except SecurityError:
                break  # Not readable for this user, or of another run: the own certificate may do.
    return load_credentials(options, base, config.peers[config.peer.index].name)
