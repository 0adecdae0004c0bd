"""Asking a running peer: whom to ask, and with which certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from peer.config import Config
from peer.errors import ConfigError, PeerUnreachable, RemoteError, SecurityError
from peer.security import Access, Role, load_credentials
from peer.transport import call_control

TIMEOUT_S = 5.0


def call(
    config: Config, base: Path, peer_index: int | None, verb: str, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a peer answers to a control call (`CONTROL_VERBS`); None asks the configuration's own peer.

    `base` is where the relative paths of the configuration start. Raises RemoteError (PeerUnreachable if there is no
    answer, or the peer listens nowhere), SecurityError if the certificate does not allow the call.
    """
    index = config.peer.index if peer_index is None else peer_index
    if not 0 <= index < config.num_peers:
        raise ConfigError("is no peer", key="peer.index", value=index, valid=f"0 to {config.num_peers - 1}")
    name = config.peers[index].name
    security = _credentials(config, base)
    call_ = call_control(_address(config, index), verb, arguments, name=name, security=security, timeout_s=TIMEOUT_S)
    try:
        return asyncio.run(call_)
    except RemoteError as error:
        raise type(error)(error.problem, peer=index) from None


def _address(config: Config, index: int) -> str:
    advertised = config.peers[index].advertise
    if advertised is not None:
        return advertised
    if index == config.peer.index and config.peer.listen:
        host, _, port = config.peer.listen.rpartition(":")
        return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "") else f"{host}:{port}"
    raise PeerUnreachable("cannot be asked: it listens nowhere; look at its log on its own device", peer=index)


def _credentials(config: Config, base: Path) -> Access | None:
    """Return the operator's certificate where it lies beside the CA, else the peer's own."""
    options = config.security
    if options.mode != "mtls":
        return load_credentials(options, base, None)
    own_folder = (base / options.ca).resolve().parent
    for folder in (own_folder, own_folder.parent):
        operator = {"ca": "ca.pem", "certificate": "operator.pem", "key": "operator.key"}
        if all((folder / file).exists() for file in operator.values()):
            try:
                return load_credentials(options.model_copy(update=operator), folder, None, role=Role.OPERATOR)
            except SecurityError:
                break  # Not readable for this user, or of another run: the own certificate may do.
    return load_credentials(options, base, config.peers[config.peer.index].name)
