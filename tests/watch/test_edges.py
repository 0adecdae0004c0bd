"""Edges, from what both ends say."""

from __future__ import annotations

from typing import Any

from peer.watch.edges import Edges, Rates, planned
from peer.watch.snapshot import EdgeView

RUN = {0: "running", 1: "running", 2: "running"}


def link(up: bool = True, *, sends: bool = False, receives: bool = False, **more: Any) -> dict[str, Any]:
    """What a status says of a link: the neighbour sends to this peer, receives from it."""
    return {"up": up, "sends": sends, "receives": receives, "frame_bytes": 0, "problem": None, **more}


def look(
    edges: Edges, links: dict[int, dict[int, Any]], states: dict[int, str] = RUN, at: float = 1.0
) -> list[EdgeView]:
    return edges.look(links, dict.fromkeys(links, at), states)


def test_an_edge_is_up_where_both_ends_say_so() -> None:
    (edge,) = look(Edges(), {0: {1: link(receives=True)}, 1: {0: link(sends=True)}})
    assert (edge.a, edge.b, edge.sends, edge.state) == (0, 1, (True, False), "up")


def test_one_end_is_enough_to_know_that_it_is_down_and_why() -> None:
    said = {0: {1: link(False, receives=True, problem="nobody listens\x1b[2J")}, 1: {0: link(sends=True)}}
    (edge,) = look(Edges(), said)
    assert (edge.state, edge.problem) == ("down", "nobody listens [2J")


def test_an_edge_to_a_peer_that_is_killed_goes_down_and_one_that_nobody_tells_of_is_unknown() -> None:
    edges = Edges()
    ring = {0: {1: link(receives=True), 2: link(sends=True)}, 1: {0: link(sends=True), 2: link(receives=True)}}
    ring[2] = {0: link(receives=True), 1: link(sends=True)}
    assert [edge.state for edge in look(edges, ring)] == ["up"] * 3
    left = {0: {1: link(False, receives=True), 2: link(False, sends=True)}}
    silent = {0: "running", 1: "unreachable", 2: "unreachable"}
    found = look(edges, left, silent)
    assert [(edge.a, edge.b, edge.state) for edge in found] == [(0, 1, "down"), (0, 2, "down"), (1, 2, "unknown")]
    assert [edge.state for edge in look(edges, ring)] == ["up"] * 3


def test_an_edge_to_a_peer_that_has_left_is_over_and_no_trouble() -> None:
    said = {0: {1: link(False, receives=True, problem="gone")}}
    (edge,) = look(Edges(), said, {0: "running", 1: "left"})
    assert (edge.state, edge.problem) == ("over", None)


def test_a_link_that_is_no_edge_of_the_graph_is_none_here() -> None:
    assert look(Edges(), {0: {1: link()}}) == []


def test_each_direction_has_its_figures_from_the_end_that_knows_them() -> None:
    edges = Edges()
    for seconds in (1.0, 3.0):
        total = int(1000 * seconds)
        at_0 = link(sends=True, receives=True, lateness_s=0.5, left_out=True, unacknowledged_bytes=7)
        at_1 = link(sends=True, receives=True, lateness_s=0.1, relayed_bytes=[10, 20], unacknowledged_bytes=9)
        at_0["frame_bytes"], at_1["frame_bytes"] = total, 3 * total
        (edge,) = look(edges, {0: {1: at_0}, 1: {0: at_1}}, at=seconds)
    assert edge.rates == (1000.0, 3000.0)
    # Peer 1 hears how late peer 0 is.
    assert edge.lateness_s == (0.1, 0.5)
    assert edge.left_out == (True, False)
    assert edge.backlog_bytes == (7, 9)
    assert edge.relayed


def test_a_rate_begins_anew_with_another_process() -> None:
    rates = Rates()
    assert rates.put(0, 1, 10.0, 5000) is None
    assert rates.put(0, 1, 12.0, 6000) == 500.0
    assert rates.put(0, 1, 0.5, 6100) is None
    assert rates.put(0, 1, 1.5, 6100) == 0.0


def test_the_edges_of_a_schedule_are_pairs() -> None:
    found = planned([(0, 1), (1, 0), (2, 0)], "up")
    assert [(edge.a, edge.b, edge.sends) for edge in found] == [(0, 1, (True, True)), (0, 2, (False, True))]
