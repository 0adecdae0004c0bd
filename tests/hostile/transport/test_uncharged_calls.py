"""What a member may ask of this peer, or tell it, is work for it: each has a budget, and operators none."""

from __future__ import annotations

import asyncio

import pytest

from peer.errors import RemoteError
from peer.net import control
from peer.net.neighbor import Neighbor
from peer.net.outbox import REVOKED_TOPIC
from peer.net.rpc import Channel, StreamLost
from peer.net.security.certificates import Role
from peer.net.security.credentials import Credentials
from peer.net.security.revocation_list import RevocationList
from peer.net.services import CONTROL_SERVICE
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from tests.hostile.transport.caller import Caller
from tests.net.transport_peers import NAMES, Mind, authority, build, credentials, passive, running, until

pytestmark = pytest.mark.usefixtures("no_allowance_grows")


def test_a_member_that_calls_without_end_is_told_to_wait_and_an_operator_is_served() -> None:
    async def story() -> None:
        listener = build(0, Mind(), [passive(1)])
        async with running(listener):
            address = f"127.0.0.1:{listener.port}"
            ben = Channel(address, NAMES[0], credentials("ben"))
            boss = Channel(address, NAMES[0], authority().credentials(authority().issue("boss", role=Role.OPERATOR)))
            for _ in range(100):
                await ben.call(CONTROL_SERVICE, "Status", b"", timeout_s=20)
            with pytest.raises(StreamLost, match="'ben' calls too often"):
                await ben.call(CONTROL_SERVICE, "Probe", b"", timeout_s=20)
            for _ in range(150):
                await boss.call(CONTROL_SERVICE, "Status", b"", timeout_s=20)
            await ben.close()
            await boss.close()

    asyncio.run(story())


def test_a_probe_dials_what_the_own_list_says_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = control.call_control, []

    async def dial(address: str, *_: object, **__: object) -> dict[str, object]:
        asked.append(address)
        return {}

    monkeypatch.setattr(control, "call_control", dial)

    async def story() -> None:
        listener = build(0, Mind(), [passive(1), Neighbor(2, NAMES[2], "10.0.0.9:7700", dial=False)])
        async with running(listener):

            async def probe(**arguments: object) -> dict[str, object]:
                ours, there = credentials("ben"), f"127.0.0.1:{listener.port}"
                return await ask(there, "probe", arguments, name=NAMES[0], security=ours, timeout_s=20)

            for index in (1, 7, "10.0.0.1:22", None):
                await probe(index=index, address="10.0.0.1:22")
            assert asked == []
            for _ in range(10):
                assert (await probe(index=2, address="10.0.0.1:22"))["reached"] is True
            with pytest.raises(RemoteError, match="too many probes"):
                await probe(index=2)
            assert asked == ["10.0.0.9:7700"] * 10

    asyncio.run(story())


def test_lists_of_revoked_certificates_that_are_known_or_too_many_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[bytes] = []
    adopt = RevocationList.adopt

    def counting(self: RevocationList, pem: bytes, source: str) -> bool:
        looked_at.append(pem)
        return adopt(self, pem, source)

    lists = [authority().revoke(b"", [1])]
    for serial in range(2, 40):
        lists.append(authority().revoke(lists[-1], [serial]))
    monkeypatch.setattr(RevocationList, "adopt", counting)

    async def story() -> None:
        own = credentials(NAMES[0])
        listed = RevocationList(own.ca)
        listed.take(lists[-1])
        looked_at.clear()
        mind = Mind()
        held = Credentials(own.identity, own.ca, own.certificate, own.key, listed)
        listener = build(0, mind, [passive(1)], security=held)
        async with running(listener), Caller(listener.port) as caller:
            await caller.greet()
            known = [pb.Bulletin(topic=REVOKED_TOPIC, data=lists[-1])] * 200
            older = [pb.Bulletin(topic=REVOKED_TOPIC, data=each) for each in lists[:-1]]
            last = pb.Bulletin(topic="evaluation", data=b"last")
            await caller.send(pb.Envelope(bulletins=[*known, *older, last]))
            await until(lambda: mind.bulletins)
            assert looked_at == lists[:10]
            assert listener.is_up(1)

    asyncio.run(story())
