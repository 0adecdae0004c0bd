"""Who is refused: names that were made to lead here, other pages, whoever has no token."""

from __future__ import annotations

import pytest

from peer.watch.access import OPEN_PATHS, why_refused

HOST = {"host": "127.0.0.1:8080"}
BEARER = {"authorization": "Bearer right"}
OWN = {"origin": "http://127.0.0.1:8080"}


def status(method: str, path: str, headers: dict[str, str]) -> int | None:
    refused = why_refused(method, path, headers, "right")
    return None if refused is None else refused[0]


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:8080", "localhost", "[::1]:9999", "LOCALHOST:1"])
def test_loopback_is_answered_at_any_port_that_leads_here(host: str) -> None:
    assert status("GET", "/events", {"host": host, **BEARER}) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "", "127.0.0.2",
     "evil.example@127.0.0.1.x", "[::1", "0.0.0.0:8080", "10.0.0.1:8080"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/events", "/act"])
def test_a_name_that_was_made_to_lead_here_is_refused(host: str, path: str) -> None:
    assert status("GET", path, {"host": host, **BEARER}) == 421


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_the_page_without_figures_is_for_everybody(path: str) -> None:
    assert status("GET", path, HOST) is None
    assert status("POST", path, HOST) == 401


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Bearer wrong", "Basic right", "right", "Bearer right ", "Bearer rïght"]
)
def test_figures_need_the_token(given: str) -> None:
    assert status("GET", "/events", {**HOST, "authorization": given}) == 401
    assert status("POST", "/act", {**HOST, **OWN, "authorization": given}) == 401


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:8080", "http://127.0.0.1:8081", ""]
)
def test_what_another_page_asks_for_is_refused_even_with_the_token(origin: str) -> None:
    for method, path in (("GET", "/events"), ("POST", "/act"), ("GET", "/")):
        assert status(method, path, {**HOST, **BEARER, "origin": origin}) == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_says_so_is_believed(site: str) -> None:
    assert status("GET", "/events", {**HOST, **BEARER, "sec-fetch-site": site}) == 403


def test_an_action_says_which_page_asks() -> None:
    assert status("POST", "/act", {**HOST, **BEARER}) == 403
    assert status("POST", "/act", {**HOST, **BEARER, **OWN}) is None
    assert status("POST", "/act", {**HOST, **BEARER, **OWN, "sec-fetch-site": "same-origin"}) is None
