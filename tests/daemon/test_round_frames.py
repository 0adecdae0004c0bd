"""Frames that wait for the loop: how many it gives to the participant at once, and what a refused one leaves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from peer.daemon.members.member_links import MemberLinks
from peer.daemon.neighbors import Neighbors
from peer.daemon.round_frames import RoundFrames
from peer.daemon.runtime import Runtime
from peer.errors import RemoteProtocolError
from peer.gossip.effects import Effects, OutgoingFrame
from peer.node.durable import DurablePeer

QUIET = b"waits"


class Driven:
    """Frames between a transport and a participant that only take notes."""

    def __init__(self, answers: dict[bytes, Effects | Exception]) -> None:
        """`answers`: what the participant asks for on each frame; frames that are not there ask for nothing."""
        self.log: list[tuple[object, ...]] = []
        self.calls = 0
        self._answers = answers
        transport = SimpleNamespace(
            taken=lambda peer, seq: self.log.append(("credit", peer, seq)),
            send=lambda peer, seq, frame: self.log.append(("send", peer, frame)),
            blame=lambda peer, error: self.log.append(("blame", peer)),
            acknowledge=lambda peer, upto: self.log.append(("receipt", peer, upto)),
        )
        traffic = SimpleNamespace(handed_over=lambda outgoing: None)
        neighbors = SimpleNamespace(transport=transport, traffic=traffic, is_up=lambda peer: True)
        durable = SimpleNamespace(receive=self._receive, publish=lambda effects: effects.frames, participant=None)
        member_links = SimpleNamespace(meet=lambda: None, link_up=lambda peer: None, confirmed=lambda peer: None)
        self.frames = RoundFrames(
            cast(Runtime, SimpleNamespace(work=self._work, now=lambda: 5.0)),
            cast(Neighbors, neighbors),
            cast(DurablePeer, durable),
            Effects(),
            cast(MemberLinks, member_links),
            on_late=lambda round_number, peers: self.log.append(("late", round_number, peers)),
            on_durable=lambda: self.log.append(("durable",)),
        )

    async def _work(self, function, *arguments):
        self.calls += 1
        return function(*arguments)

    def _receive(self, peer, seq, frame, now):
        assert now == 5.0
        self.log.append(("frame", peer, seq))
        answer = self._answers.get(frame, Effects(receipts={peer: seq}))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kinds(self, *kinds: str) -> list[tuple[object, ...]]:
        """Return what happened of these kinds."""
        return [each for each in self.log if each[0] in kinds]

    def take(self, *waiting: tuple[int, int, bytes]):
        for each in waiting:
            self.frames.frame_received(*each)
        return asyncio.run(self.frames.take())


def test_frames_that_ask_for_nothing_are_taken_in_one_call_of_the_worker():
    driven = Driven({})
    assert driven.take((1, 1, QUIET), (2, 1, QUIET), (1, 2, QUIET)) is None
    assert driven.calls == 1
    assert not driven.frames
    assert driven.kinds("frame") == [("frame", 1, 1), ("frame", 2, 1), ("frame", 1, 2)]
    assert driven.kinds("credit") == [
        ("credit", 1, 1),
        ("credit", 2, 1),
        ("credit", 1, 2),
    ]
    assert driven.kinds("receipt") == [("receipt", 1, 2), ("receipt", 2, 1)]


def test_what_a_frame_asks_to_send_leaves_before_the_next_frame_is_looked_at():
    driven = Driven({b"last": Effects(frames=[OutgoingFrame(receiver=3, frame=b"sum")])})
    driven.take((1, 1, QUIET), (2, 1, b"last"), (1, 2, QUIET))
    assert driven.kinds("frame", "send") == [("frame", 1, 1), ("frame", 2, 1), ("send", 3, b"sum"), ("frame", 1, 2)]


def test_frames_behind_the_end_of_a_round_wait_for_the_next_one():
    record = SimpleNamespace(round=0)
    driven = Driven({b"last": Effects(finished=0, record=record)})
    assert driven.take((1, 1, QUIET), (2, 1, b"last"), (1, 2, QUIET)) is record
    assert driven.frames
    assert ("frame", 1, 2) not in driven.log
    assert ("credit", 1, 2) not in driven.log


def test_a_refused_frame_takes_those_of_its_sender_with_it_and_no_others():
    driven = Driven({b"wrong": RemoteProtocolError("sent nonsense", peer=1)})
    driven.take((2, 1, QUIET), (1, 1, b"wrong"), (1, 2, QUIET), (2, 2, QUIET))
    assert driven.kinds("frame") == [("frame", 2, 1), ("frame", 1, 1), ("frame", 2, 2)]
    assert driven.log.index(("receipt", 2, 1)) < driven.log.index(("blame", 1)), "what came before it counts"
    assert ("credit", 1, 2) not in driven.log
    assert not driven.frames


def test_a_refused_first_frame_asks_for_nothing():
    driven = Driven({b"wrong": ValueError("whatever was raised")})
    driven.take((1, 1, b"wrong"))
    assert driven.log == [("frame", 1, 1), ("credit", 1, 1), ("blame", 1)]
