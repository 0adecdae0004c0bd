"""The operator's desk for invited devices: which invitations there are, who asked with them, and what was decided.

Each invitation is a file of its own in `invitations/`, which only its user can enter, in the cluster's folder. The
file is written before anybody is told what is in it, so that `sotto invite` can be killed at any time and go on later:

    open ──first key that proves the secret──▶ bound ──operator──▶ admitted, or refused

From then on no other key is answered, and one that knows the secret is reported as a leak. The key that is bound gets
the same certificate again, until the invitation expires or the certificate is revoked. `enrollment` alone signs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from peer.config.options import SHARED_SECTIONS, load
from peer.config.writer import SHARED_PATHS
from peer.errors import ConfigError, SecurityError, SottoError, StateError
from peer.files import make_own_folder, write_whole
from peer.foreign_values import as_kind, parse_json
from peer.net.address import dialled_address, is_loopback, split_address
from peer.net.enrolling import Listener
from peer.net.security.certificates import der, identify, parse_certificate, public_key
from peer.net.security.invitations import (
    ID_BYTES,
    MOST_ADDRESSES,
    MOST_HOURS,
    SECRET_BYTES,
    Invitation,
    read_invitation,
)
from peer.net.security.requests import Request, key_thumbprint, read_request
from peer.net.security.revocation_list import RevocationList
from peer.ops import enrollment
from peer.ops.cluster_files import join_address
from peer.ops.enrollment import Admitted, Proposal
from peer.run.plan import why_no_changes

log = logging.getLogger("sotto.invite")

_FOLDER = "invitations"
_MOST_LEAKS = 8
"""Keys beside the first that are written down for one invitation."""
_MOST_BYTES = 1 << 17
_KEPT_S = 86400
"""Time after its expiry in which a device still learns that an invitation has expired."""


@dataclass(frozen=True)
class _Record:
    """What is known of one invitation; the content of its file."""

    text: str
    decision: Literal["open", "admitted", "refused"] = "open"
    key: str | None = None
    """Thumbprint of the first key that proved the secret."""
    request: str | None = None
    """What that key asks for, PEM, where it can be granted."""
    host: str = ""
    """Where it asked from last."""
    folder: str | None = None
    """Name of the folder that was written for it."""
    is_kept: bool = False
    """Whether the device has its certificate, or knows that it gets none."""
    leaks: tuple[str, ...] = ()
    """Thumbprints of other keys that proved the secret."""


@dataclass(frozen=True)
class Event:
    """Something that a person at the operator's machine is told."""

    kind: Literal["asks", "kept", "leak"]
    id: bytes
    name: str
    host: str
    """Where the device is, as this machine sees it."""
    thumbprint: str
    """Of its key."""
    bound: str
    """Of the first key that proved the secret; for a leak it is another one."""
    proposal: Proposal | None = None
    """asks: what would be signed."""


class Invitations:
    """The invitations of a cluster's folder. A context: within it no other process answers them."""

    def __init__(self, directory: Path, *, relay: str | None = None, passphrase: bytes | None = None) -> None:
        """`relay` and `passphrase` are as in `enrollment.propose`. Raises ConfigError, SecurityError; among others if
        members cannot change."""
        self._directory, self._relay, self._passphrase = directory, relay, passphrase
        self._authority = enrollment.read_authority(directory, passphrase).certificate
        self._run = _invitable(directory)
        self._folder = directory / _FOLDER
        self._lock = threading.RLock()
        self._records: dict[bytes, _Record] = {}
        self._asked: dict[bytes, tuple[object, ...]] = {}
        """What was put into `events` in this process and not decided: a device asks again and again."""
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __enter__(self) -> Invitations:
        """Read the invitations. Raises StateError if another process answers them."""
        make_own_folder(self._folder, 0o700)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(enrollment.locked(self._folder, waits=False))
            except BlockingIOError:
                raise StateError(
                    f"another `sotto invite` answers the invitations of {self._directory}; end it"
                ) from None
            self._records = dict(self._read())
            self._held = held.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Let another process answer them."""
        self._held.close()

    def issue(self, addresses: Sequence[str], valid_s: int) -> Invitation:
        """Return a new invitation to this machine, at `addresses` ("host:port"), that holds for `valid_s` seconds, once
        it is on disk. Raises ConfigError."""
        if not 0 < len(addresses) <= MOST_ADDRESSES:
            raise ConfigError(f"can be given {MOST_ADDRESSES} times at most", key="--host", value=len(addresses))
        for address in addresses:
            dialled_address(address, key="--host")
        if valid_s > MOST_HOURS * 3600:
            raise ConfigError(f"is {MOST_HOURS} at most", key="--hours", value=valid_s // 3600)
        digest = hashlib.sha256(der(self._authority)).digest()
        random = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        invitation = Invitation(self._run, tuple(addresses), digest, *random, int(time.time()) + valid_s)
        self._save(invitation.id, _Record(invitation.text()))
        return invitation

    def listen(self, addresses: Sequence[str]) -> Listener:
        """Return a listener for devices that dial `addresses`, "host:port" with one port, until it is closed. It is on
        loopback alone if all of them are there."""
        places = [split_address(each, key="--host") for each in addresses]
        host = "::" if any(":" in host for host, _ in places) else "0.0.0.0"
        host = "127.0.0.1" if all(is_loopback(host) for host, _ in places) else host
        files = self._directory / "operator.pem", self._directory / "operator.key"
        return Listener(self, (host, places[0][1]), *files, self._authority)

    def unanswered(self, of: Sequence[bytes] | None = None, *, is_for_seats: bool = False) -> list[bytes]:
        """Return the IDs of invitations, of all or of some, that have not expired and whose device does not know yet
        what became of it. Where they are for seats alone, those that came to nobody do not count once all are taken."""
        is_full = is_for_seats and not enrollment.free_seats(self._directory)
        with self._lock:
            return [
                id_
                for id_, record in self._records.items()
                if (of is None or id_ in of)
                and not (record.is_kept or (is_full and record.decision == "open"))
                and read_invitation(record.text).expires > time.time()
            ]

    def invitation(self, id_: bytes) -> Invitation | None:
        """Return the invitation with this ID, if there is one."""
        with self._lock:
            record = self._records.get(id_)
        return None if record is None else read_invitation(record.text)

    def answer(self, id_: bytes, request: bytes, host: str) -> Mapping[str, Any]:
        """Return the answer to whoever proved the secret of an invitation, and asks for `request` (PEM) from `host`."""
        with self._lock:
            record = self._records[id_]
            if read_invitation(record.text).expires <= time.time():
                return _refused("the invitation has expired; ask for a new one")
            try:
                asked = read_request(request)
                if record.key is None:
                    # Bound before it is answered: a second key must find this one, whatever is killed.
                    record = self._save(id_, replace(record, key=asked.thumbprint))
                if record.key != asked.thumbprint:
                    return self._leaked(id_, record, asked, host)
                if record.decision == "refused":
                    self._save(id_, replace(record, is_kept=True))
                    return _refused("the operator did not admit this device")
                if record.decision == "open":
                    folder = self._signed_before(record)
                    if folder is None:
                        return self._put_off(id_, record, request, host)
                    record = replace(record, decision="admitted", folder=folder.name)
                    record = self._save(id_, replace(record, request=request.decode(), host=host))
                return self._given(record)
            except SottoError as error:
                return _refused(str(error))

    def decide(self, event: Event, *, admit: bool) -> Admitted | None:
        """Sign what a device asks for, or refuse it for good; return what was signed, if anything was. Raises what
        `enrollment.admit` raises; the device may then ask for something else."""
        assert event.proposal is not None
        with self._lock:
            record = self._records[event.id]
            if self._asked.pop(event.id, None) != _meaning(event.proposal):
                return None
            if not admit:
                self._save(event.id, replace(record, decision="refused"))
                return None
            done = enrollment.admit(self._directory, event.proposal, passphrase=self._passphrase)
            self._save(event.id, replace(record, decision="admitted", folder=done.folder.name))
            return done

    def asked_now(self, event: Event) -> Event:
        """Return a question with what would be signed now: another device may have taken the seat since. Raises
        SottoError where nothing can be; the device is told so when it asks again."""
        with self._lock:
            request = self._records[event.id].request
            if self._asked.pop(event.id, None) is None or request is None:
                return event
            proposal = self._propose(request.encode())
            self._asked[event.id] = _meaning(proposal)
            return replace(event, name=proposal.request.name, proposal=proposal)

    def kept(self, id_: bytes) -> None:
        """Note that the device has its certificate."""
        with self._lock:
            record = self._records[id_]
            if not record.is_kept:
                self._save(id_, replace(record, is_kept=True))
                name = read_request((record.request or "").encode()).name
                self.events.put(Event("kept", id_, name, record.host, record.key or "", record.key or ""))

    def _put_off(self, id_: bytes, record: _Record, request: bytes, host: str) -> Mapping[str, Any]:
        """Keep what is asked for until the operator decides; return the answer until then. Raises SottoError."""
        waiting = {"state": "waiting", "why": "the operator has to confirm this device"}
        if id_ in self._asked and (record.request, record.host) == (request.decode(), host):
            return waiting
        asked, proposal = read_request(request), self._propose(request)
        self._save(id_, replace(record, request=request.decode(), host=host))
        if self._asked.get(id_) != _meaning(proposal):
            # What this key asked for before is no longer asked.
            self._asked[id_] = _meaning(proposal)
            self.events.put(Event("asks", id_, asked.name, host, asked.thumbprint, asked.thumbprint, proposal))
        return waiting

    def _propose(self, request: bytes) -> Proposal:
        """Return what would be signed for a request (PEM). Raises SottoError."""
        asked = read_request(request)
        relay = self._relay if asked.address is None else None
        proposal = enrollment.propose(
            self._directory, request, relay=relay, passphrase=self._passphrase, may_take_seat=True
        )
        if proposal.known:
            raise SecurityError(f"a device of this run has the name {asked.name}; join with another --name")
        return proposal

    def _signed_before(self, record: _Record) -> Path | None:
        """Return the folder with the certificate of a device, if it was signed and this process killed before it was
        noted."""
        for file in self._directory.glob("peer-*/peer.pem"):
            certificate = parse_certificate(file.read_bytes(), file)
            if key_thumbprint(public_key(certificate, file)) == record.key:
                return file.parent
        return None

    def _leaked(self, id_: bytes, record: _Record, asked: Request, host: str) -> Mapping[str, Any]:
        if asked.thumbprint not in record.leaks and len(record.leaks) < _MOST_LEAKS:
            record = self._save(id_, replace(record, leaks=(*record.leaks, asked.thumbprint)))
            log.warning(
                "an invitation has leaked: two keys prove its secret. First, from %s: %s. Refused, %r at %s: %s. If the"
                " first one is not your device's, answer no, or revoke its certificate (`sotto admin revoke`)",
                *(record.host or "unknown", record.key, asked.name, host, asked.thumbprint),
            )
            self.events.put(Event("leak", id_, asked.name, host, asked.thumbprint, record.key or ""))
        return _refused(
            f"another device has used this invitation, whose key is {record.key}; if you know nothing of that, it has"
            " leaked: tell the operator, and ask for a new one"
        )

    def _given(self, record: _Record) -> Mapping[str, Any]:
        """Return the answer to the device that was admitted. Raises SecurityError if its certificate was revoked."""
        folder = self._directory / str(record.folder)
        certificate = (folder / "peer.pem").read_bytes()
        identity = identify(certificate)
        revoked = self._directory / enrollment.LIST_FILE
        RevocationList(self._authority, revoked).check(identity.serial, identity.name)
        config = load(folder / enrollment.CONFIG_FILE, environment={})
        told = config.model_dump(mode="json", include={*SHARED_SECTIONS}, exclude_defaults=True)
        for section, key in SHARED_PATHS:
            told.get(section, {}).pop(key, None)
        # Without a name, a run is named after its task.
        told["run"] = {**told.get("run", {}), "name": config.run.name}
        return {
            "state": "admitted",
            "certificate": certificate.decode(),
            "revoked": revoked.read_text() if revoked.exists() else "",
            "index": config.peer.index,
            "settings": told,
        }

    def _save(self, id_: bytes, record: _Record) -> _Record:
        with self._lock:
            write_whole(self._folder / f"{id_.hex()}.json", json.dumps(asdict(record)))
            self._records[id_] = record
            return record

    def _read(self) -> Iterator[tuple[bytes, _Record]]:
        for file in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(FileNotFoundError):
                try:
                    value = parse_json(file.read_bytes(), most_bytes=_MOST_BYTES)
                except ValueError as error:
                    raise StateError(f"{file}: is damaged: {error}; remove it, and invite that device again") from None
                record = as_kind(_Record, value, file)
                invitation = read_invitation(record.text)
                if invitation.expires + _KEPT_S < time.time():
                    file.unlink()
                else:
                    yield invitation.id, record


def own_hosts(directory: Path, port: int) -> list[str]:
    """Return the addresses, "host:port", at which other devices of the run reach this machine: the one from which this
    machine would reach them. Raises ConfigError if it reaches none."""
    config, _ = enrollment.any_peer_file(directory)
    hosts = [split_address(each.advertise, key="advertise")[0] for each in config.peers if each.advertise]
    for host in hosts:
        if is_loopback(host):
            return [join_address("127.0.0.1", port)]
        with contextlib.suppress(ConfigError):
            return [join_address(address_towards(host), port)]
    return [join_address(address_towards(), port)]


def address_towards(host: str = "192.0.2.1") -> str:
    """Return the address of this machine from which it reaches a host; by default, one beyond its own network. Raises
    ConfigError if it has no way there."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # This sends nothing.
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        problem = "is missing: this machine has no way to other devices"
        raise ConfigError(problem, key="--host", valid="its address") from None


def _invitable(directory: Path) -> str:
    """Return the name of the run of a cluster's folder. Raises ConfigError if nobody can be invited to it."""
    config, _ = enrollment.any_peer_file(directory)
    if config.security.mode != "mtls":
        raise ConfigError("needs certificates to invite devices", key="security.mode", value=config.security.mode)
    if not enrollment.free_seats(directory) and (why := why_no_changes(config)) is not None:
        raise ConfigError(f"no device can be invited: {why}", key="peers")
    for section, key in (("graph", "file"), ("training", "warm_start")):
        if (value := getattr(getattr(config, section), key)) is not None:
            problem = "is a file, and an invitation brings none; use `sotto init --join` and `sotto admin sign`"
            raise ConfigError(problem, key=f"{section}.{key}", value=value)
    return config.run.name


def _refused(why: str) -> Mapping[str, Any]:
    return {"state": "refused", "why": why}


def _meaning(proposal: Proposal) -> tuple[object, ...]:
    """Return what somebody who confirms a proposal has seen of it."""
    reached = proposal.entry.advertise, proposal.entry.relay
    return proposal.request.thumbprint, proposal.request.name, reached, proposal.left_out, proposal.takes_seat
