"""Why a peer could not be reached, as a sentence: gRPC's messages mean little to the person who has to mend it."""

from __future__ import annotations

from peer.net.rpc import Status, StreamLost

OTHER_CA = "shows a certificate that this run's CA did not sign"
"""What is said of the certificate of a peer of another run."""
_CLOSED_AT_ONCE = ("Socket closed", "Connection reset", "Broken pipe", "handshak", "GOAWAY", "EOF")


def why_unreachable(lost: StreamLost, *, name: str, place: str, address: str | None, encrypted: bool) -> str:
    """Return a sentence for a stream or call that failed before it was answered.

    `place` is where the peer `name` was dialled, for people. `sotto doctor` recognises some of these sentences.
    """
    details = str(lost)
    who = f"{name} at {place}"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return (
            f"{who} {OTHER_CA}, or that is not valid today; if the clocks are right, its"
            " folder or this one is of another run: copy both again from where `sotto init` made them"
        )
    if "not in peer certificate" in details or "Hostname Verification Check failed" in details:
        return f"{who} shows a certificate made out to another name; is this the address of {name}?"
    if "WRONG_VERSION_NUMBER" in details or "HTTP_REQUEST" in details:
        return f"{who} does not speak TLS; security.mode must be the same on every peer"
    if "Connection refused" in details:
        return f"nobody listens at {address}, the address of {name}"
    if "No route to host" in details:
        return f"no device answers at {address}, the address of {name}, or a firewall there rejects it"
    if "errors resolving" in details or "DNS resolution failed" in details or "Domain name not found" in details:
        return f"the host name in {address}, the address of {name}, is not known"
    if lost.status is Status.UNIMPLEMENTED:
        return f"{who} is not a peer of this program"
    if lost.status is Status.UNAVAILABLE and any(sign in details for sign in _CLOSED_AT_ONCE):
        cause = "it may not accept our certificate, or speak without TLS" if encrypted else "it may want TLS"
        return f"{who} closed the connection at once; {cause}"
    return f"{who} cannot be reached ({details})"
