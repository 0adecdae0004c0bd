"""Sentences about what changed."""

from __future__ import annotations

from typing import Any

from peer.watch.events import MOST_EDGES, changes
from peer.watch.snapshot import EdgeView, PeerView, Snapshot


def snapshot(states: dict[str, str], edges: tuple[EdgeView, ...] = (), **more: Any) -> Snapshot:
    peers = [PeerView(index=n, name=name, state=state) for n, (name, state) in enumerate(states.items())]
    return Snapshot(name="run", kind="cluster", at=5.0, rounds=9, peers=peers, edges=edges, **more)


def edge(state: str, a: int = 0, b: int = 1, problem: str | None = None) -> EdgeView:
    return EdgeView(a=a, b=b, sends=(True, True), state=state, problem=problem)


def told(before: Snapshot | None, after: Snapshot) -> list[tuple[str, bool]]:
    return [(event.text, event.is_trouble) for event in changes(before, after)]


def test_the_first_look_and_an_unchanged_one_are_no_news() -> None:
    running = snapshot({"a": "running"})
    assert told(None, running) == []
    assert told(running, running) == []


def test_a_peer_goes_and_comes_back() -> None:
    up, down = snapshot({"a": "running"}), snapshot({"a": "unreachable"})
    assert told(up, down) == [("a cannot be reached", True)]
    assert told(down, up) == [("a is back", False)]


def test_members_join_leave_and_are_lost() -> None:
    before = snapshot({"a": "running", "b": "joining", "c": "running"})
    after = snapshot({"a": "left", "b": "running", "c": "lost", "d": "running"})
    assert told(before, after) == [
        ("a has left the run", False),
        ("b has joined", False),
        ("c was excluded from the run as lost", True),
        ("d has joined", False),
    ]


def test_a_device_reaches_a_limit_and_is_under_it_again() -> None:
    def limited(*limits: str, state: str = "running") -> Snapshot:
        return Snapshot(
            name="run", kind="cluster", at=5.0, rounds=9,
            peers=[PeerView(index=0, name="a", state=state, limits=limits)],
        )  # fmt: skip

    free, one, two = limited(), limited("paused: too warm"), limited("paused: too warm", "paused: no mains")
    assert told(free, one) == [("a is paused: too warm", False)]
    assert told(one, two) == told(two, one) == [], "it is held back all the same"
    assert told(one, free) == [("a is not held back by limits of its device any more", False)]
    assert told(one, limited(state="left")) == [("a has left the run", False)]


def test_edges_go_down_and_up() -> None:
    states = {"a": "running", "b": "running"}
    up, down = snapshot(states, (edge("up"),)), snapshot(states, (edge("down", problem="no answer"),))
    assert told(up, down) == [("the link between a and b is down: no answer", True)]
    assert told(down, up) == [("the link between a and b is up again", False)]


def test_of_many_edges_a_few_are_named() -> None:
    states = {str(n): "running" for n in range(30)}
    before = snapshot(states, tuple(edge("up", 0, n) for n in range(1, 30)))
    after = snapshot(states, tuple(edge("down", 0, n) for n in range(1, 30)))
    texts = told(before, after)
    assert len(texts) == MOST_EDGES + 1
    assert texts[-1][0] == f"{29 - MOST_EDGES} more links: each is down"


def test_the_end_of_a_run_is_told_once() -> None:
    before, after = snapshot({}), snapshot({}, ended="failed: disk full")
    assert told(before, after) == [("the run ended: failed: disk full", True)]
    assert told(after, after) == []
