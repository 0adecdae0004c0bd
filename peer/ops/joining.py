"""An invited device: it makes its key, asks until it is admitted, verifies what it is given, and writes its folder."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.config.options import SECTIONS, SHARED_SECTIONS, Config, check
from peer.config.writer import SHARED_PATHS, moved
from peer.errors import ConfigError, PeerUnreachable, RemoteProtocolError, SecurityError, StateError
from peer.foreign_text import printable
from peer.foreign_values import as_kind
from peer.net.enrolling import ask
from peer.net.security.certificates import Role, is_signed_by, parse_certificate, pem, public_key, read_identity
from peer.net.security.invitations import Invitation
from peer.net.security.keys import parse_key, read_secret
from peer.net.security.requests import read_request
from peer.net.security.revocation_list import RevocationList
from peer.ops import enrollment
from peer.ops.cluster_files import join_address
from peer.ops.enrollment import CONFIG_FILE, KEY_FILE, REQUEST_FILE, listen_of
from peer.terminal import telling

_PORT = 7700
"""Port of a device, or the next that is free, unless its `host` has one."""
_PAUSE_S = 2.0
"""Between two questions, while the operator decides or is away."""


@dataclass(frozen=True)
class _Given:
    """The answer to a device that is admitted, or has to wait, or is refused."""

    state: str
    why: str = ""
    certificate: str = ""
    revoked: str = ""
    index: int = 0
    settings: dict[str, Any] | None = None


def join(
    folder: Path,
    invitation: Invitation,
    *,
    name: str,
    host: str | None,
    own: Config,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Ask for a certificate until the operator has decided; write the device's folder, and return its peer.toml.

    `host` is where others reach the device, HOST[:PORT]; "-": nowhere; None: where the operator's machine sees it, if
    nothing translates addresses in between. `own` has the sections that are this device's alone. `say` is told what is
    waited for, again and again. Raises ConfigError, SecurityError (refused, or somebody else answers),
    PeerUnreachable if the invitation expires before anybody answers, RemoteProtocolError.
    """
    file = folder / CONFIG_FILE
    if file.exists():
        raise ConfigError("is there already: this device has joined; start it with `sotto run`", file=str(file))
    _refuse_shared(own)
    held = contextlib.ExitStack()
    said = "nobody has answered yet"
    made = b""

    def request(seen: str | None) -> bytes:
        nonlocal made
        if not made:
            reached = host or (_free_address(seen, held) if seen else None)
            thumbprint = enrollment.request(folder, name, reached, _PORT, again=True)
            made = (folder / REQUEST_FILE).read_bytes()
            address = read_request(made).address or "nowhere: it dials the others"
            say(f"{name} asks for a certificate; the others reach it at {address}; thumbprint of its key: {thumbprint}")
        return made

    def keep(content: Mapping[str, Any], ca: bytes) -> None:
        _write(folder, _read(content), ca, own)

    with held, telling(lambda: f"waiting: {said}", say):
        while True:
            given, why = _ask(invitation, request, keep)
            if given is not None and given.state == "admitted":
                return file
            if given is not None and given.state == "refused":
                raise SecurityError(f"not admitted: {given.why}")
            if time.time() >= invitation.expires:
                raise PeerUnreachable(f"the invitation has expired; ask for a new one (not admitted: {why})")
            if why != said:
                say(f"waiting: {why}")
                said = why
            sleep(_PAUSE_S)


def device_name() -> str:
    """Return a name for this device: that of the host, as far as it can be a peer's."""
    found = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-")
    return found[:63].strip("-") or "device"


def _free_address(host: str, held: contextlib.ExitStack) -> str:
    """Return an address of this device, "host:port", at which nothing listens yet. It is `held` meanwhile, so that
    another peer that joins on this machine at the same time takes the next one."""
    for port in range(_PORT, _PORT + 100):
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            held.enter_context(socket.create_server((host, port), family=family))
            return join_address(host, port)
    return join_address(host, _PORT)


def _ask(
    invitation: Invitation, request: Callable[[str | None], bytes], keep: Callable[[Mapping[str, Any], bytes], None]
) -> tuple[_Given | None, str]:
    """Return the answer of the first address that has one, and what is waited for. Raises SecurityError or
    RemoteProtocolError if only others answer."""
    problems: list[str] = []
    wrong: SecurityError | RemoteProtocolError | None = None
    for address in invitation.addresses:
        try:
            given = _read(ask(invitation, address, request, keep))
        except (SecurityError, RemoteProtocolError) as error:
            wrong = error
        except PeerUnreachable as error:
            problems.append(str(error))
        else:
            return given, given.why
    if wrong is not None:
        raise wrong
    return None, f"{'; '.join(problems)}; `sotto invite` has to run there, and to be reached from here"


def _read(content: Mapping[str, Any]) -> _Given:
    try:
        given = as_kind(_Given, content, "the answer")
    except StateError as error:
        raise RemoteProtocolError(str(error)) from None
    if given.state not in ("waiting", "refused", "admitted"):
        raise RemoteProtocolError(f"the answer is {given.state[:40]!a}, which this release does not know")
    return _Given(**{**vars(given), "why": printable(given.why)})


def _write(folder: Path, given: _Given, ca: bytes, own: Config) -> None:
    """Write the folder of a device that is admitted. Raises SecurityError or RemoteProtocolError, before anything is
    written, unless the certificate is for what was asked, and the settings are those that a device takes."""
    config = _configuration(given, own)
    key_file = folder / KEY_FILE
    asked = read_request((folder / REQUEST_FILE).read_bytes())
    signed = parse_certificate(given.certificate.encode(), "the certificate")
    certificate = pem(signed)
    identity = read_identity(signed)
    entry = config.peers[given.index]
    # Only what not every list has stands in the certificate.
    place = (given.index, entry.advertise, entry.relay) if entry.admitted else (None, None, None)
    is_own = public_key(signed, "the certificate") == parse_key(read_secret(key_file), key_file).public_key()
    if (
        not is_own
        or not is_signed_by(certificate, ca)
        or (identity.name, entry.advertise) != (entry.name, asked.address)
        # A seat has a name already.
        or (entry.admitted and entry.name != asked.name)
        or identity.role is not Role.PEER
        or (identity.index, identity.address, identity.relay) != place
    ):
        raise SecurityError("the certificate that came is not the one that was asked for; nothing was written")
    if given.revoked:
        RevocationList(ca).adopt(given.revoked.encode(), "the list of revoked certificates")
    enrollment.fill(folder, certificate, ca, given.revoked.encode(), moved(config, Path.cwd(), folder))


def _configuration(given: _Given, own: Config) -> Config:
    """Return the device's configuration: the run's shared sections, all others its own. Raises RemoteProtocolError."""
    told = given.settings or {}
    if beyond := sorted(told.keys() - {*SHARED_SECTIONS}):
        raise RemoteProtocolError(f"the answer sets {', '.join(beyond)[:200]}, which are this device's own")
    tree = {name: getattr(own, name).model_dump(mode="json") for name in SECTIONS if name not in SHARED_SECTIONS}
    try:
        config = check({**tree, **told, "peer": {**tree["peer"], "index": given.index}})
    except ConfigError as error:
        raise RemoteProtocolError(f"the run has settings that this release does not take: {error}") from None
    for section, key in SHARED_PATHS:
        if getattr(getattr(config, section), key) is not None:
            raise RemoteProtocolError(f"the answer sets {section}.{key}, and paths are this device's own")
    if not config.peers:
        raise RemoteProtocolError("the answer names no peers")
    listen = own.peer.listen
    if "listen" not in own.peer.model_fields_set:
        listen = listen_of(config.peers, config.peers[given.index])
    peer = config.peer.model_copy(update={"listen": listen})
    data = config.data.model_copy(update={"directory": own.data.directory})
    return config.model_copy(update={"peer": peer, "data": data})


def _refuse_shared(own: Config) -> None:
    """Raise ConfigError if this device wants to set what the run decides."""
    plain = Config()
    mine = own.model_copy(update={"data": own.data.model_copy(update={"directory": None})})
    for name in SHARED_SECTIONS:
        if getattr(mine, name) != getattr(plain, name):
            raise ConfigError("is the run's, and comes with the invitation; leave it out", key=name)
