"""The search of a newcomer for a sponsor, on a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from peer.daemon.members.joining import ASK_AGAIN_S, DECLINED_S, Joining
from peer.daemon.members.member_links import MemberLinks
from peer.daemon.members.roster import Roster
from peer.daemon.notes.notes import encode_refusal
from peer.daemon.runtime import Runtime
from peer.errors import HandshakeRefused, PeerUnreachable
from tests.daemon.parts import FakeTransport, neighbors_over

LINKED = (1, 2, 3)


class Newcomer:
    """A peer that asks to be let in."""

    def __init__(self) -> None:
        self.now = 100.0
        self.transport = FakeTransport(up={*LINKED})
        self.neighbors = neighbors_over(self.transport, LINKED)
        roster = SimpleNamespace(name=lambda peer: f"peer-{peer}", introduction=lambda: None)
        self.joining = Joining(
            cast(Runtime, SimpleNamespace(now=lambda: self.now)),
            self.neighbors,
            cast(MemberLinks, SimpleNamespace(linked=lambda: LINKED)),
            cast(Roster, roster),
        )

    def asked(self) -> list[int]:
        """Return whom it asks now."""
        self.transport.notes.clear()
        self.joining.ask()
        return [peer for peer, topic, _ in self.transport.notes if topic == "join"]

    def later(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def newcomer() -> Newcomer:
    return Newcomer()


def test_one_is_asked_and_asked_again(newcomer: Newcomer) -> None:
    assert newcomer.asked() == [1]
    assert newcomer.asked() == []
    newcomer.later(ASK_AGAIN_S + 0.1)
    assert newcomer.asked() == [1]


def test_another_is_asked_at_once_where_the_first_is_gone(newcomer: Newcomer) -> None:
    assert newcomer.asked() == [1]
    newcomer.transport.up.discard(1)
    assert newcomer.asked() == [2]
    newcomer.transport.up.clear()
    assert newcomer.asked() == []


def test_whoever_declines_is_not_asked_again_before_the_others(newcomer: Newcomer) -> None:
    asked = []
    for _ in range(4):
        asked += newcomer.asked()
        newcomer.joining.declined(asked[-1], encode_refusal("it is about to leave"))
        newcomer.later(ASK_AGAIN_S + 0.1)
        if len(asked) == 3:
            break
    assert asked == [1, 2, 3]


def test_it_gives_up_where_all_decline(newcomer: Newcomer) -> None:
    newcomer.asked()
    newcomer.joining.declined(1, encode_refusal("the run \x1b[2J ends too soon"))
    newcomer.later(DECLINED_S - 0.1)
    newcomer.asked()
    newcomer.later(0.2)
    with pytest.raises(HandshakeRefused, match=r"nobody lets it join: 'the run  \[2J ends too soon'"):
        newcomer.asked()


def test_nobody_answers_for_another(newcomer: Newcomer) -> None:
    assert newcomer.asked() == [1]
    newcomer.joining.declined(3, encode_refusal("go away"))
    newcomer.later(DECLINED_S + 1.0)
    assert newcomer.asked() == [1]


def test_a_run_that_is_over_is_not_joined(newcomer: Newcomer) -> None:
    newcomer.neighbors.left |= dict.fromkeys(LINKED, "completed")
    with pytest.raises(PeerUnreachable, match="the run came to its end"):
        newcomer.asked()
