"""The server over real sockets: what it serves to whom, what it refuses, and that no page holds another up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.errors import ConfigError
from peer.state.metrics import MetricsStore
from peer.watch.observer import open_observer
from peer.watch.server import MOST_PAGES, listen
from tests.report.sample_run import round_record, write_sample_run
from tests.watch.serving import TOKEN, Served, serving

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_sample_run(tmp_path_factory.mktemp("runs") / "digits")
    (directory / "peers").rename(directory / "elsewhere")
    return directory


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[Served]:
    with serving(open_observer(run), operate=True) as opened:
        yield opened


def test_the_page_holds_no_figures_and_binds_the_browser(served: Served) -> None:
    status, body, headers = served.request("GET", "/")
    assert status == 200
    assert "digits" not in body
    assert TOKEN not in body
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["referrer-policy"] == "no-referrer"
    assert "<script>" not in body, "the policy refuses it"
    assert " style=" not in body
    assert "set-cookie" not in headers


@pytest.mark.parametrize("path", ["/watch.js", "/charts.js", "/page.css"])
def test_what_the_page_asks_for_is_there_and_names_no_other_machine(served: Served, path: str) -> None:
    status, body, headers = served.request("GET", path)
    assert status == 200
    assert headers["x-content-type-options"] == "nosniff"
    assert "https://" not in body
    assert set(_addresses(body)) <= {"http://www.w3.org/2000/svg"}


def _addresses(body: str) -> list[str]:
    return ["http://" + rest.split('"')[0] for rest in body.split("http://")[1:]]


def test_figures_need_the_token_and_a_name_of_loopback(served: Served) -> None:
    assert served.request("GET", "/events")[0] == 401
    assert served.request("GET", f"/events?token={TOKEN}")[0] == 401
    assert served.request("GET", "/events", {"Cookie": f"token={TOKEN}"})[0] == 401
    status, body, headers = served.request("GET", "/events", {**BEARER, "Host": "rebound.example"})
    assert (status, headers["cross-origin-resource-policy"]) == (421, "same-origin")
    assert "digits" not in body


def test_a_forged_post_is_refused(served: Served) -> None:
    body = '{"action": "stop all", "peer": null}'
    json_type = {"Content-Type": "application/json"}
    # A form of another page: no token, a foreign origin, a type that needs no leave.
    forged = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    assert served.request("POST", "/act", forged, body)[0] == 403
    assert served.request("POST", "/act", {**json_type, "Origin": served.origin}, body)[0] == 401
    assert served.request("POST", "/act", {**forged, **BEARER}, body)[0] == 403
    assert served.request("POST", "/act", {**json_type, **BEARER}, body)[0] == 403
    assert served.request("POST", "/act", {**BEARER, "Origin": served.origin}, body)[0] == 400
    right = {**json_type, **BEARER, "Origin": served.origin}
    assert served.request("POST", "/act", right, "[" * 3000)[0] == 400
    assert served.request("POST", "/act", right, '{"action": "' + "x" * 5000 + '"}')[0] == 400
    status, said, _ = served.request("POST", "/act", right, '{"action": "shutdown", "peer": "peer-0"}')
    assert (status, "is no action" in said) == (409, True)
    assert served.request("GET", "/act", BEARER)[0] == 405


def test_without_operate_there_is_no_action(run: Path) -> None:
    with serving(open_observer(run)) as watched:
        headers = {**BEARER, "Origin": watched.origin, "Content-Type": "application/json"}
        assert watched.request("POST", "/act", headers, '{"action": "stop all"}')[0] == 404
        assert "Stop all" not in watched.request("GET", "/")[1]


def test_a_new_page_receives_everything(served: Served) -> None:
    parts = served.parts({"run", "peers", "edges", "charts", "events", "log"})
    run, charts = parts["run"], parts["charts"]
    assert isinstance(run, dict)
    assert isinstance(charts, dict)
    assert run["name"] == "digits"
    assert charts["figure"].startswith('<figure class="chart">')


def test_a_page_that_reads_nothing_holds_no_other_up(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        for _ in range(3):
            assert "run" in served.parts({"run"})


def test_pages_are_counted_and_whoever_leaves_makes_room(served: Served) -> None:
    request = f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    pages = [socket.create_connection(("127.0.0.1", served.port), timeout=30) for _ in range(MOST_PAGES)]
    for page in pages:
        page.sendall(request)
        assert page.recv(1000).startswith(b"HTTP/1.1 200")
    assert served.request("GET", "/events", BEARER)[0] == 503
    for page in pages:
        page.close()
    freed = threading.Event()
    while not freed.wait(0.1):
        try:
            served.parts({"run"})
        except AssertionError:
            continue
        freed.set()


def test_pages_that_come_at_the_same_time_are_counted_too(served: Served) -> None:
    request = f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    pages = [socket.create_connection(("127.0.0.1", served.port), timeout=30) for _ in range(2 * MOST_PAGES)]
    for page in pages:
        page.sendall(request)
    answers = [page.recv(1000)[:12] for page in pages]
    for page in pages:
        page.close()
    assert answers.count(b"HTTP/1.1 200") <= MOST_PAGES
    assert answers.count(b"HTTP/1.1 503") >= MOST_PAGES


def test_what_changes_is_sent_without_being_asked_for(tmp_path: Path) -> None:
    directory = write_sample_run(tmp_path / "digits", rounds=20)
    (directory / "peers").rename(directory / "elsewhere")
    store = MetricsStore(directory / "metrics.sqlite")
    with serving(open_observer(directory)) as watched:
        assert watched.parts({"peers"})["peers"] == []
        store.put(*(round_record(peer, 0, 20) for peer in range(2)))
        store.flush()
        while len(watched.parts({"peers"})["peers"]) < 2:  # type: ignore[arg-type]
            pass
    store.close()


def test_it_listens_on_loopback_alone() -> None:
    with listen(0) as opened:
        assert opened.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_named() -> None:
    with listen(0) as opened, pytest.raises(ConfigError, match="--port"):
        listen(opened.getsockname()[1])
