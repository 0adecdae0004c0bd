"""The edges of the graph, from the link statuses of the peers at their ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from peer.foreign_text import printable
from peer.watch.snapshot import OVER, EdgeView

_WINDOW = 6
"""Answers over which a rate is the mean."""

Links = Mapping[int, Mapping[str, Any]]
"""Neighbour → status of the link to it."""


class Rates:
    """Bytes per second, from totals at several times."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], deque[tuple[float, int]]] = {}

    def put(self, sender: int, receiver: int, seconds: float, total: int) -> float | None:
        """Return the rate of one direction, after it has sent `total` bytes `seconds` after its process began."""
        seen = self._seen.setdefault((sender, receiver), deque(maxlen=_WINDOW))
        if seen and (seconds < seen[-1][0] or total < seen[-1][1]):
            seen.clear()  # Another process counts anew.
        if not seen or seconds > seen[-1][0]:
            seen.append((seconds, total))
        span = seen[-1][0] - seen[0][0]
        return (seen[-1][1] - seen[0][1]) / span if span > 0 else None


class Edges:
    """All edges. An edge that no peer reports any more is remembered."""

    def __init__(self) -> None:
        self._rates = Rates()
        self._known: dict[tuple[int, int], EdgeView] = {}

    def look(
        self, links: Mapping[int, Links], seconds: Mapping[int, float], states: Mapping[int, str]
    ) -> list[EdgeView]:
        """Return the present edges. `links`, and `seconds` since the start, are of peers that answered; `states`, of
        all."""
        rates = {
            (peer, other): self._rates.put(peer, other, seconds[peer], int(link["frame_bytes"]))
            for peer, of_peer in links.items()
            for other, link in of_peer.items()
        }
        pairs = {
            (min(peer, other), max(peer, other))
            for peer, of_peer in links.items()
            for other, link in of_peer.items()
            if link.get("sends") or link.get("receives")
        }
        silent = {pair for pair in self._known if not links.keys() & set(pair)}
        found = {}
        for pair in sorted(pairs | silent):
            over = any(states.get(peer) in OVER for peer in pair)
            if pair in pairs:
                found[pair] = _edge(pair, links, rates, over=over)
            else:
                old, state = self._known[pair], "over" if over else "unknown"
                found[pair] = EdgeView(a=old.a, b=old.b, sends=old.sends, state=state, relayed=old.relayed)
        self._known = found
        return list(found.values())


def planned(schedule: Sequence[tuple[int, int]], state: str) -> list[EdgeView]:
    """Return the edges (sender, receiver) of a schedule, of which no more is known."""
    directions = set(schedule)
    pairs = sorted({(min(edge), max(edge)) for edge in directions})
    return [EdgeView(a=a, b=b, sends=((a, b) in directions, (b, a) in directions), state=state) for a, b in pairs]


def _edge(
    pair: tuple[int, int], links: Mapping[int, Links], rates: Mapping[tuple[int, int], float | None], *, over: bool
) -> EdgeView:
    a, b = pair
    ends = (links.get(a, {}).get(b), links.get(b, {}).get(a))
    said = [end for end in ends if end is not None]
    at_a, at_b = (end or {} for end in ends)
    is_up = all(end["up"] for end in said)
    return EdgeView(
        a=a,
        b=b,
        sends=(bool(at_a.get("receives") or at_b.get("sends")), bool(at_a.get("sends") or at_b.get("receives"))),
        state="over" if over else "up" if is_up else "down",
        problem=None
        if over or is_up
        else next((printable(str(end["problem"])) for end in said if end.get("problem")), None),
        rates=(rates.get((a, b)), rates.get((b, a))),
        # The receiver knows the lateness, the sender the backlog.
        lateness_s=(at_b.get("lateness_s"), at_a.get("lateness_s")),
        left_out=(bool(at_a.get("left_out")), bool(at_b.get("left_out"))),
        backlog_bytes=(at_a.get("unacknowledged_bytes"), at_b.get("unacknowledged_bytes")),
        relayed=any(end.get("relayed_bytes") for end in said),
    )
