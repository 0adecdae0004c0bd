"""Callers that are in nobody's list but their own, at the door: heard, or sent away with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from peer.errors import HandshakeRefused
from peer.net.neighbor import Neighbor, RelayAddress
from peer.net.security.certificates import Place
from peer.net.security.credentials import Credentials
from peer.net.security.requests import read_request, request_certificate
from peer.net.security.revocation_list import RevocationList
from tests.net.transport_peers import NAMES, Mind, authority, build, dialled, hello_of, passive, running, until

GARAGE = 7
"""The number of the caller: its list has four before it that joined since, or did not."""


def signed(index: int) -> Credentials:
    """Return what a device that was signed for a number connects with."""
    request, key = request_certificate("garage")
    identity, certificate = authority().grant(read_request(request), place=Place(index, None))
    ca = authority().certificate
    return Credentials(identity, ca, certificate, key, RevocationList(ca))


def hears(index: int, name: str) -> Neighbor | None:
    return Neighbor(index, name, None, dial=False)


def refuses(index: int, name: str) -> Neighbor | None:
    raise HandshakeRefused(f"{name!r} cannot join")


def call(hear: Callable[[int, str], Neighbor | None] | None, *, is_number: int = GARAGE, **hello: Any) -> str | None:
    """Let garage call ada; return why it was refused, None if the link came up."""

    async def story() -> str | None:
        ada, garage = Mind(), Mind()
        listener = build(0, ada, [passive(1)], hear=hear)
        async with running(listener):
            own = replace(hello_of(0, name="garage"), **hello)
            caller = build(
                0, garage, [dialled(0, listener.port)], listen=None, security=signed(GARAGE), hello=own, me=is_number
            )
            async with running(caller):
                await until(lambda: 0 in caller.refusals or caller.is_up(0))
                if 0 in caller.refusals:
                    assert ada.events == []
                    return caller.refusals[0]
                await until(lambda: listener.is_up(GARAGE))
                garage.send(0, b"to ada")
                ada.send(GARAGE, b"to garage")
                await until(lambda: ada.frames and garage.frames)
                assert (ada.frames, garage.frames) == ([(GARAGE, b"to ada")], [(0, b"to garage")])
                return None

    return asyncio.run(story())


def test_a_caller_with_a_number_is_heard_and_gets_a_link() -> None:
    assert call(hears) is None


@pytest.mark.parametrize(
    ("hear", "changes", "words"),
    [
        (None, {}, "'garage' is no neighbour of peer 0, 'ada'; compare the name of that device in [[peers]] on both"),
        (lambda index, name: None, {}, "'garage', is no neighbour of peer 0, 'ada'"),
        (refuses, {}, "'garage' cannot join"),
        (hears, {"is_number": 8}, "it says it is peer 8, 'garage', but peer 7, 'garage', is expected here"),
        (hears, {"name": "attic"}, "calls itself 'attic', but its certificate is made out to 'garage'"),
        (hears, {"algorithm": "scsp"}, "every peer needs the same [algorithm]"),
    ],
)
def test_a_caller_that_is_not_let_in_is_told_why(hear: Any, changes: dict[str, Any], words: str) -> None:
    refusal = call(hear, **changes)
    assert refusal is not None
    assert words in refusal


def test_a_caller_with_a_number_may_wait_at_a_relay() -> None:
    """It is on its way to a sponsor that cannot dial it either, and nobody has told the relay of it."""

    async def story() -> None:
        ben, garage = Mind(), Mind()
        ada = build(0, Mind(), [], members=NAMES)
        async with running(ada):
            relay = RelayAddress(NAMES[0], f"127.0.0.1:{ada.port}")
            waits = build(
                0, garage, [passive(1)], listen=None, own_relay=relay, security=signed(GARAGE),
                hello=hello_of(0, name="garage"), me=GARAGE,
            )  # fmt: skip
            dials = build(1, ben, [Neighbor(GARAGE, "garage", None, dial=True, relay=relay)], listen=None)
            async with running(waits, dials):
                await until(lambda: dials.is_up(GARAGE) and waits.is_up(1))

    asyncio.run(story())
