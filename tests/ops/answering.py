"""Answers of peers that do not run, read as those of running ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peer.errors import RemoteProtocolError
from peer.net.answers import read_answer
from peer.net.security.authority import CertificateAuthority
from peer.net.security.certificates import Place, der
from peer.net.security.requests import read_request, request_certificate

STATUS: dict[str, Any] = {
    "name": "peer-0", "state": "running", "round": 7, "rounds": 9, "payload_bytes": 0, "links": {}, "seconds": 1.0,
    "neighbors": 2, "neighbors_up": 1,
}  # fmt: skip
"""What every status has."""
HONEST: dict[str, dict[str, Any]] = {
    "status": STATUS,
    "stop": {"stopping": True, "round": 7, "newcomers": [], "peers": {}},
    "snapshot": {"round": 7},
    "reload": {"added": [], "removed": {}, "left_to_others": {}},
    "leave": {"name": "peer-0", "round": 7, "from": 9},
    "remove": {"name": "peer-1", "round": 7, "from": 9},
    "metrics": {"columns": ["peer", "round", "time_s"], "rows": [[0, 0, 0.5]], "last": None},
    "revoke": {"number": 1, "revoked": 1, "news": True},
    "probe": {
        "name": "peer-0", "software": "sottovoce 0.3.0", "protocol": [3, 5], "time": 1.0, "seen_as": "ipv4:127.0.0.1:1",
        "job": "a.b", "job_parts": ["run"], "neighbor": None,
    },
}  # fmt: skip
"""Control call → an answer of an honest peer."""


def answered(verb: str, content: Any) -> dict[str, Any]:
    """Return an answer as `call_control` does. Raises RemoteProtocolError."""
    try:
        return read_answer(verb, json.dumps(content))
    except ValueError as error:
        raise RemoteProtocolError(f"answered {verb!r} with nonsense: {error}") from None


def newcomer(kits: Path, index: int, name: str, address: str = "10.0.0.9:7700") -> dict[str, Any]:
    """Return what a status says of a newcomer that the CA of a cluster folder has signed."""
    authority = CertificateAuthority.load(kits / "ca.pem", kits / "ca.key")
    request, _ = request_certificate(name)
    _, certificate = authority.grant(read_request(request), address=address, place=Place(index, address))
    said = {"index": index, "name": name, "advertise": address, "relay": None}
    return {**said, "certificate": der(certificate).hex()}
