"""TLS with a shared token: where something on the way ends TLS. And that no secret gets into a log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from peer.config.options import load
from peer.daemon.process import open_peer
from peer.errors import SecurityError
from peer.net.control import call_control
from peer.net.neighbor import Neighbor
from peer.net.security.authority import CertificateAuthority
from peer.net.security.credentials import TokenAccess
from tests.net.transport_peers import NAMES, QUICK, Mind, build, pair, passive, running, until

TOKEN = "correct-horse-battery-staple-0123"
AUTHORITY = CertificateAuthority.create("balancers")
SERVER = AUTHORITY.issue("balancer", ["127.0.0.1", "localhost"])

DIALS = TokenAccess(TOKEN, AUTHORITY.certificate)
LISTENS = TokenAccess(TOKEN, AUTHORITY.certificate, SERVER.certificate, SERVER.key)
LISTENS_PLAINLY = TokenAccess(TOKEN, AUTHORITY.certificate)


def at(index: int, port: int | None) -> Neighbor:
    return Neighbor(index, NAMES[index], f"localhost:{port}", dial=True)


@contextlib.asynccontextmanager
async def load_balancer(target: int | None, folder: Path) -> AsyncIterator[int]:
    """End TLS and pass on what is inside, as HTTP/2 without encryption."""
    (folder / "balancer.pem").write_bytes(SERVER.certificate)
    (folder / "balancer.key").write_bytes(SERVER.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "balancer.pem", folder / "balancer.key")
    context.set_alpn_protocols(["h2"])
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", target)
        for each in (pump(reader, inner_writer), pump(inner_reader, writer)):
            tasks.add(asyncio.create_task(each))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_peers_with_the_token_train_over_tls_that_one_of_them_ends() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        listener = build(0, ada, [passive(1)], security=LISTENS)
        async with running(listener):
            dialler = build(1, ben, [at(0, listener.port)], listen=None, security=DIALS)
            async with running(dialler):
                ben.send(0, b"with a token")
                await until(lambda: ada.frames)
                answer = await call_control(f"localhost:{listener.port}", "status", name="ada", security=DIALS)
                assert answer["state"] == "running"

    asyncio.run(story())


def test_a_load_balancer_may_end_tls_between_them(tmp_path: Path) -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        listener = build(0, ada, [passive(1)], security=LISTENS_PLAINLY)
        async with running(listener), load_balancer(listener.port, tmp_path) as port:
            dialler = build(1, ben, [at(0, port)], listen=None, security=DIALS)
            async with running(dialler):
                ben.send(0, b"through the balancer")
                ada.send(1, b"and back")
                await until(lambda: ada.frames and ben.frames)

    asyncio.run(story())


@pytest.mark.parametrize("token", ["another-token-of-another-run-4567", TOKEN[:-1], ""])
def test_without_the_token_nobody_gets_in(token: str) -> None:
    async def story() -> None:
        listener = build(0, Mind(), [passive(1)], security=LISTENS)
        async with running(listener):
            wrong = TokenAccess(token, AUTHORITY.certificate)
            dialler = build(1, Mind(), [at(0, listener.port)], listen=None, security=wrong)
            async with running(dialler):
                await until(lambda: 0 in dialler.refusals)
                assert "does not show this run's token" in dialler.refusals[0]
                assert not listener.is_up(1)
            with pytest.raises(SecurityError, match="does not show this run's token"):
                await call_control(f"localhost:{listener.port}", "stop", name="ada", security=wrong)

    asyncio.run(story())


def test_a_listener_whose_certificate_nobody_vouches_for_never_sees_the_token() -> None:
    elsewhere = CertificateAuthority.create("elsewhere")
    own = elsewhere.issue("balancer", ["localhost"])

    async def story() -> None:
        thief = TokenAccess("a-token-of-the-thief-0123456789", None, own.certificate, own.key)
        listener = build(0, Mind(), [passive(1)], security=thief)
        async with running(listener):
            dialler = build(1, Mind(), [at(0, listener.port)], listen=None, security=DIALS)
            async with running(dialler):
                await until(lambda: 0 in dialler.problems)
                assert "certificate that this run's CA did not sign" in dialler.problems[0]
                assert 0 not in dialler.refusals

    asyncio.run(story())


def test_no_secret_gets_into_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """Links, refusals and failures of both modes, logged at the finest level."""

    async def story() -> None:
        async with pair(Mind(), Mind(), options=QUICK):
            pass
        listener = build(0, Mind(), [passive(1)], security=LISTENS)
        async with running(listener):
            for access in (DIALS, TokenAccess(TOKEN[::-1], AUTHORITY.certificate)):
                dialler = build(1, Mind(), [at(0, listener.port)], listen=None, security=access)
                async with running(dialler):
                    await until(lambda dialler=dialler: dialler.is_up(0) or 0 in dialler.refusals)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(story())
    assert "link to" in caplog.text
    assert "does not show this run's token" in caplog.text
    key = SERVER.key.decode().splitlines()[1]
    for secret in (TOKEN, TOKEN[::-1], key, "PRIVATE KEY", "Bearer"):
        assert secret not in caplog.text
        assert secret not in repr(LISTENS)


def test_a_daemon_shows_its_token_and_listens_as_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.certificate)
    file = tmp_path / "peer.toml"
    file.write_text('[security]\nmode = "tls+token"\nplain_listener = true\n[[peers]]\nname = "ada"\n')
    daemon = open_peer(load(file, environment={}), tmp_path)
    try:
        assert daemon.local.access == TokenAccess(TOKEN, AUTHORITY.certificate)
    finally:
        daemon.close()
