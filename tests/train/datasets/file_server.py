"""A small HTTP server for tests of fetching: it can cut connections, ignore ranges, and change its files."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Shelf:
    """What the server has, and how it behaves."""

    files: dict[str, bytes]
    url: str = ""
    ranges: bool = True
    tag: str | None = '"1"'
    length: bool = True
    cut_after: list[int] = field(default_factory=list)
    """The next answers end after so many bytes, one entry each."""
    errors: list[int] = field(default_factory=list)
    """The next answers have these codes, one entry each."""
    shift: int = 0
    """Ranges start so many bytes later than asked for."""
    asked: list[str | None] = field(default_factory=list)
    """The Range of every request."""


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Shelf]:
    """Serve these files on a port of this machine."""
    shelf = Shelf(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, shelf)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    shelf.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield shelf
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(request: BaseHTTPRequestHandler, shelf: Shelf) -> None:
    wanted = request.headers.get("Range")
    shelf.asked.append(wanted)
    if shelf.errors:
        request.send_error(shelf.errors.pop(0))
        return
    content = shelf.files.get(request.path.lstrip("/"))
    if content is None:
        request.send_error(404)
        return
    condition = request.headers.get("If-Range")
    start = 0
    if wanted and shelf.ranges and (condition is None or condition == shelf.tag):
        match = re.fullmatch(r"bytes=(\d+)-", wanted)
        assert match
        start = int(match[1]) + shelf.shift
        if start >= len(content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(content)}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206)
        request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    else:
        request.send_response(200)
    part = content[start:]
    if shelf.tag is not None:
        request.send_header("ETag", shelf.tag)
    if shelf.length:
        request.send_header("Content-Length", str(len(part)))
    request.end_headers()
    request.wfile.write(part[: shelf.cut_after.pop(0)] if shelf.cut_after else part)
    request.close_connection = True
