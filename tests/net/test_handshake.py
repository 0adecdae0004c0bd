"""What may change while two peers greet each other: both ends look again before they put a connection into use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from peer.net.security.credentials import Credentials
from peer.net.security.revocation_list import RevocationList
from peer.node.delivery import OutLink
from tests.net.transport_peers import Mind, authority, build, credentials, dialled, passive, running, until


class Surprised(Mind):
    """A handler to whom something happens in the first handshake, as soon as its hello is written."""

    def __init__(self) -> None:
        super().__init__()
        self.surprise: Callable[[], None] | None = None

    def last_received(self, peer: int) -> int:
        if self.surprise is not None:
            surprise, self.surprise = self.surprise, None
            asyncio.get_running_loop().call_soon(surprise)
        return super().last_received(peer)


@pytest.mark.parametrize("removed_by", ["listener", "dialler"])
def test_a_neighbour_that_is_removed_during_the_handshake_gets_no_link(removed_by: str) -> None:
    async def story() -> None:
        ada, ben = Surprised(), Surprised()
        listener = build(0, ada, [passive(1)])
        async with running(listener):
            dialler = build(1, ben, [dialled(0, listener.port)], listen=None)
            removed = asyncio.Event()

            def remove() -> None:
                if removed_by == "listener":
                    listener.remove_neighbor(1, "it left the run")
                else:
                    dialler.remove_neighbor(0, "it left the run")
                removed.set()

            (ada if removed_by == "listener" else ben).surprise = remove
            async with running(dialler):
                await removed.wait()
                other = dialler if removed_by == "listener" else listener
                await until(lambda: other.problems or other.refusals)
                own = ada if removed_by == "listener" else ben
                assert not own.events, "nothing is said of a peer that is no neighbour"

    asyncio.run(story())


def test_a_certificate_that_is_revoked_during_the_handshake_gets_no_link(tmp_path: Path) -> None:
    issued = authority().issue("ada")
    revoked = RevocationList(authority().certificate, tmp_path / "revoked.pem")
    own = Credentials(issued.identity, authority().certificate, issued.certificate, issued.key, revoked)

    async def story() -> None:
        ada = Surprised()
        listener = build(0, ada, [passive(1)], security=own)
        listed = authority().revoke(b"", [credentials("ben").identity.serial])

        def revoke() -> None:
            revoked.take(listed)

        ada.surprise = revoke
        async with running(listener):
            dialler = build(1, Mind(), [dialled(0, listener.port)], listen=None)
            async with running(dialler):
                await until(lambda: "the certificate of 'ben' was revoked" in listener.refusals.get(1, ""))
                assert [event[0] for event in ada.events] == ["down"]

    asyncio.run(story())


def test_frames_of_a_former_peer_are_not_taken_for_frames_of_the_one_that_its_device_is_now() -> None:
    """A link that came up with that number would let frames go that nobody has: their receiver waits for them for ever,
    and the link that is in use would have given way to it."""

    async def story() -> None:
        ada, ben = Mind(), Mind()
        again = build(0, ada, [passive(1)], security=None, me=1024)
        for seq in (1, 2, 3):
            ben.frame_received(0, seq, b"of the former ada")
        ada.out[1] = OutLink()
        for _ in range(4):
            ada.out[1].push(b"of the new one")
        async with running(again):
            caller = build(1, ben, [dialled(0, again.port)], listen=None, security=None)
            async with running(caller):
                await until(lambda: 0 in caller.refusals)
        assert ada.events == []
        assert ada.backlog(1) == 4

    asyncio.run(story())
