"""Events between two looks at a run, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peer.watch.snapshot import DOWN, PeerView, Snapshot

MOST_EDGES = 8
"""Most edges that one look names; of more, it gives the number."""

_BECAME = {
    "finished": "has finished",
    "stopped": "has stopped",
    "stopping": "stops after its round",
    "left": "has left the run",
    "lost": "was excluded from the run as lost",
    "diverged": "has diverged",
    "joining": "is about to join",
    "connected": "cannot be asked, but is connected to its neighbours",
    "unreachable": "cannot be reached",
}


@dataclass(frozen=True)
class Event:
    """One event."""

    at: float
    """Unix seconds."""
    text: str
    is_trouble: bool = False


def changes(before: Snapshot | None, after: Snapshot) -> Iterator[Event]:
    """Yield the changes: states of peers, limits of devices, edges that went down or came back, the end of the run."""
    if before is None:
        return
    earlier = {peer.index: peer for peer in before.peers}
    for peer in after.peers:
        was = earlier.get(peer.index)
        if was is None or was.state != peer.state:
            yield Event(after.at, _sentence(peer, was), peer.state in DOWN)
        if peer.limits and not (was and was.limits):
            yield Event(after.at, f"{peer.name} is {peer.limits[0]}")
        elif was and was.limits and not peer.limits and peer.state == "running":
            yield Event(after.at, f"{peer.name} is not held back by limits of its device any more")
    names = {peer.index: peer.name for peer in after.peers}
    states = {(edge.a, edge.b): edge.state for edge in before.edges}
    for state, words in (("down", "is down"), ("up", "is up again")):
        was_state = "up" if state == "down" else "down"
        edges = [edge for edge in after.edges if edge.state == state and states.get((edge.a, edge.b)) == was_state]
        for edge in edges[:MOST_EDGES]:
            ends = f"the link between {names.get(edge.a, edge.a)} and {names.get(edge.b, edge.b)} {words}"
            yield Event(after.at, f"{ends}: {edge.problem}" if edge.problem else ends, state == "down")
        if len(edges) > MOST_EDGES:
            yield Event(after.at, f"{len(edges) - MOST_EDGES} more links: each {words}", state == "down")
    if after.ended is not None and before.ended is None:
        yield Event(after.at, f"the run ended: {after.ended}", not after.ended.startswith(("completed", "stopped")))


def _sentence(peer: PeerView, was: PeerView | None) -> str:
    if peer.state == "running":
        if was is not None and was.state in (*DOWN, "connected"):
            return f"{peer.name} is back"
        return (
            f"{peer.name} has joined"
            if was is None or was.state in ("joining", "not joined")
            else (f"{peer.name} is running")
        )
    what = f"{peer.name} {_BECAME.get(peer.state, f'is {peer.state}')}"
    return f"{what}: {peer.problem}" if peer.problem else what
