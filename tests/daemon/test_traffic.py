"""The accounts of links: rounds add up to totals, and totals outlive the process."""

from __future__ import annotations

from peer.daemon.traffic import Traffic
from peer.gossip.effects import OutgoingFrame
from peer.net.counters import LinkCounters
from peer.state.metrics import LinkRecord


def counted(num_bytes: int, *, connections: int = 1, kernel: bool = True) -> LinkCounters:
    return LinkCounters(
        frames_sent=num_bytes // 100,
        frame_bytes_sent=num_bytes,
        protobuf_bytes_sent=num_bytes + 10,
        socket_bytes_sent=num_bytes + 50 if kernel else None,
        packet_bytes_sent=num_bytes + 90 if kernel else None,
        connections=connections,
    )


def hand_over(traffic: Traffic, peer: int, num_bytes: int, *, entropy_bits: float = 0.0) -> None:
    frame = OutgoingFrame(
        receiver=peer,
        frame=bytes(num_bytes),
        payload_bytes=num_bytes - 20,
        values=1000,
        entropy_bits=entropy_bits,
    )
    traffic.handed_over(frame)


def test_a_round_holds_what_was_handed_over_and_what_left_since_the_last_one() -> None:
    traffic = Traffic(0)
    hand_over(traffic, 1, 300, entropy_bits=2000.0)
    first = traffic.close_round(0, {1: counted(300), 2: LinkCounters()})
    hand_over(traffic, 1, 200)
    second = traffic.close_round(1, {1: counted(500), 2: counted(0)})
    one, other = first
    assert (one.round, one.values, one.payload_bytes, one.frame_bytes, one.entropy_bits) == (0, 1000, 280, 300, 2000.0)
    assert (one.protobuf_bytes, one.socket_bytes) == (310, 350)
    assert (other.neighbor, other.payload_bytes, other.socket_bytes) == (2, 0, 0)
    one, other = second
    assert (one.values, one.payload_bytes, one.protobuf_bytes, one.socket_bytes) == (1000, 180, 200, 200)
    assert (other.protobuf_bytes, other.socket_bytes) == (10, 50)


def test_the_entropy_bound_is_that_of_the_messages_of_which_it_was_taken() -> None:
    traffic = Traffic(0)
    assert traffic.described(1) == {"values": 0, "bits_per_value": None, "entropy_bits_per_value": None}
    hand_over(traffic, 1, 320, entropy_bits=2000.0)
    hand_over(traffic, 1, 420)
    assert traffic.described(1) == {"values": 2000, "bits_per_value": 2.8, "entropy_bits_per_value": 2.0}


def test_totals_go_on_where_the_last_process_ended() -> None:
    first = Traffic(0)
    hand_over(first, 1, 300)
    before = first.total(1, counted(300), up=True)
    assert before == LinkRecord(
        peer=0,
        neighbor=1,
        frames=3,
        payload_bytes=280,
        frame_bytes=300,
        protobuf_bytes=310,
        socket_bytes=350,
        packet_bytes=390,
        up=True,
    )
    again = Traffic(0, [before, LinkRecord(peer=0, neighbor=7, frames=99)])
    # Not connected yet: nothing went over the link since, which is known.
    assert again.total(1, LinkCounters(), up=False).socket_bytes == 350
    hand_over(again, 1, 200)
    total = again.total(1, counted(200), up=True)
    assert (total.frames, total.payload_bytes, total.frame_bytes, total.protobuf_bytes) == (5, 460, 500, 520)
    assert (total.socket_bytes, total.packet_bytes) == (600, 680)
    assert again.payload_bytes == 460


def test_offences_of_earlier_processes_count() -> None:
    before = Traffic(0).total(1, LinkCounters(), up=True, offences=2, last_offence="its checksum is wrong")
    again = Traffic(0, [before])
    total = again.total(1, LinkCounters(), up=True)
    assert (total.offences, total.last_offence) == (2, "its checksum is wrong")
    total = again.total(1, LinkCounters(), up=True, offences=1, last_offence="it floods this peer")
    assert (total.offences, total.last_offence) == (3, "it floods this peer")


def test_half_of_a_total_is_no_total() -> None:
    traffic = Traffic(0)
    record = traffic.total(1, counted(300, kernel=False), up=True)
    assert (record.frame_bytes, record.socket_bytes, record.packet_bytes) == (300, None, None)
    again = Traffic(0, [record])
    assert again.total(1, counted(300), up=True).socket_bytes is None
    assert traffic.close_round(0, {1: counted(300, kernel=False)})[0].socket_bytes is None
