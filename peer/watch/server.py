"""Serves the page on loopback, and its changes as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peer.errors import ConfigError, SottoError
from peer.foreign_values import parse_json
from peer.report.page import fill, own_file
from peer.watch.access import why_refused
from peer.watch.actions import act
from peer.watch.feed import Feed

MOST_PAGES = 32
"""Most pages served at the same time."""
_MOST_ASKED = 4096
"""Most bytes of a request to act."""

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def listen(port: int) -> socket.socket:
    """Return a socket that listens on loopback; port 0 takes a free one. Raises ConfigError if the port is taken."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind(("127.0.0.1", port))
        # A reader of the address may come before the server begins.
        opened.listen()
    except OSError as error:
        opened.close()
        raise ConfigError(f"cannot be used: {error.strerror}", key="--port", value=port) from None
    return opened


def application(feed: Feed, *, token: str, operate: bool) -> ASGIApp:
    """Return the page as an ASGI application. Its lifespan polls."""
    open_pages = 0

    async def static(request: Request) -> Response:
        content, kind = contents[request.url.path]
        return Response(content, media_type=kind)

    async def events(request: Request) -> Response:
        nonlocal open_pages
        if open_pages >= MOST_PAGES:
            return PlainTextResponse("too many pages are open", status_code=503)
        # Counted now: no page of those that come at the same time has begun to stream.
        open_pages += 1
        return _Page(stream(), closed)

    def closed() -> None:
        nonlocal open_pages
        open_pages -= 1

    async def stream() -> AsyncIterator[str]:
        async for parts in feed.changes():
            for name, part in parts:
                yield f"event: {name}\ndata: {part}\n\n"

    async def do(request: Request) -> Response:
        asked = await _asked(request)
        if asked is None:
            return JSONResponse({"error": "an action is a small JSON object"}, status_code=400)
        try:
            said = await act(feed.observer, asked.get("action"), asked.get("peer"))
        except SottoError as error:
            return JSONResponse({"error": str(error)}, status_code=409)
        feed.note(f"the operator: {said}")
        return JSONResponse({"said": said})

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        polling = asyncio.create_task(feed.poll())
        try:
            yield
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling

    contents = {
        "/": (fill("watch/page.html", operate=operate), "text/html"),
        "/watch.js": (own_file("watch/watch.js"), "text/javascript"),
        "/charts.js": (own_file("report/charts.js"), "text/javascript"),
        "/page.css": (own_file("report/page.css"), "text/css"),
    }
    routes = [Route(path, static) for path in contents]
    routes.append(Route("/events", events))
    if operate:
        routes.append(Route("/act", do, methods=["POST"]))
    return _guarded(Starlette(routes=routes, lifespan=lifespan), token)


class _Page(StreamingResponse):
    """The stream of changes to one page; `closed` is called when the page is gone, even if it never read a word."""

    def __init__(self, content: AsyncIterator[str], closed: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._closed()


def server(feed: Feed, *, token: str, operate: bool) -> uvicorn.Server:
    """Return the server; `serve(sockets=[listen(port)])` runs it until a signal."""
    config = uvicorn.Config(
        application(feed, token=token, operate=operate),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=16_384,
    )
    return _Server(config, feed)


class _Server(uvicorn.Server):
    """Ends the streams of pages at shutdown, which would wait for them."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then the connections."""
        await self._feed.close()
        await super().shutdown(sockets)


def _guarded(app: ASGIApp, token: str) -> ASGIApp:
    """Return an application that answers permitted requests only, and adds the headers that bind the browser."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = why_refused(scope["method"], scope["path"], headers, token)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        answer: ASGIApp = app if refused is None else PlainTextResponse(refused[1], status_code=refused[0])
        await answer(scope, receive, send_with_headers)

    return guarded


async def _asked(request: Request) -> dict[str, object] | None:
    """Return the action that a request asks for; None if it is not a small JSON object."""
    if request.headers.get("content-type") != "application/json":
        return None
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_ASKED:
                return None
        asked = parse_json(body)
    except (ValueError, ClientDisconnect):
        return None
    return asked if isinstance(asked, dict) else None
