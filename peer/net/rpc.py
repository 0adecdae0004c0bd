"""Streams and calls of gRPC, typed: the one module that imports it.

The published stubs of grpc.aio know neither raw bytes nor `read` and `write`, so `Any` stands here and nowhere else.
Incoming data are bytes. Their reader turns them into typed values and assigns the blame if that fails.

gRPC reports the loss of a stream in several ways; here it is always StreamLost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote_from_bytes, unquote

# gRPC reads these when it is imported. Peers are exec'd, never forked; what matters is logged here in sentences.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# gRPC's own resolver knows DNS and /etc/hosts alone; this machine may know names by mDNS or LDAP.
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")

import grpc
import grpc.aio

from peer.foreign_text import printable
from peer.net.security.credentials import Access, TokenAccess

Status = grpc.StatusCode
Options = Sequence[tuple[str, int]]

LOCAL = "unix:"
"""Prefix of the address of a local socket."""

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class StreamLost(Exception):
    """The stream or call is gone, or was never answered. The text is gRPC's, made printable."""

    def __init__(self, error: BaseException) -> None:
        details, self.status = str(error), Status.UNAVAILABLE
        if isinstance(error, grpc.aio.AioRpcError):
            details, self.status = error.details() or "", error.code()
        super().__init__(printable(details or type(error).__name__))


def socket_address(path: str | os.PathLike[str]) -> str:
    """Return the address of a socket of this machine. gRPC reads a URI, where "#", "?" and "%" mean something else, and
    takes no path that is not UTF-8."""
    return LOCAL + quote_from_bytes(os.fsencode(path))


_LOSSES = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""Errors of gRPC when a stream or call is gone."""


class _Losses:
    """Raises StreamLost in place of these. A generator in its place would cost each message a microsecond."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, _LOSSES):
            raise StreamLost(error) from None


_losses = _Losses()


class Stream:
    """One end of a stream of messages, each of them bytes. One task reads and one writes at a time."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> bytes | None:
        """Return the next message; None at the end of the stream. Raises StreamLost."""
        with _losses:
            data = await self._call.read()
        return None if data is _EOF else data

    async def write(self, data: bytes) -> None:
        """Send a message; return when flow control let it through. Raises StreamLost."""
        with _losses:
            await self._call.write(data)

    async def done_writing(self) -> None:
        """Say that nothing more will be written, unless the end of the function that serves the stream says it."""

    async def abandon(self) -> None:
        """End the stream at once, and drop data on their way, likewise."""


# -- the end that was called -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    """The opener of a stream or maker of a call, as gRPC and TLS describe it."""

    address: str
    """Address in gRPC's form, "ipv4:10.0.0.1:43210"."""
    metadata: tuple[tuple[str, str | bytes], ...]
    certificate: bytes | None
    """Shown in the TLS handshake, PEM."""


class CallRefused(Exception):
    """The refusal of a call in place of a result."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class ServedStream(Stream):
    """The listener's end of a stream. It ends when the function that serves it returns, after all written data."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.caller = _caller(context)


class Server:
    """A listener, before and after it is started."""

    def __init__(self, options: Options, *, max_concurrent: int) -> None:
        """At most `max_concurrent` streams and calls are served at a time."""
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=max_concurrent)

    def serve_streams(self, service: str, methods: Mapping[str, Callable[[ServedStream], Awaitable[None]]]) -> None:
        """Have each stream served by the function for its method."""

        def method(serve: Callable[[ServedStream], Awaitable[None]]) -> Any:
            async def handle(_requests: object, context: Any) -> None:
                await serve(ServedStream(context))

            handler: Any = grpc.stream_stream_rpc_method_handler
            return handler(handle)

        self._add(service, {name: method(serve) for name, serve in methods.items()})

    def serve_calls(self, service: str, methods: Mapping[str, Callable[[Caller, bytes], Awaitable[bytes]]]) -> None:
        """Have each call answered by the function for its method, which may raise CallRefused."""

        def method(answer: Callable[[Caller, bytes], Awaitable[bytes]]) -> Any:
            async def handle(request: bytes, context: Any) -> bytes:
                try:
                    return await answer(_caller(context), request)
                except CallRefused as refusal:
                    await context.abort(refusal.status, refusal.reason)
                    raise

            handler: Any = grpc.unary_unary_rpc_method_handler
            return handler(handle)

        self._add(service, {name: method(answer) for name, answer in methods.items()})

    def bind(self, address: str, access: Access | None) -> int:
        """Listen on an address from the start on; return its port (1 for "unix:…"), 0 if that is impossible."""
        credentials = _server_credentials(access)
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError:
            return 0

    async def start(self) -> None:
        """Begin to serve."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, and cancel calls still served after a while."""
        await self._server.stop(grace=grace_s)

    def _add(self, service: str, handlers: dict[str, Any]) -> None:
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def _caller(context: Any) -> Caller:
    certificates = list(context.auth_context().get("x509_pem_cert", ()))
    return Caller(
        address=unquote(context.peer()),
        metadata=tuple((key, value) for key, value in context.invocation_metadata() or ()),
        certificate=certificates[0] if len(certificates) == 1 else None,
    )


def _server_credentials(access: Access | None) -> grpc.ServerCredentials | None:
    """Return the credentials that a listener shows and asks for; None if it speaks without TLS."""
    if access is None or access.key is None or access.certificate is None:
        return None
    pair = (access.key, access.certificate)
    if isinstance(access, TokenAccess):
        return grpc.ssl_server_credentials([pair])
    credentials, shown = access, pair[1]

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(credentials.key, credentials.certificate)], root_certificates=credentials.ca
        )

    def newer() -> Any:
        """Return a new configuration, or None. Called by gRPC at each handshake, in threads of its own."""
        nonlocal shown
        if credentials.certificate == shown:
            return None
        shown = credentials.certificate
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), newer, require_client_authentication=True)


# -- the end that calls ------------------------------------------------------------------------------------------------


class Channel:
    """A connection that this end opens, when it is first used."""

    def __init__(self, address: str, name: str, access: Access | None, options: Options = ()) -> None:
        """With certificates the listener's must be made out to `name`."""
        settings: list[tuple[str, int | str]] = [
            *options,
            # Each channel has a connection of its own, made when we say so and to whom we say.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.service_config_disable_resolution", 1),
        ]
        self._metadata = access.metadata() if isinstance(access, TokenAccess) else None
        self._channel: Any
        if access is None:
            self._channel = grpc.aio.insecure_channel(address, options=settings)
            return
        if isinstance(access, TokenAccess):
            # The certificate is that of the address: of a load balancer, where there is one.
            credentials = grpc.ssl_channel_credentials(access.ca)
        else:
            settings.append(("grpc.ssl_target_name_override", name))
            credentials = grpc.ssl_channel_credentials(access.ca, access.key, access.certificate)
        self._channel = grpc.aio.secure_channel(address, credentials, options=settings)

    def stream(self, service: str, method: str) -> DialledStream:
        """Open a stream; the channel ends with it."""
        return DialledStream(self, self._channel.stream_stream(f"/{service}/{method}")(metadata=self._metadata))

    async def call(self, service: str, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """Return the answer to a call. Raises StreamLost with the status."""
        function = self._channel.unary_unary(f"/{service}/{method}")
        with _losses:
            answer: bytes = await function(request, timeout=timeout_s, metadata=self._metadata)
        return answer

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close()


class DialledStream(Stream):
    """The dialler's end of a stream, with the channel that carries nothing else."""

    def __init__(self, channel: Channel, call: Any) -> None:
        super().__init__(call)
        self._channel = channel

    async def done_writing(self) -> None:
        """Say that nothing more will be written."""
        with contextlib.suppress(*_LOSSES):
            await self._call.done_writing()

    async def abandon(self) -> None:
        """End the stream and the connection at once."""
        self._call.cancel()
        await self._channel.close()
