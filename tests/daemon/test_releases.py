"""What a peer knows of the releases of all: when something new may be used, and what is passed on."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from peer.daemon.notes.notes import RELEASE, Hearsay
from peer.daemon.notes.releases import Releases
from peer.errors import RemoteProtocolError
from peer.node.statements import Statements, Unsigned
from peer.proto.sottovoce.v1.note_pb2 import ReleaseNote
from peer.protocol import NEWEST, OLDEST
from tests.daemon.parts import FakeTransport, neighbors_over
from tests.node.changing_members import Cluster

ALL = range(4)


class Peer:
    """Peer 0 of four, with neighbours 1 and 2."""

    def __init__(self, statements: Statements | None = None) -> None:
        self.transport = FakeTransport(up={1, 2}, protocols=dict.fromkeys((1, 2), NEWEST))
        self.members: Collection[int] = ALL
        self.needed, self.now = OLDEST, 0.0
        neighbors = neighbors_over(self.transport, (1, 2))
        hearsay = Hearsay(0, ALL, statements or Unsigned(), neighbors.is_up, lambda: self.now)
        self.releases = Releases(hearsay, "sottovoce 0.2.0", neighbors, lambda: 1000.0 + self.now)
        self.releases.follow(lambda: self.members, lambda: self.needed)

    @property
    def all_new(self) -> bool:
        return self.releases.all_speak(NEWEST)


def release_of(peer: int, protocol: int, software: str, said_ms: int) -> bytes:
    told = ReleaseNote(peer=peer, protocol_max=protocol, software=software, said_ms=said_ms)
    return told.SerializeToString()


def told(peer: int, said_ms: int = 1, protocol: int = NEWEST) -> bytes:
    return release_of(peer, protocol, "sottovoce 0.2.0", said_ms)


@pytest.fixture
def peer() -> Peer:
    return Peer()


def test_a_member_that_nothing_is_known_of_counts_as_old(peer: Peer) -> None:
    assert peer.releases.all_speak(OLDEST)
    assert not peer.all_new
    peer.releases.heard(1, told(3))
    assert peer.all_new
    peer.members = (0, 1, 2)
    assert peer.all_new


def test_a_note_counts_for_some_time_only(peer: Peer) -> None:
    peer.releases.heard(1, told(3))
    peer.now = 1800.0
    assert peer.all_new
    peer.now = 1801.0
    assert not peer.all_new
    peer.releases.heard(2, told(3))
    assert not peer.all_new, "the same note once more"
    peer.releases.heard(2, told(3, said_ms=2))
    assert peer.all_new


def test_what_a_neighbour_speaks_itself_counts_before_any_note(peer: Peer) -> None:
    peer.members = (0, 1, 2)
    peer.releases.heard(1, told(1))
    peer.transport.protocols[1] = OLDEST
    assert not peer.all_new
    assert peer.releases.linked(1) == [told(0, 1_000_000)], "its own note, and none of peer 1"
    peer.transport.up.discard(1)
    assert not peer.all_new, "while it is away"
    peer.releases.heard(2, told(1))
    assert not peer.all_new, "a note from before it went back"


def test_only_a_member_that_something_is_known_of_is_older(peer: Peer) -> None:
    assert not peer.releases.is_older(3, NEWEST)
    peer.releases.heard(1, told(3, protocol=OLDEST))
    assert peer.releases.is_older(3, NEWEST)
    assert not peer.releases.is_older(3, OLDEST)
    peer.releases.heard(1, told(3, said_ms=2))
    assert not peer.releases.is_older(3, NEWEST)
    assert not peer.releases.is_older(1, NEWEST)
    peer.transport.protocols[1] = OLDEST
    assert peer.releases.is_older(1, NEWEST)


def test_what_is_in_use_stays_in_use(peer: Peer) -> None:
    peer.needed = NEWEST
    assert peer.all_new
    assert peer.releases.linked(1) == [], "nobody has to know any more"


def test_news_is_passed_on_and_told_to_who_was_away(peer: Peer) -> None:
    peer.releases.heard(1, told(3))
    peer.releases.heard(2, told(3))
    assert peer.transport.notes == [(2, RELEASE, told(3))]
    own, other = peer.releases.linked(1)
    assert (own, other) == (told(0, 1_000_000), told(3))
    assert peer.releases.linked(2) == [own, other]


def test_the_software_of_each_member(peer: Peer) -> None:
    peer.transport.protocols[1] = OLDEST
    assert peer.releases.software() == {0: "sottovoce 0.2.0", 1: "sottovoce 0.2.0", 2: "sottovoce 0.3.0", 3: None}
    peer.releases.heard(1, release_of(3, NEWEST, "sottovoce\n0.3", 1))
    assert peer.releases.software()[3] == "sottovoce 0.3"


@pytest.mark.parametrize(
    "note",
    [
        b"\xff",
        release_of(3, 0, "sottovoce", 1),
        release_of(3, 1 << 20, "sottovoce", 1),
        release_of(3, NEWEST, "sottovoce", 1 << 60),
    ],
)
def test_a_note_that_makes_no_sense_is_an_offence(peer: Peer, note: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        peer.releases.heard(1, note)
    assert peer.transport.notes == []


def test_with_certificates_only_a_signed_note_counts_and_none_twice() -> None:
    cluster = Cluster("sgp", signed=True)
    own, theirs, other = (cluster.statements(each) for each in (0, 3, 2))
    peer = Peer(own)
    with pytest.raises(RemoteProtocolError, match="in its name"):
        peer.releases.heard(1, other.sign(RELEASE, told(3)))
    with pytest.raises(RemoteProtocolError, match="in its name"):
        peer.releases.heard(1, theirs.sign("evaluation", told(3)))
    peer.releases.heard(1, told(3))
    assert not peer.all_new, "nobody has signed it"
    first, second = theirs.sign(RELEASE, told(3)), theirs.sign(RELEASE, told(3, protocol=OLDEST))
    peer.releases.heard(1, second)
    peer.releases.heard(1, first)
    assert not peer.all_new, "an earlier statement came later"
    peer.releases.heard(2, theirs.sign(RELEASE, told(3)))
    assert peer.all_new
