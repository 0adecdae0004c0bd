"""The two renderings of a graph schedule: text and SVG."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from peer.gossip import graphs
from peer.gossip.topology import Schedule, build_schedule
from peer.report import graph_view

SVG = "{http://www.w3.org/2000/svg}"


def graph(kind: str = "ring", num_peers: int = 8, **options) -> Schedule:
    return build_schedule(num_peers, kind, **options)


def drawn(schedule: Schedule, **options) -> ElementTree.Element:
    return ElementTree.fromstring(graph_view.svg(schedule, **options))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_the_text_shows_weights_and_properties():
    text = graph_view.text(graph("four-node-a", 4))
    assert text.splitlines()[0] == "four-node-a, 4 peers"
    facts = dict(re.findall(r"^  (\S[^:]*?)  +(\S.*)$", text, flags=re.MULTILINE))
    assert facts["strongly connected"] == "yes"
    assert facts["column stochastic"] == "yes"
    assert facts["doubly stochastic"] == "no"
    assert facts["symmetric"] == "no"
    assert facts["spectral gap"] == "0.2929 (dense matrix)"
    assert facts["diameter"] == "3"
    assert facts["messages a round"] == "4"
    assert text.splitlines()[-4:] == [
        "  0 → 1 (1/2 each)",
        "  1 → 2 (1/3 each)",
        "  2 → 3 (1/2 each)",
        "  3 → 0 (1/3 each)",
    ]


def test_the_text_of_a_symmetric_graph_names_its_smallest_eigenvalue():
    assert "smallest eigenvalue  -0.3333" in graph_view.text(graph("ring"))
    assert "smallest eigenvalue" not in graph_view.text(graph("directed-ring"))


def test_the_text_of_a_changing_graph_says_when_and_what_replicas_cost():
    text = graph_view.text(graph("sparse-push-four", 4, period_rounds=5))
    assert "every 5 rounds, 3 graphs in turn" in text
    assert "messages with replicas  10" in text
    assert "rounds 5 to 9, then every 15 rounds" in text
    assert "not in every round" in graph_view.text(graph("exponential-one-peer"))


def test_the_text_of_many_peers_lists_neighbours_and_stays_short():
    text = graph_view.text(graph("exponential", 1000))
    assert "  0 → 1, 2, 4, 8, 16, 32, 64, 128, 256, 512" in text
    assert "936 more peers" in text
    assert len(text.splitlines()) < 100
    assert "… 499 in all" in graph_view.text(graph("complete", 500))


def test_a_sentence_says_what_the_figures_mean():
    ring = graph_view.text(graph("directed-ring"))
    assert "sends to 1 of the others; what one of them\nlearns reaches all in 7 rounds." in ring
    assert "sends to 1 to 7 of the others" in graph_view.text(graph("star"))
    assert "reaches all in 1 round." in graph_view.text(graph("complete"))
    assert "reaches all" not in graph_view.text(graph("exponential-one-peer"))


def test_a_disconnected_graph_is_shown_as_such():
    text = graph_view.text(Schedule.from_matrices([np.eye(2)]))
    assert "reaches all" not in text
    assert re.search(r"strongly connected +no", text)
    assert re.search(r"diameter +none", text)


def test_names_appear_beside_the_numbers():
    names = [f"pi-{peer}" for peer in range(20)]
    assert "  0 pi-0 → 1, 7 (1/3 each)" in graph_view.text(graph("ring"), names=names[:8])
    assert "  3 pi-3 → 2, 4" in graph_view.text(graph("ring", 20), names=names)
    assert "pi-7" in texts(drawn(graph("ring"), names=names[:8]))


def test_weights_that_are_no_simple_fractions_are_decimals():
    assert ".313" in graph_view.text(Schedule.from_matrices([[[0.6871, 0.5], [0.3129, 0.5]]]))


@pytest.mark.parametrize("kind", sorted(set(graphs.FAMILIES) - {"file"}))
def test_every_family_is_drawn_with_one_circle_for_each_peer(kind):
    for num_peers in [4] if "four" in kind else [4, 16, 64]:
        check_drawing(graph(kind, num_peers, degree=2), num_peers)


@pytest.mark.parametrize("num_peers", [1, 2, 3])
def test_the_smallest_graphs_are_drawn_too(num_peers):
    for kind in ("directed-ring", "ring", "star", "exponential-one-peer"):
        check_drawing(graph(kind, num_peers), num_peers)


def check_drawing(schedule: Schedule, num_peers: int) -> None:
    root = drawn(schedule)
    panels = len(schedule.matrices)
    assert len(list(root.iter(f"{SVG}circle"))) == num_peers * panels
    edges = sum(matrix.num_edges for matrix in schedule.matrices)
    lines, heads = len(list(root.iter(f"{SVG}path"))), len(list(root.iter(f"{SVG}polygon")))
    # A line without an arrowhead stands for both directions.
    assert 2 * lines - heads == edges


def test_an_arrow_points_at_its_receiver():
    root = drawn(graph("directed-ring", 4))
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    radius = float(next(root.iter(f"{SVG}circle")).get("r"))
    tips = [tuple(map(float, p.get("points").split()[0].split(","))) for p in root.iter(f"{SVG}polygon")]
    for sender, tip in enumerate(tips):
        receiver = circles[(sender + 1) % 4]
        assert np.hypot(tip[0] - receiver[0], tip[1] - receiver[1]) == pytest.approx(radius + 1, abs=0.2)


def test_arrows_carry_their_weights_and_everything_stays_inside_the_frame():
    root = drawn(graph("star", 8, weights="uniform"))
    labels = texts(root)
    assert labels.count("1/8") == 7
    assert labels.count("1/2") == 7
    width, height = float(root.get("width")), float(root.get("height"))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx")) < width
        assert 0 < float(circle.get("cy")) < height


def test_one_weight_for_all_stands_in_the_caption():
    labels = texts(drawn(graph("ring")))
    assert any("all weights 1/3" in label for label in labels)
    assert labels.count("1/3") == 0


def test_a_graph_with_too_many_edges_is_not_drawn_but_counted():
    labels = texts(drawn(graph("complete", 100)))
    assert any("9,900 edges, too many to draw" in label for label in labels)


def test_a_long_schedule_is_cut_and_says_so():
    schedule = Schedule([graph("ring").matrices[0], graph("directed-ring").matrices[0]] * 8)
    assert "and 4 more graphs" in texts(drawn(schedule))
    assert "… and 4 more graphs" in graph_view.text(schedule)


def test_names_are_escaped():
    hostile = '<script>&"'
    assert hostile in texts(drawn(graph("ring", 2), names=[hostile, "b"]))
    named = Schedule(graph("ring", 2).matrices, name='a"b<c>&')
    assert drawn(named).get("aria-label") == 'a"b<c>&, 2 peers'


def test_everything_drawn_has_a_colour_in_light_and_in_dark():
    root = drawn(graph("sparse-push-four", 4), names=list("abcd"))
    style = next(root.iter(f"{SVG}style")).text or ""
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    classes = {element.get("class") for element in root.iter() if element.get("class")}
    assert {"paper", "edge", "head", "peer", "note", "title"} <= classes
    for name in classes - {"title"}:
        colours = [re.findall(rf"\.{name} {{[^}}]*(?:fill|stroke): (#\w+)", part)[-1] for part in (light, dark)]
        assert colours[0] != colours[1], name
    # Outside the style sheet nothing has a colour that would stay as it is.
    assert not re.findall(r'(?:fill|stroke)="#', graph_view.svg(graph("ring")))
