"""Stand-ins for what surrounds a part of the daemon: a transport without sockets, and parts that only take note."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from peer.daemon.neighbors import Neighbors
from peer.daemon.traffic import Traffic
from peer.gossip.membership import ChangeKind
from peer.net.counters import LinkCounters
from peer.net.links import LinkLog
from peer.net.offences import Offences
from peer.net.transport import Transport
from peer.protocol import OLDEST


@dataclass
class FakeTransport:
    """Knows who is connected, and keeps what is said to whom."""

    up: set[int] = field(default_factory=set)
    refusals: dict[int, str] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    notes: list[tuple[int, str, bytes]] = field(default_factory=list)
    removed: list[tuple[int, str]] = field(default_factory=list)
    offences: Offences = field(default_factory=Offences)
    log: LinkLog = field(default_factory=LinkLog)
    protocols: dict[int, int] = field(default_factory=dict)
    """Connected peer → the version of the protocol that is spoken with it; by default the oldest."""

    def is_up(self, peer: int) -> bool:
        return peer in self.up

    def bulletin(self, peer: int, topic: str, data: bytes) -> bool:
        if peer in self.up:
            self.notes.append((peer, topic, data))
        return peer in self.up

    def connection(self, peer: int) -> SimpleNamespace | None:
        protocol = self.protocols.get(peer, OLDEST)
        link = SimpleNamespace(protocol=protocol, software=f"sottovoce 0.{protocol - 2}.0")
        return link if peer in self.up else None

    def counters(self, peer: int) -> LinkCounters:
        return LinkCounters(frame_bytes_sent=100 * peer)

    def remove_neighbor(self, peer: int, reason: str) -> None:
        self.removed.append((peer, reason))


def neighbors_over(transport: FakeTransport, peers: tuple[int, ...]) -> Neighbors:
    """Return the neighbours of peer 0, which are these peers."""
    neighbors = Neighbors(Traffic(0))
    neighbors.set_partners(peers, peers)
    neighbors.connect(cast(Transport, transport))
    return neighbors


class FakeMembers:
    """Announces whatever it is asked to."""

    def __init__(self) -> None:
        self.announced: list[tuple[ChangeKind, int]] = []
        self.gone: set[int] = set()
        self.standings: dict[int, str] = {}

    async def announce(self, kind: ChangeKind, subject: int, *, ordered: bytes = b"") -> dict[str, object]:
        self.announced.append((kind, subject))
        return {"from": 12}

    async def follow_list(self, taken_out: object) -> dict[str, object]:
        return {}

    def is_gone(self, peer: int) -> bool:
        return peer in self.gone

    def losses(self) -> dict[int, bytes]:
        return {}

    def standing(self, peer: int) -> str:
        return self.standings.get(peer, "member")
