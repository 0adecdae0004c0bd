"""What leaves a peer is encoded once and counted for every receiver."""

from __future__ import annotations

import numpy as np
import pytest

from peer.compress.layout import Layout
from peer.errors import RemoteProtocolError
from peer.gossip.effects import Send
from peer.gossip.mixing import whole
from peer.node.frame_account import FrameAccount, decode_from
from peer.records import RoundRecord
from peer.wire.message import Message, MessageKind, RepairWish

LAYOUT = Layout.of_sizes([3, 5])
PAYLOAD = whole(np.arange(8, dtype=np.float32), LAYOUT)


def account(*times: float) -> FrameAccount:
    ticks = iter(times)
    return FrameAccount(LAYOUT, cpu_clock=lambda: 0.0, stopwatch=lambda: next(ticks))


def gossip(weight: float = 0.5, round_: int = 0) -> Message:
    return Message(MessageKind.GOSSIP, 0, round_, mixing_weight=weight, layers=PAYLOAD)


def test_receivers_of_the_same_payload_get_the_same_bytes_and_each_is_counted() -> None:
    figures = account()
    one, two, three = figures.encode([Send(1, gossip()), Send(2, gossip()), Send(3, gossip(weight=0.25))])
    assert one.frame is two.frame
    assert one.frame != three.frame
    assert (one.receiver, two.receiver, three.receiver) == (1, 2, 3)
    assert one.is_numbered
    record = figures.added_to(RoundRecord(peer=0, round=0, time_s=0.0))
    assert (record.messages, record.values) == (3, 24)
    assert record.frame_bytes == 2 * len(one.frame) + len(three.frame)
    assert record.payload_bytes == 3 * one.payload_bytes > 0
    assert record.entropy_bits == 3 * one.entropy_bits > 0


def test_frames_of_a_packed_run_are_written_without_entropy_coding() -> None:
    layout = Layout.of_sizes([2000])
    message = Message(MessageKind.GOSSIP, 0, 0, layers=whole(np.ones(2000, np.float32), layout))
    (short,) = FrameAccount(layout).encode([Send(1, message)])
    (long,) = FrameAccount(layout, packed=True).encode([Send(1, message)])
    assert len(short.frame) < 4 * 2000 <= len(long.frame)
    assert long.payload_bytes > 4 * 2000


def test_requests_are_outside_the_sequence_and_describe_no_values() -> None:
    request = Message(MessageKind.REPAIR_REQUEST, 0, 7, wanted=(RepairWish(1, 0, 0),))
    (outgoing,) = account().encode([Send(1, request)])
    assert (outgoing.is_numbered, outgoing.values, outgoing.seq) == (False, 0, 0)


def test_the_entropy_bound_is_taken_now_and_then() -> None:
    figures = account()
    bounds = [figures.encode([Send(1, gossip(round_=t))])[0].entropy_bits for t in (0, 1, 49, 50)]
    assert [bound > 0 for bound in bounds] == [True, False, False, True]
    assert figures.encode([Send(1, gossip(round_=1))], entropy_round=100)[0].entropy_bits > 0


def test_figures_go_into_one_record() -> None:
    figures = account(1.0, 3.0, 10.0, 10.5)
    with figures.training():
        pass
    with figures.gossiping():
        figures.waited(4.0)
    figures.exchanged()
    figures.notice(2, b"notice")
    record = figures.added_to(RoundRecord(peer=0, round=0, time_s=0.0, frame_bytes=1))
    assert (record.train_s, record.gossip_s, record.wait_s, record.exchanges) == (2.0, 0.5, 4.0, 1)
    assert (record.messages, record.frame_bytes) == (1, 7)
    empty = RoundRecord(peer=0, round=1, time_s=0.0)
    assert figures.added_to(empty) == empty


def test_a_frame_names_its_neighbour_in_whatever_is_wrong_with_it() -> None:
    (outgoing,) = account().encode([Send(1, gossip())])
    assert decode_from(0, outgoing.frame, LAYOUT, np.float32).layers[0].values.tolist() == [0.0, 1.0, 2.0]  # type: ignore[union-attr]
    for wrong, sender in ((outgoing.frame, 2), (outgoing.frame[:-1], 0)):
        with pytest.raises(RemoteProtocolError) as caught:
            decode_from(sender, wrong, LAYOUT, np.float32)
        assert caught.value.peer == sender
