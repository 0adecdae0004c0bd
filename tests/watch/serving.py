"""The server of `sotto watch` on a free port, in a thread, and requests to it as no browser would make them."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from peer.watch.feed import Feed
from peer.watch.observer import Observer
from peer.watch.server import listen, server

TOKEN = "t0ken-of-the-tests"


@dataclass
class Served:
    """A server that runs."""

    port: int
    feed: Feed

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """What `sotto watch` prints."""
        return f"{self.origin}/#token={TOKEN}"

    def request(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: str | None = None
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Return status, body and headers of a request that has just these headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            connection.close()

    def parts(self, wanted: set[str]) -> dict[str, object]:
        """Return the parts of these names that a new page receives first."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            assert answer.status == 200
            found: dict[str, object] = {}
            name = ""
            while not wanted <= found.keys():
                line = answer.readline().decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    found[name] = json.loads(line.removeprefix("data: "))
            return found
        finally:
            connection.close()


@contextmanager
def serving(observer: Observer, *, operate: bool = False) -> Iterator[Served]:
    """Serve what an observer sees until the context ends."""
    feed = Feed(observer)
    opened = listen(0)
    running = server(feed, token=TOKEN, operate=operate)
    thread = threading.Thread(target=lambda: asyncio.run(running.serve(sockets=[opened])))
    thread.start()
    try:
        yield Served(opened.getsockname()[1], feed)
    finally:
        running.should_exit = True
        thread.join(60)
        opened.close()
        assert not thread.is_alive(), "pages keep the server from ending"
