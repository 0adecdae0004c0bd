"""When a frame arrives: on links of their own, and over interfaces that all links of a peer share."""

from __future__ import annotations

from random import Random

import pytest

from peer.simulate.network import Agenda, Cut, LinkModel, VirtualNetwork


def network(**model: float) -> VirtualNetwork:
    return VirtualNetwork(LinkModel(overhead_bytes=0, **model))  # type: ignore[arg-type]


def arrival(links: VirtualNetwork, sender: int, receiver: int, frame_bytes: int, now: float) -> float:
    return links.arrivals(sender, [(receiver, frame_bytes)], now)[0]


def test_a_link_sends_one_frame_after_the_other() -> None:
    links = network(rate_kbit_s=8, latency_s=0.5)
    assert arrival(links, 0, 1, 1000, 0.0) == pytest.approx(1.5)
    assert arrival(links, 0, 1, 1000, 0.2) == pytest.approx(2.5)
    assert arrival(links, 0, 2, 1000, 0.2) == pytest.approx(1.7)


def test_all_that_a_peer_sends_shares_its_upload() -> None:
    links = network(up_kbit_s=8, latency_s=0.5)
    assert arrival(links, 0, 1, 1000, 0.0) == pytest.approx(1.5)
    assert arrival(links, 0, 2, 1000, 0.0) == pytest.approx(2.5)
    assert arrival(links, 1, 2, 1000, 0.0) == pytest.approx(1.5)


def test_all_that_a_peer_receives_shares_its_download() -> None:
    links = network(down_kbit_s=8, latency_s=0.5)
    assert arrival(links, 0, 2, 1000, 0.0) == pytest.approx(1.5)
    assert arrival(links, 1, 2, 1000, 0.0) == pytest.approx(2.5)


def test_frames_to_several_neighbours_leave_side_by_side() -> None:
    links = network(up_kbit_s=8, latency_s=0.5)
    # 1000 and 3000 bytes take equal parts of the upload until the smaller one is through.
    assert links.arrivals(0, [(1, 3000), (2, 1000)], 0.0) == pytest.approx([4.5, 2.5])
    assert arrival(links, 0, 1, 1000, 1.0) == pytest.approx(5.5)


def test_a_ring_takes_as_long_as_its_interfaces_are_full() -> None:
    links = network(up_kbit_s=8, down_kbit_s=8)
    ends = [links.arrivals(peer, [((peer - 1) % 4, 1000), ((peer + 1) % 4, 1000)], 0.0) for peer in range(4)]
    assert [end for pair in ends for end in pair] == pytest.approx([2.0] * 8)


def test_upload_and_download_overlap() -> None:
    links = network(up_kbit_s=8, down_kbit_s=8, latency_s=0.5)
    assert arrival(links, 0, 1, 1000, 0.0) == pytest.approx(1.5)
    faster = network(up_kbit_s=16, down_kbit_s=8)
    assert arrival(faster, 0, 1, 1000, 0.0) == pytest.approx(1.0)


def test_what_is_sent_across_a_cut_arrives_after_it_in_order() -> None:
    cut = Cut(peers=frozenset({0, 1}), from_s=10.0, until_s=20.0)
    links = VirtualNetwork(LinkModel(overhead_bytes=0, rate_kbit_s=8, latency_s=0.5, cuts=(cut,)))
    assert arrival(links, 0, 2, 1000, 5.0) == pytest.approx(6.5)
    assert arrival(links, 0, 2, 1000, 10.0) == pytest.approx(21.5)
    assert arrival(links, 2, 0, 1000, 12.0) == pytest.approx(21.5)
    assert arrival(links, 0, 1, 1000, 12.0) == pytest.approx(13.5)
    assert arrival(links, 2, 3, 1000, 12.0) == pytest.approx(13.5)
    assert arrival(links, 0, 2, 1000, 19.9) == pytest.approx(22.5)
    assert arrival(links, 0, 2, 1000, 30.0) == pytest.approx(31.5)


def test_each_further_segment_has_a_header() -> None:
    links = network(up_kbit_s=8, segment_bytes=500, segment_overhead_bytes=100)
    assert arrival(links, 0, 1, 999, 0.0) == pytest.approx(1.099)


def test_events_of_an_instant_happen_in_the_order_in_which_they_were_added() -> None:
    random = Random(0)
    agenda: Agenda[int] = Agenda()
    left: list[tuple[float, int]] = []
    now = 0.0
    for number in range(2000):
        # At this instant, later, and now and then earlier.
        time_s = now + random.choice([0.0, 0.0, 0.5, 1.0, -0.5])
        agenda.add(time_s, number)
        left.append((time_s, number))
        while left and random.random() < 0.45:
            left.sort()
            assert agenda.pop() == left[0]
            now = left.pop(0)[0]
    left.sort()
    while left:
        assert agenda.pop_stretch(0.0) == [event for event in left if event[0] == left[0][0]]
        left = [event for event in left if event[0] != left[0][0]]
    assert not agenda
