"""Control calls: the requests of an operator, or of another peer of the run, to a running peer.

`revoke` and `probe` concern the transport and are answered here, the other verbs by its user (`Handler.control`).
Arguments and results are JSON objects (`proto/sottovoce/v1/control.proto`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from peer.errors import LocalProtocolError, PeerUnreachable, RemoteError, RemoteProtocolError, SecurityError, SottoError
from peer.foreign_text import quote
from peer.foreign_values import parse_json
from peer.net.address import split_address
from peer.net.admission import CONTROL_VERBS, Admission
from peer.net.answers import EXAMINED, read_answer
from peer.net.handshake import Handshake
from peer.net.hello import PROTOCOL_MAX, told_settings
from peer.net.links import Links
from peer.net.revocation_watch import RevocationWatch
from peer.net.rpc import LOCAL, Caller, CallRefused, Channel, Server, Status, StreamLost
from peer.net.security.credentials import Access, Credentials
from peer.net.security.proofs import CHALLENGE_BYTES, check_proof, prove
from peer.net.services import CONTROL_SERVICE
from peer.net.unreachable import why_unreachable
from peer.proto.sottovoce.v1 import control_pb2
from peer.rate_limits import Allowance, Allowances

_MAX_ARGUMENTS = 64 * 1024
_CANNOT_ANSWER = "it cannot answer this call, which is a bug; its log says more"
_PROBE_TIMEOUT_S = 5.0
_CALLS_OF_A_MEMBER = {"rate": 10.0, "burst": 100.0}
"""Calls of one member with a certificate, a second and at once. Each takes a millisecond or two of this process."""


@dataclass(kw_only=True)
class ControlService:
    """Answers control calls."""

    admission: Admission
    links: Links
    revocations: RevocationWatch | None
    handshake: Handshake
    dial_timeout_s: float

    def __post_init__(self) -> None:
        """Let each caller ask a few times at once."""
        self._hello, self._access = self.handshake.info, self.handshake.access
        self._probe_timeout_s = min(self.dial_timeout_s, _PROBE_TIMEOUT_S)
        self._probes = Allowance(rate=1.0, burst=10.0, now=0.0)
        self._calls = Allowances(**_CALLS_OF_A_MEMBER)

    def serve(self, server: Server) -> None:
        """Have a server answer control calls."""
        server.serve_calls(
            CONTROL_SERVICE, {verb.capitalize(): functools.partial(self._answer, verb) for verb in CONTROL_VERBS}
        )

    async def _answer(self, verb: str, caller: Caller, request: bytes) -> bytes:
        """Return the response to a call. Raises CallRefused."""
        try:
            self.admission.check_control(verb, caller)
            # Now: the list that a call brings may revoke its caller.
            verifier = self.admission.account(caller)
            if not self.admission.is_trusted(caller) and not self._calls.spend(verifier, _now()):
                raise CallRefused(Status.FAILED_PRECONDITION, f"{quote(verifier)} calls too often; try again later")
        except SecurityError as error:
            raise CallRefused(Status.PERMISSION_DENIED, str(error)) from None
        arguments, challenge = _parse_request(request)
        try:
            if verb == "revoke":
                result = self._take_revocations(arguments)
            elif verb == "probe":
                result = await self.probe(arguments.get("index"), caller)
            else:
                result = await self.links.handler.control(verb, arguments, verifier)
            response = control_pb2.ControlResponse(result=json.dumps(result))
        except SottoError as error:
            raise CallRefused(Status.FAILED_PRECONDITION, str(error)) from None
        except Exception as error:  # The arguments, or what they ask of, are the caller's; the process goes on.
            self.links.blame_caller(caller.address, error)
            raise CallRefused(Status.FAILED_PRECONDITION, _CANNOT_ANSWER) from None
        if isinstance(self._access, Credentials) and len(challenge) == CHALLENGE_BYTES:
            answer = response.result.encode()
            response.certificate, response.proof = prove(self._access, challenge, verifier=verifier, answer=answer)
        return response.SerializeToString()

    def _take_revocations(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if self.revocations is None:
            raise SecurityError('certificates are revoked with security.mode = "mtls" only')
        pem = arguments.get("list")
        if not isinstance(pem, str) or not pem.isascii():
            raise SecurityError("the call holds no list of revoked certificates; `sotto admin revoke` sends one")
        return self.revocations.take(pem.encode())

    async def probe(self, index: object, caller: Caller) -> dict[str, Any]:
        """Return how this peer sees a neighbour, and whether it can connect to the address that it knows of it.

        `sotto doctor` of that neighbour asks. Only addresses of our own configuration are ever dialled.
        """
        answer: dict[str, Any] = {
            "name": self._hello.name,
            "software": self._hello.software,
            "protocol": [self.handshake.needed_protocol(), PROTOCOL_MAX],
            "time": time.time(),
            "seen_as": caller.address,
            "job": self._hello.run_digest,
            "job_parts": list(self._hello.shared_sections),
            "settings": told_settings(self._hello.settings),
            "neighbor": None,
        }
        neighbor = self.links.neighbors.get(index) if isinstance(index, int) else None
        if neighbor is None:
            return answer
        is_up = self.links.connection(neighbor.index) is not None
        problem = self.links.refusals.get(neighbor.index) or self.links.problems.get(neighbor.index)
        answer |= {
            "neighbor": neighbor.name,
            "link": is_up,
            "problem": None if is_up else problem,
            "address": neighbor.address,
            "reached": None,
            "reason": None,
        }
        if neighbor.address is None:
            return answer
        if not self._probes.spend(1, _now()):
            raise RemoteError("this peer received too many probes; try again in a few seconds")
        try:
            await call_control(
                neighbor.address, "status", name=neighbor.name, security=self._access, timeout_s=self._probe_timeout_s
            )
        except PeerUnreachable as error:
            answer |= {"reached": False, "reason": error.problem}
        except SottoError:
            answer["reached"] = True  # It answered, and only that was the question.
        else:
            answer["reached"] = True
        return answer


def _now() -> float:
    return asyncio.get_running_loop().time()


def _parse_request(request: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the arguments and the challenge of a call. Raises CallRefused."""
    try:
        parsed = control_pb2.ControlRequest.FromString(request)
        text = parsed.arguments
        arguments = parse_json(text or "{}", most_bytes=_MAX_ARGUMENTS)
        if not isinstance(arguments, dict):
            raise ValueError("not an object")
    except (DecodeError, ValueError):
        raise CallRefused(Status.INVALID_ARGUMENT, "the arguments are not a JSON object") from None
    return arguments, parsed.challenge


async def call_control(
    address: str,
    verb: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    name: str,
    security: Access | None,
    timeout_s: float = 10.0,
) -> dict[str, Any]:
    """Return the answer of the peer `name` at `address` ("host:port", or a `socket_address`) to a control verb, with
    the fields of that answer (`peer.net.answers`) and no others.

    Raises PeerUnreachable; SecurityError if our credentials do not allow the call, or the peer does not prove with its
    answer that it holds its certificate, or that was revoked; RemoteProtocolError for what no peer answers; RemoteError
    if it cannot be done.
    """
    if verb not in CONTROL_VERBS:
        raise LocalProtocolError(f"there is no control call {verb!r}")
    if not address.startswith(LOCAL):
        split_address(address, key="address")
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    request = control_pb2.ControlRequest(
        arguments=json.dumps(dict(arguments or {})), challenge=challenge
    ).SerializeToString()
    channel = Channel(address, name, security)
    try:
        response = control_pb2.ControlResponse.FromString(
            await channel.call(CONTROL_SERVICE, verb.capitalize(), request, timeout_s=timeout_s)
        )
        if isinstance(security, Credentials):
            _check_answer(security, response, challenge, name=name, address=address)
        if response.result == json.dumps(EXAMINED):
            raise RemoteError(f"{name} at {address} is {EXAMINED['state']}")
        result = read_answer(verb, response.result)
    except StreamLost as error:
        if error.status is Status.PERMISSION_DENIED:
            raise SecurityError(f"{name} at {address} does not allow it: {error}") from None
        if error.status is Status.DEADLINE_EXCEEDED:
            raise PeerUnreachable(f"{name} at {address} did not answer within {timeout_s:g} s") from None
        if error.status in (Status.FAILED_PRECONDITION, Status.INVALID_ARGUMENT):
            raise RemoteError(f"{name} at {address}: {error}") from None
        if error.status is Status.UNIMPLEMENTED and verb == "metrics":
            raise RemoteError(f"{name} at {address} does not know this call; is it of an earlier release?") from None
        raise PeerUnreachable(
            why_unreachable(error, name=name, place=address, address=address, encrypted=security is not None)
        ) from None
    except SottoError:
        raise
    except Exception as error:  # Any error: the input is another's, and the caller goes on.
        why = str(error) if isinstance(error, DecodeError | ValueError) else type(error).__name__
        raise RemoteProtocolError(f"{name} at {address} answered {verb!r} with nonsense: {why}") from error
    finally:
        await channel.close()
    if verb in ("status", "probe") and result["name"] != name:
        raise RemoteProtocolError(f"{name} at {address} answered {verb!r} as {result['name']!r}")
    return result


def _check_answer(
    security: Credentials, response: control_pb2.ControlResponse, challenge: bytes, *, name: str, address: str
) -> None:
    """Raise SecurityError unless it was the peer `name` that answered, and its certificate still counts."""
    if not response.proof:
        raise SecurityError(
            f"{name} at {address} does not prove that it holds its certificate; is it of the same release?"
        )
    try:
        check_proof(
            security,
            response.certificate,
            response.proof,
            challenge,
            prover=name,
            answer=response.result.encode(),
        )
    except SecurityError as error:
        raise SecurityError(f"the answer from {address} is not to be believed: {error}") from None
