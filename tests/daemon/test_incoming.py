"""Where everything enters that others say: who judges it, and what becomes of a lie."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import cast

import pytest

from peer.daemon.final_average import FinalAverage
from peer.daemon.incoming import Incoming
from peer.daemon.operator.operator_api import OperatorApi
from peer.daemon.parts import CommonParts
from peer.daemon.rounds import RoundLoop
from peer.daemon.runtime import Runtime
from peer.errors import HandshakeRefused, RemoteProtocolError
from tests.daemon.parts import FakeMembers, FakeTransport, neighbors_over
from tests.net.transport_peers import passive


class Frames:
    """Takes note of frames; whoever sends an empty one breaks the protocol."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, bytes]] = []
        self.broken: list[int] = []

    def frames_for(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        return [(remote_has + 1, b"next")]

    def disconnected(self, peer: int) -> None:
        self.broken.append(peer)

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        if not frame:
            raise RemoteProtocolError("sent nothing")
        self.frames.append((peer, seq, frame))
        return False

    def receipt(self, peer: int, upto: int) -> None: ...

    def last_received(self, peer: int) -> int:
        return 5


class Peer:
    """A handler over parts that only take note."""

    def __init__(self, why_no_changes: str | None = "the members of this run cannot change") -> None:
        self.transport = FakeTransport(up={1, 2})
        self.neighbors = neighbors_over(self.transport, (1, 2))
        self.runtime, self.frames, self.members = Runtime(), Frames(), FakeMembers()
        self.judged: list[tuple[int, bytes]] = []
        roster = SimpleNamespace(
            name=lambda peer: f"peer-{peer}",
            hear=lambda peer, name, is_member: passive(peer) if is_member else None,
        )
        setup = SimpleNamespace(why_no_changes=why_no_changes, num_peers=3)
        common = SimpleNamespace(
            runtime=self.runtime, neighbors=self.neighbors, local=SimpleNamespace(roster=roster, setup=setup)
        )
        loop = SimpleNamespace(frames=self.frames, requests=self.members, progress=None)
        self.incoming = Incoming(
            cast(CommonParts, common),
            cast(RoundLoop, loop),
            average=cast(FinalAverage, SimpleNamespace(frame_received=self.judge)),
            operator=cast(OperatorApi, None),
            greetings={"evaluation": lambda peer: [b"known"], "release": lambda peer: [b"0.2.0", b"0.1.0"]},
            notes={"evaluation": self.judge, "replica": self.judge, "join": self.judge},
        )

    def judge(self, peer: int, note: bytes) -> None:
        if note == b"lie":
            raise RemoteProtocolError("told a lie")
        self.judged.append((peer, note))


@pytest.fixture
def peer() -> Peer:
    return Peer()


def test_a_neighbour_that_is_back_gets_its_frames_and_hears_the_news(peer: Peer) -> None:
    peer.neighbors.left[1] = "stopped"
    assert peer.incoming.link_up(1, 7) == [(8, b"next")]
    assert peer.transport.notes == [(1, "evaluation", b"known"), (1, "release", b"0.2.0"), (1, "release", b"0.1.0")]
    assert peer.neighbors.is_reachable(1)
    peer.incoming.link_down(1, "the connection broke")
    assert peer.frames.broken == [1]


def test_a_note_goes_to_whoever_judges_its_topic(peer: Peer) -> None:
    peer.incoming.bulletin_received(1, "replica", b"digests")
    peer.incoming.bulletin_received(1, "a topic of a later version", b"whatever")
    assert peer.judged == [(1, b"digests")]


@pytest.mark.parametrize("topic", ["replica", "evaluation"])
def test_a_lie_is_blamed_on_the_neighbour_even_where_it_may_have_it_from_others(peer: Peer, topic: str) -> None:
    with pytest.raises(RemoteProtocolError, match="told a lie"):
        peer.incoming.bulletin_received(1, topic, b"lie")


@pytest.mark.parametrize(("topic", "read"), [("join", 5), ("replica", 100), ("evaluation", 100 + 80 * 3)])
def test_of_a_flood_of_notes_of_one_neighbour_only_the_first_are_read(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, topic: str, read: int
) -> None:
    monkeypatch.setattr(peer.runtime, "now", lambda: 7.0)
    for _ in range(1000):
        peer.incoming.bulletin_received(1, topic, b"note")
    assert peer.judged == [(1, b"note")] * read
    peer.incoming.bulletin_received(2, topic, b"note")
    assert peer.judged[read:] == [(2, b"note")]


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("completed", "peer-1 has finished"),
        ("left", "peer-1 has left the run"),
        ("stopped by SIGTERM", "peer-1 says goodbye: 'stopped by SIGTERM'"),
    ],
)
def test_the_end_of_a_neighbour_is_one_line(
    peer: Peer, caplog: pytest.LogCaptureFixture, reason: str, line: str
) -> None:
    with caplog.at_level(logging.INFO):
        peer.incoming.goodbye(1, reason)
        peer.incoming.link_down(1, f"it left: {reason}")
    assert caplog.messages == [line]


def test_goodbyes_do_not_fill_the_log(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for n in range(1000):
            peer.incoming.goodbye(1, f"goodbye {n}")
    assert 0 < len(caplog.records) < 30


def test_a_frame_that_is_refused_does_not_count_as_a_sign_of_life(peer: Peer) -> None:
    with pytest.raises(RemoteProtocolError):
        peer.incoming.frame_received(1, 1, b"")
    assert peer.neighbors.last_heard_at == 0.0
    assert peer.incoming.frame_received(1, 1, b"frame") is False
    assert peer.neighbors.last_heard_at > 0.0


def test_whoever_is_no_member_any_more_leaves_for_good(peer: Peer) -> None:
    peer.members.gone.add(2)

    async def story() -> None:
        peer.incoming.goodbye(1, "stopped")
        peer.incoming.goodbye(2, "left")
        await asyncio.sleep(0)

    asyncio.run(story())
    assert peer.transport.removed == [(2, "it left the run")]
    assert peer.neighbors.left == {1: "stopped", 2: "left"}


def test_callers_that_cannot_belong_to_the_run_are_refused(peer: Peer) -> None:
    peer.members.gone.add(2)
    with pytest.raises(HandshakeRefused, match="'cleo' left or was declared lost"):
        peer.incoming.hear(2, "cleo")
    with pytest.raises(HandshakeRefused, match="is not in everybody's list, and the members of this run cannot change"):
        peer.incoming.hear(3, "dora")
    assert peer.incoming.hear(1, "ben") is None


@pytest.mark.parametrize(("standing", "is_heard"), [("member", True), ("joining", True), ("not joined", False)])
def test_where_members_change_any_member_is_heard(standing: str, is_heard: bool) -> None:
    """It may owe something of the time when it was a neighbour."""
    peer = Peer(why_no_changes=None)
    peer.members.standings[1] = standing
    assert peer.incoming.hear(1, "ben") == (passive(1) if is_heard else None)
    peer.members.gone.add(1)
    with pytest.raises(HandshakeRefused, match="'ben' left or was declared lost"):
        peer.incoming.hear(1, "ben")


def test_chunks_of_shares_are_frames_outside_the_sequence(peer: Peer) -> None:
    assert peer.incoming.frame_received(1, 0, b"SA chunk") is None
    peer.incoming.frame_received(1, 1, b"SA chunk")
    peer.incoming.frame_received(1, 0, b"SV repair")
    assert peer.judged == [(1, b"SA chunk")]
    assert peer.frames.frames == [(1, 1, b"SA chunk"), (1, 0, b"SV repair")]
