"""Permission to see the page's figures and to act, checked before anything else of a request.

The page itself holds no figures. Figures and actions need the token, which stands behind the `#` of the address, so
that browsers send it to nobody. The page sends it as a bearer token, which no other page can make a browser do. There
is no cookie: browsers would add it to requests that other pages forge, and send it to other ports of this machine.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names under which the page is reached. Another port is one that SSH forwards."""


def why_refused(method: str, path: str, headers: Mapping[str, str], token: str) -> tuple[int, str] | None:
    """Return the status and reason for which a request is refused; None if it is not. Header names in lower case."""
    host = headers.get("host", "")
    if _hostname(f"http://{host}") not in LOOPBACK:
        # A name that was made to lead here (DNS rebinding) still stands in the header.
        return 421, "this page is served under 127.0.0.1 and localhost only"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return 403, "another page asked for this"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "another page asked for this"
    if path in OPEN_PATHS and method in ("GET", "HEAD"):
        return None
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), token.encode()):
        return 401, "this needs the whole address that `sotto watch` printed"
    if method == "POST" and origin is None:
        return 403, "a browser says which page asks"
    return None


OPEN_PATHS = ("/", "/watch.js", "/charts.js", "/page.css")
"""Paths that anybody on this machine may read: the same for every run."""


def _hostname(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
