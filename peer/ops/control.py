"""Asking a running peer: whom to ask, and with which certificate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from peer.config.options import Config, PeerAddress
from peer.errors import ConfigError, PeerUnreachable, RemoteError, SecurityError, SottoError
from peer.gossip.membership import ChangeKind
from peer.net.address import split_address
from peer.net.control import call_control
from peer.net.rpc import socket_address
from peer.net.security.certificates import Role, vouched_identity
from peer.net.security.credentials import Access, Credentials, load_credentials
from peer.net.security.orders import loss_order
from peer.net.services import OWN_SOCKET

TIMEOUT_S = 5.0
_MOST_UNSIGNED = 64
_AT_ONCE = 64
"""Calls under way at the same time."""
_HEARD_S = 20.0
"""Time by which most members have heard of a loss, over links that are busy with a round."""

_OPERATOR = {"ca": "ca.pem", "certificate": "operator.pem", "key": "operator.key"}


def call(
    config: Config, base: Path, peer: int | PeerAddress | None, verb: str, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a peer's answer to a control call (`CONTROL_VERBS`); None asks the configuration's own peer, an entry one
    that the configuration does not list (`newcomers`).

    `base` is where the relative paths of the configuration start. Raises RemoteError (PeerUnreachable if there is no
    answer, or the peer listens nowhere), SecurityError if the certificate does not allow the call.
    """
    return asyncio.run(ask(config, base, peer, verb, arguments))


async def ask(
    config: Config, base: Path, peer: int | PeerAddress | None, verb: str, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Act as `call`, on the running event loop."""
    index = config.peer.index if peer is None else peer
    if isinstance(index, int) and not 0 <= index < config.num_peers:
        raise ConfigError(
            "is not a peer of this run", key="peer.index", value=index, valid=f"0 to {config.num_peers - 1}"
        )
    entry = config.peers[index] if isinstance(index, int) else index
    is_own = index == config.peer.index
    how: dict[str, Any] = {"name": entry.name, "security": credentials(config, base), "timeout_s": TIMEOUT_S}
    try:
        if is_own and (local := _own_socket(config, base)) is not None:
            # The listener there may be a process that a script of the peer's left behind.
            with contextlib.suppress(PeerUnreachable):
                return await call_control(local, verb, arguments, **how)
        address = _address(entry, config.peer.listen if is_own else None)
        return await call_control(address, verb, arguments, **how)
    except RemoteError as error:
        raise type(error)(error.problem, peer=index if isinstance(index, int) else None) from None


@dataclass(frozen=True)
class Asked:
    """A peer to ask."""

    config: Config
    base: Path
    peer: int | PeerAddress | None = None
    """An index in the list of the configuration, an entry that it does not have, or None for its own peer."""


def call_all(
    asked: Sequence[Asked], verb: str, arguments: dict[str, Any] | None = None
) -> list[dict[str, Any] | SottoError]:
    """Act as `ask_all`, without a running event loop."""
    return asyncio.run(ask_all(asked, verb, arguments))


async def ask_all(
    asked: Sequence[Asked], verb: str, arguments: dict[str, Any] | None = None
) -> list[dict[str, Any] | SottoError]:
    """Return the answer of each of several peers, or why it has none. They are asked at once: one that is silent, or
    answers nonsense, keeps nobody from being asked."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def answer(each: Asked) -> dict[str, Any] | SottoError:
        async with limit:
            try:
                return await ask(each.config, each.base, each.peer, verb, arguments)
            except SottoError as error:
                return error

    return await asyncio.gather(*map(answer, asked))


async def remove(config: Config, base: Path, name: str) -> dict[str, Any]:
    """Have a peer announce that another one is lost, by the operator's order; return its answer once the others have
    heard of it, since it may not have done so. Raises SottoError with the reason of one that refused, or that no peer
    can be reached; SecurityError where the operator's certificate is not at hand."""
    operator = _operator(config, base)
    own = config.peer.index
    listed = [own, *(index for index, peer in enumerate(config.peers) if index != own and peer.name != name)]
    members = [Asked(config, base, peer) for peer in listed]
    statuses = await ask_all(members, "status")
    more = {number: entry for each in _answered(statuses) for number, entry in newcomers(config, base, each).items()}
    joined = [Asked(config, base, entry) for entry in more.values() if entry.name != name]
    members, statuses = members + joined, statuses + await ask_all(joined, "status")
    refusals = [each for each in statuses if isinstance(each, SottoError)]
    said = Counter(_said_of(name, each).get("incarnation", 0) for each in _answered(statuses))
    order = loss_order(name, config.run.name, operator, *(number for number, _ in said.most_common(1)))
    # Only those who hear the peer can tell in which round it was lost.
    for member, status in zip(members, statuses, strict=True):
        if isinstance(status, SottoError):
            continue
        try:
            answer = await ask(config, base, member.peer, "remove", {"name": name, "order": order.hex()})
        except SottoError as error:
            refusals.append(error)
            continue
        if await _have_heard([each for each in members if each is not member], name):
            return answer
        refusals.append(
            RemoteError(
                f"took the order to remove {name}, and {_HEARD_S:g} s later most of the others have not heard of it;"
                " run the command again",
                peer=member.peer if isinstance(member.peer, int) else None,
            )
        )
    # That a peer cannot be reached says less than why one that can be has refused.
    raise min(refusals, key=lambda error: isinstance(error, PeerUnreachable))


async def _have_heard(members: Sequence[Asked], name: str) -> bool:
    """Wait until at least half of the members that answer have heard of a loss; return whether they have in time."""
    deadline = time.monotonic() + _HEARD_S
    while True:
        answers = _answered(await ask_all(members, "status"))
        if 2 * sum(_has_heard(name, each) for each in answers) >= len(answers):
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.3)


def _has_heard(name: str, status: Mapping[str, Any]) -> bool:
    """Whether a peer says that another one is lost, or will be from a round on that may wait for more losses."""
    coming = ((change["kind"], change["name"]) for change in status.get("coming_changes", ()))
    return _said_of(name, status).get("state") == "lost" or (ChangeKind.LOST.name, name) in coming


def _answered(answers: Iterable[dict[str, Any] | SottoError]) -> list[dict[str, Any]]:
    return [each for each in answers if not isinstance(each, SottoError)]


def _said_of(name: str, status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a peer's report about another one."""
    said: Mapping[str, Any] = status.get("peers", {}).get(name, {})
    return said


def _operator(config: Config, base: Path) -> Credentials | None:
    """Return the certificate with which an order is signed; None in a run without certificates. Raises SecurityError
    where it is not at hand."""
    if config.security.mode != "mtls":
        return None
    access = credentials(config, base)
    if not isinstance(access, Credentials) or access.identity.role is not Role.OPERATOR:
        raise SecurityError(
            "no peer believes that another one is lost without the operator's signature: run this where operator.pem"
            " and operator.key are, beside ca.pem or above the peer's folder"
        )
    return access


def may_operate(config: Config, base: Path) -> bool:
    """Return whether the operator's certificate is at hand, or calls need none."""
    return config.security.mode != "mtls" or _operator_folder(config, base) is not None


def newcomers(config: Config, base: Path, status: Mapping[str, Any]) -> dict[int, PeerAddress]:
    """Return the peers that an answer names and the configuration does not list, by index.

    The answering peer may invent them. Where the run has a CA, it must therefore have signed a certificate for exactly
    this index, name, address and relay. Elsewhere the peer's word has to do, for _MOST_UNSIGNED at most. Raises
    SecurityError without credentials.
    """
    listed = {peer.name for peer in config.peers}
    access = credentials(config, base)
    found: dict[int, PeerAddress] = {}
    for each in status.get("newcomers", []):
        said = (each["index"], each["name"], each.get("advertise"), each.get("relay"))
        if each["name"] in listed:
            continue
        with contextlib.suppress(SecurityError, ConfigError, ValidationError):
            if isinstance(access, Credentials):
                identity = vouched_identity(bytes.fromhex(each.get("certificate", "")), access.ca)
                if (identity.index, identity.name, identity.address, identity.relay) != said:
                    continue
            entry = PeerAddress(name=said[1], advertise=said[2], relay=said[3], admitted=True)
            if entry.advertise is not None:
                split_address(entry.advertise, key="advertise")
            found[said[0]] = entry
        if len(found) == _MOST_UNSIGNED and not isinstance(access, Credentials):
            break
    return found


def _address(entry: PeerAddress, listen: str | None) -> str:
    if entry.advertise is not None:
        return entry.advertise
    if listen:
        host, _, port = listen.rpartition(":")
        return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "") else f"{host}:{port}"
    raise PeerUnreachable("accepts no connections, and does not run here: run the command on its device")


def _own_socket(config: Config, base: Path) -> str | None:
    """Return the address of the socket that the own peer listens on in its state folder; None where it does not. Calls
    by it share no connections with strangers."""
    path = base / config.state.directory / OWN_SOCKET
    # Its folder is its owner's alone, and it may be that of a process that is gone.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return socket_address(path) if config.security.mode == "mtls" else None
    return None


def credentials(config: Config, base: Path) -> Access | None:
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
    return load_credentials(options, base, config.own.name)


def _operator_folder(config: Config, base: Path) -> Path | None:
    """Return the folder of the CA that holds the operator's certificate too: that of the peer, or the one above it."""
    own_folder = (base / config.security.ca).resolve().parent
    for folder in (own_folder, own_folder.parent):
        if all((folder / file).exists() for file in _OPERATOR.values()):
            return folder
    return None
