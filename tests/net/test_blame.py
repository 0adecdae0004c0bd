"""Whatever is raised while input of another is handled costs that other its connection, and never the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from peer.errors import DivergenceError, HandshakeRefused, RemoteError, RemoteProtocolError, StateError
from peer.net.control import call_control
from peer.net.handshake import Handshake
from peer.net.transport import Transport
from tests.net.transport_peers import Mind, build, credentials, dialled, pair, passive, running, until


class Broken(Mind):
    """A handler with a bug that the neighbour 1 can reach, as often as `errors` holds."""

    def __init__(self, callback: str, *errors: Exception) -> None:
        super().__init__()
        self.callback, self.errors = callback, list(errors)

    def fails(self, callback: str, peer: int) -> None:
        if callback == self.callback and peer == 1 and self.errors:
            raise self.errors.pop(0)

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        self.fails("link_up", peer)
        return super().link_up(peer, remote_has)

    def link_down(self, peer: int, reason: str) -> None:
        self.fails("link_down", peer)
        super().link_down(peer, reason)

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        self.fails("frame_received", peer)
        return super().frame_received(peer, seq, frame)

    def receipt(self, peer: int, upto: int) -> None:
        self.fails("receipt", peer)
        super().receipt(peer, upto)

    def bulletin_received(self, peer: int, topic: str, data: bytes) -> None:
        self.fails("bulletin_received", peer)
        super().bulletin_received(peer, topic, data)

    def goodbye(self, peer: int, reason: str) -> None:
        self.fails("goodbye", peer)
        super().goodbye(peer, reason)

    def last_received(self, peer: int) -> int:
        self.fails("last_received", peer)
        return super().last_received(peer)


CALLBACKS = ["link_up", "link_down", "frame_received", "receipt", "bulletin_received", "goodbye", "last_received"]


@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("dials", [False, True], ids=["called", "calls"])
def test_an_error_in_the_handler_is_the_fault_of_that_neighbour_alone(
    callback: str, dials: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Peer 0 has the bug; peers 1 and 2 are linked to it. `dials`: whether it dials peer 1, or is dialled by it."""

    async def provoke(ada: Broken, ben: Mind, one: Transport, other: Transport) -> None:
        await until(lambda: not ada.errors or (one.is_up(1) and other.is_up(0)))
        if callback in ("link_down", "goodbye"):
            await other.close("for a while")
        ada.send(1, b"a frame that it confirms")
        ben.send(0, b"a frame")
        other.bulletin(0, "topic", b"a note")
        await until(lambda: not ada.errors)

    async def story() -> None:
        ada, ben, cleo = Broken(callback, ZeroDivisionError("a bug")), Mind(), Mind()
        one = build(0, ada, [passive(1), passive(2)])
        other = build(1, ben, [passive(0)])
        async with running(other, one):
            if dials:
                one.add_neighbor(dialled(1, other.port))
            else:
                other.add_neighbor(dialled(0, one.port))
            third = build(2, cleo, [dialled(0, one.port)], listen=None)
            async with running(third):
                cleo.send(0, b"before")
                await until(lambda: (2, b"before") in ada.frames)
                await provoke(ada, ben, one, other)
                await until(lambda: one.offences.count(1) == 1)
                if callback not in ("link_down", "goodbye"):
                    await until(lambda: (1, b"a frame") in ada.frames and ben.frames)
                cleo.send(0, b"after")
                await until(lambda: (2, b"after") in ada.frames)
                assert one.offences.count(2) == 0
                assert [event for event in ada.events if event[1] == 2] == [("up", 2, 0)], "its link never ended"

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    blamed = [record for record in caplog.records if "broke the protocol" in record.message]
    assert [record.message for record in blamed] == [
        "ben broke the protocol: this peer cannot handle what it sent (ZeroDivisionError)"
    ]
    assert blamed[0].exc_info is not None, "a bug can be found"


@pytest.mark.parametrize("error", [StateError("the disk is full"), DivergenceError("the loss is not finite")])
def test_what_nobody_else_is_to_blame_for_ends_the_transport(error: Exception) -> None:
    async def story() -> None:
        ada, ben = Broken("frame_received", error), Mind()
        listener = build(0, ada, [passive(1)])
        await listener.start()
        dialler = build(1, ben, [dialled(0, listener.port)], listen=None)
        async with running(dialler):
            ben.send(0, b"frame")
            with pytest.raises(type(error), match=str(error)):
                async with asyncio.timeout(20):
                    await listener.wait_closed()
            assert listener.offences.count(1) == 0
            await listener.close("after the error")

    asyncio.run(story())


def test_a_neighbour_that_offends_on_every_connection_is_logged_once_and_then_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        ada, ben = Broken("frame_received", *(RemoteProtocolError(f"frame {n} is wrong") for n in range(4))), Mind()
        async with pair(ada, ben) as (listener, _):
            ben.send(0, b"frame")
            await until(lambda: ada.frames == [(1, b"frame")])
            assert listener.offences.count(1) == 4
            assert listener.offences.last(1) == "frame 3 is wrong"

    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    lines = [record.message for record in caplog.records if "protocol" in record.message]
    assert lines[0] == "ben broke the protocol: frame 0 is wrong"
    assert lines[1].startswith("ben has broken the protocol 3 times, most recently: frame 2 is wrong; look at its log;")
    assert "`sotto admin revoke CLUSTER ben`" in lines[1]
    assert "`sotto remove ben`" in lines[1]
    assert len(lines) == 2


def test_a_neighbour_that_offends_on_every_connection_soon_has_to_wait(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        ada, ben = Broken("frame_received", *(RemoteProtocolError("wrong") for _ in range(1000))), Mind()
        listener = build(0, ada, [passive(1)])
        async with running(listener):
            dialler = build(1, ben, [dialled(0, listener.port)], listen=None)
            async with running(dialler):
                ben.send(0, b"frame")
                await until(lambda: "connects too often" in dialler.problems.get(0, ""))
                assert 1 < listener.offences.count(1) < 10

    asyncio.run(story())


def test_refusing_a_neighbour_is_no_offence_of_it() -> None:
    async def story() -> None:
        ada, ben = (
            Broken("link_up", HandshakeRefused("it was declared lost; it comes back by itself, as a newcomer")),
            Mind(),
        )
        async with pair(ada, ben) as (listener, _):
            await until(lambda: not ada.errors)
            assert ada.events[0] == ("down", 1, "it was declared lost; it comes back by itself, as a newcomer")
            assert listener.offences.count(1) == 0

    asyncio.run(story())


def breaks_once(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Give a method of the handshake a bug that shows in its first call."""
    real: Callable[..., Any] = getattr(Handshake, method)
    errors = [ZeroDivisionError("a bug")]

    def broken(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*arguments)

    monkeypatch.setattr(Handshake, method, broken)


@pytest.mark.parametrize("method", ["read_hello", "terms", "read_answer"])
def test_an_error_in_the_handshake_ends_only_that_stream(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    breaks_once(monkeypatch, method)

    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben):
            ben.send(0, b"frame")
            await until(lambda: ada.frames == [(1, b"frame")])

    asyncio.run(story())
    assert sum("broke the protocol" in record.message for record in caplog.records) == 1


def test_a_control_call_that_cannot_be_answered_is_refused_and_the_peer_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mad(Mind):
        async def control(self, verb: str, arguments: dict[str, Any], caller: str) -> dict[str, Any]:
            if verb == "status":
                raise ZeroDivisionError("a bug")
            if verb == "snapshot":
                return {"it cannot be said in JSON": object()}
            return {"stopping": True, "round": 7, "peers": {"name\x1b[2J": {"state": "red\x1b[31m\nb"}}}

    async def story() -> None:
        ada, ben = Mad(), Mind()
        async with pair(ada, ben) as (listener, dialler):

            async def call(verb: str) -> dict[str, Any]:
                own = credentials("ada")
                return await call_control(f"127.0.0.1:{listener.port}", verb, name="ada", security=own)

            for verb in ("status", "status", "snapshot"):
                with pytest.raises(RemoteError, match="it cannot answer this call, which is a bug; its log says more"):
                    await call(verb)
            peers = (await call("stop"))["peers"]
            assert peers == {"name [2J": {"state": "red [31m b"}}, "texts of an answer end on a terminal"
            assert dialler.is_up(0)

    asyncio.run(story())
    assert sum("a peer at" in record.message for record in caplog.records) == 2, "once for each kind"
