"""The connection in which an invited device asks for a certificate: `sotto join` dials, `sotto invite` listens.

    device                                operator's machine
       TLS 1.3: the listener shows the operator's certificate, whose role no peer has
       ◀─ Hello {ca, nonce, you}          `you`: the host that the listener sees
       The device has sent nothing yet. It goes on if `ca` has the SHA-256 of the invitation and signed what TLS showed.
       ── Ask {id, nonce, request, proof} ─▶     proof: HMAC(secret; "device", talk, request)
       Nothing of the request is read before its proof is right.
       ◀─ Answer {content, proof}         proof: HMAC(secret; "operator", talk, content)
       content: JSON; its `state` is "waiting" or "refused" (and `why`), or "admitted" (and certificate, revoked, index,
       settings)
       ── Kept {} ─▶                      only after "admitted": the device has written its folder
    talk: run, digest of the CA, of the certificate that TLS showed, ID, both nonces. Message: length (4 bytes), JSON.

A device asks again until the answer is no longer "waiting", each time in a new connection of a few seconds. So nothing
is held for it, and it need not know whether the operator or the network is away. Only the shape of messages is known
here; `ops.invitations` decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from peer.errors import ConfigError, PeerUnreachable, RemoteProtocolError, SecurityError, StateError
from peer.foreign_values import as_kind, parse_json
from peer.net.address import split_address
from peer.net.security.certificates import (
    Role,
    check_dates,
    der,
    parse_certificate,
    parse_shown,
    pem,
    read_identity,
    utc_now,
    was_signed_by,
)
from peer.net.security.invitations import ID_BYTES, NONCE_BYTES, Invitation
from peer.rate_limits import Allowances, Complaints

log = logging.getLogger("sotto.invite")

TALK_S = 10.0
"""Longest time of a connection."""
_HELLO_BYTES, _ASK_BYTES, _ANSWER_BYTES, _KEPT_BYTES = 16 << 10, 24 << 10, 1 << 20, 16
_MOST_TALKS, _MOST_TALKS_OF_A_HOST = 16, 4
_TRIES, _TRIES_A_MINUTE, _MOST_HOSTS = 10, 6, 4096
"""Wrong proofs of one host until it is not heard, those that are heard again each minute, hosts that are remembered."""


@dataclass(frozen=True)
class Hello:
    """First message of the listener."""

    ca: str
    nonce: str
    you: str


@dataclass(frozen=True)
class Ask:
    """What a device asks for, and its proof of the secret."""

    id: str
    nonce: str
    request: str
    proof: str


@dataclass(frozen=True)
class Answer:
    """The operator's answer, with a proof of the secret; both empty for a device that proved nothing."""

    content: str
    proof: str


@dataclass(frozen=True)
class Kept:
    """The device has written what it was given."""


Message = TypeVar("Message", Hello, Ask, Answer, Kept)


class Desk(Protocol):
    """Decides on what devices ask for. Called from several threads."""

    def invitation(self, id_: bytes) -> Invitation | None:
        """Return the invitation with this ID, if there is one."""
        ...

    def answer(self, id_: bytes, request: bytes, host: str) -> Mapping[str, Any]:
        """Return the content of the answer to whoever proved the secret of this invitation."""
        ...

    def kept(self, id_: bytes) -> None:
        """Note that the device has written what it was given."""
        ...


class Listener:
    """Answers invited devices in threads of its own until it is closed; bounded in connections, bytes and time."""

    def __init__(self, desk: Desk, place: tuple[str, int], certificate: Path, key: Path, ca: bytes) -> None:
        """Listen at a host and port, with the operator's certificate and key. `ca`: the authority's, PEM.

        Raises ConfigError where the port is taken, SecurityError for files that are no certificate and key.
        """
        self._desk, self._ca = desk, ca.decode()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            self._tls.load_cert_chain(certificate, key)
        except OSError as error:
            raise SecurityError(f"{certificate} and {key} cannot be used: {error.strerror or error}") from None
        self._shown = der(certificate.read_bytes())
        try:
            family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
            self._socket = socket.create_server(place, family=family, dualstack_ipv6=place[0] == "::")
        except OSError as error:
            problem = f"cannot be listened on: {error.strerror}; choose another port"
            raise ConfigError(problem, key="--port", value=place[1]) from None
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._talks = Counter[str]()
        self._tries = Allowances(rate=_TRIES_A_MINUTE / 60, burst=_TRIES)
        self.wrong_proofs = 0
        """Number of devices that asked without knowing a secret."""
        self._complaints = Complaints(per_minute=20, now=time.monotonic())
        threading.Thread(target=self._accept, name="sotto invite", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        # Only this wakes a thread that waits in `accept`.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, address = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.1)  # Too many open files, or the like, which passes.
                continue
            host = str(address[0]).removeprefix("::ffff:")
            with self._lock:
                has_room = self._talks.total() < _MOST_TALKS and self._talks[host] < _MOST_TALKS_OF_A_HOST
                if has_room:
                    self._talks[host] += 1
            if has_room:
                threading.Thread(target=self._serve, args=(caller, host), daemon=True).start()
            else:
                caller.close()

    def _serve(self, caller: socket.socket, host: str) -> None:
        try:
            with caller:
                caller.settimeout(TALK_S)
                channel = _Channel(self._tls, caller, server_side=True)
                with channel.tls:
                    self._talk(channel, host)
        except (OSError, RemoteProtocolError) as error:
            self._complain(f"{host} asked nothing that can be answered: {error}")
        except Exception:  # The end of a thread: the other devices are answered all the same.
            log.exception("a device at %s could not be answered", host)
        finally:
            with self._lock:
                self._talks[host] -= 1
                self._talks += Counter()  # Without those that are at 0.

    def _talk(self, channel: _Channel, host: str) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        channel.send(Hello(self._ca, nonce.hex(), host))
        ask = channel.receive(Ask, _ASK_BYTES)
        id_, request = _bytes(ask.id, ID_BYTES), ask.request.encode()
        nonces = nonce, _bytes(ask.nonce, NONCE_BYTES)
        invitation = self._desk.invitation(id_) if self._may_try(host) else None
        if invitation is None or not invitation.is_proven(ask.proof, "device", self._shown, nonces, request):
            self._note_proof(host, is_right=False)
            # The same for an ID that nobody knows and a wrong secret: nobody learns which invitations there are.
            channel.send(Answer("", ""))
            return
        self._note_proof(host, is_right=True)
        answer = self._desk.answer(id_, request, host)
        content = json.dumps(answer)
        proof = invitation.proof("operator", self._shown, nonces, content.encode())
        channel.send(Answer(content, proof))
        if answer.get("state") == "admitted" and channel.receive(Kept, _KEPT_BYTES) == Kept():
            self._desk.kept(id_)

    def _may_try(self, host: str) -> bool:
        """Return whether a host may try a proof now, which counts until it turns out to be right."""
        with self._lock:
            return self._tries.spend(host, time.monotonic())

    def _note_proof(self, host: str, *, is_right: bool) -> None:
        with self._lock:
            if is_right:
                self._tries.give_back(host)
                return
            self.wrong_proofs += 1
            if self.wrong_proofs % _MOST_HOSTS == 0:
                self._tries = Allowances(rate=_TRIES_A_MINUTE / 60, burst=_TRIES)
        self._complain(f"{host} does not know the secret of an open invitation")

    def _complain(self, sentence: str) -> None:
        with self._lock:
            addition = self._complaints.worth_a_line(time.monotonic())
        if addition is not None:
            log.info("%s%s", sentence, addition)


def ask(
    invitation: Invitation,
    address: str,
    request: Callable[[str | None], bytes],
    keep: Callable[[Mapping[str, Any], bytes], None],
) -> Mapping[str, Any]:
    """Ask for a certificate at one address of an invitation; return the content of the answer.

    `request` returns what is asked for (PEM), once the authority is verified; it is given the address of this device,
    if the operator's machine sees the same. `keep` writes what a device that is admitted was given, with the
    authority's certificate (PEM). Raises PeerUnreachable, SecurityError if somebody else answers, RemoteProtocolError.
    """
    host, port = split_address(address, key="address")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    # The authority is not known yet, only its digest: `_verified` does what OpenSSL would do.
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    with _unreachable_at(address), socket.create_connection((host, port), timeout=TALK_S) as connection:
        channel = _Channel(tls, connection, server_side=False)
        with channel.tls:
            hello = channel.receive(Hello, _HELLO_BYTES)
            shown = channel.tls.getpeercert(binary_form=True) or b""
            ca = _verified(invitation, address, hello.ca.encode(), shown)
            own = str(channel.tls.getsockname()[0])
            asked = request(own if own == hello.you else None)
            nonces = _bytes(hello.nonce, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            proof = invitation.proof("device", shown, nonces, asked)
            channel.send(Ask(invitation.id.hex(), nonces[1].hex(), asked.decode(), proof))
            answer = channel.receive(Answer, _ANSWER_BYTES)
            if not answer.content:
                raise SecurityError(
                    f"the operator's machine at {address} does not know this invitation; it expired, or was made in"
                    " another folder: ask for a new one"
                )
            if not invitation.is_proven(answer.proof, "operator", shown, nonces, answer.content.encode()):
                raise SecurityError(f"whoever answers at {address} does not know this invitation; nothing was written")
            content = _object(answer.content)
            if content.get("state") == "admitted":
                keep(content, ca)
                channel.send(Kept())
            return content


def _verified(invitation: Invitation, address: str, ca: bytes, shown: bytes) -> bytes:
    """Return the authority's certificate (PEM) alone. Raises SecurityError unless it is that of the
    invitation, and has signed the certificate that TLS `shown` (DER) for an operator."""
    authority = parse_certificate(ca, "the authority's certificate")
    if hashlib.sha256(der(ca)).digest() != invitation.authority:
        raise SecurityError(
            f"another run answers at {address}, or somebody in its name: its CA is not that of the invitation; nothing"
            f" was sent to it. There, `sotto invite` has to run with the folder of {invitation.run}; or ask anew"
        )
    certificate = parse_shown(shown, f"whoever answers at {address}")
    if not was_signed_by(certificate, authority):
        raise SecurityError(f"whoever answers at {address} has no certificate of this run; nothing was sent to it")
    role = read_identity(certificate).role
    if role is not Role.OPERATOR:
        raise SecurityError(
            f"{role.with_article} answers at {address}, and only the operator's machine invites; nothing was sent to it"
        )
    check_dates(certificate, f"the operator's certificate at {address}", utc_now())
    # What else came with it would be believed, too.
    return pem(authority)


class _Channel:
    """TLS over a connection, with messages, for at most `TALK_S` from the handshake on."""

    def __init__(self, tls: ssl.SSLContext, connection: socket.socket, *, server_side: bool) -> None:
        self._until = time.monotonic() + TALK_S
        self.tls = tls.wrap_socket(connection, server_side=server_side)

    def send(self, message: Hello | Ask | Answer | Kept) -> None:
        data = json.dumps(asdict(message)).encode()
        self._allow()
        self.tls.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self, kind: type[Message], most_bytes: int) -> Message:
        """Return the next message. Raises OSError if none comes in time, RemoteProtocolError if it is another kind."""
        length = int.from_bytes(self._take(4), "big")
        if length > most_bytes:
            raise RemoteProtocolError(f"a message of {length:,} bytes, where {most_bytes:,} are the most")
        try:
            return as_kind(kind, parse_json(self._take(length), most_bytes=most_bytes), "the message")
        except (ValueError, StateError) as error:
            raise RemoteProtocolError(str(error)) from None

    def _take(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._allow()
            piece = self.tls.recv(count - len(data))
            if not piece:
                raise ConnectionError("the connection was closed")
            data += piece
        return bytes(data)

    def _allow(self) -> None:
        """Let the next call take the time that is left: one byte every few seconds holds nothing for long."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done after {TALK_S:g} s")
        self.tls.settimeout(left)


@contextlib.contextmanager
def _unreachable_at(address: str) -> Iterator[None]:
    """Raise PeerUnreachable for errors of the network."""
    try:
        yield
    except OSError as error:
        raise PeerUnreachable(f"nobody answers at {address}: {error.strerror or error}") from None


def _bytes(text: str, count: int) -> bytes:
    """Return `count` bytes from hex digits. Raises RemoteProtocolError."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != count:
        raise RemoteProtocolError(f"no {count} bytes in hex digits")
    return data


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = parse_json(text, most_bytes=_ANSWER_BYTES)
    except ValueError as error:
        raise RemoteProtocolError(f"the answer is {error}") from None
    if not isinstance(value, dict):
        raise RemoteProtocolError("the answer is no object")
    return value
