from __future__ import annotations

from peer.net.receipts import Receipts

KB = 1024


def test_a_receipt_waits_half_a_second_for_company() -> None:
    receipts = Receipts(received=3, window_bytes=64 * KB)
    assert receipts.wait_s(10.0) is None
    receipts.acknowledge(4, now=10.0)
    assert receipts.wait_s(10.25) == 0.25
    receipts.acknowledge(5, now=10.4)
    assert receipts.wait_s(10.9) == 0.0
    assert receipts.take() == 5
    assert receipts.wait_s(11.0) is None
    assert receipts.take() == 0


def test_eight_frames_or_a_quarter_of_the_window_wait_no_longer() -> None:
    receipts = Receipts(received=0, window_bytes=64 * KB)
    receipts.acknowledge(7, now=1.0)
    assert receipts.wait_s(1.0)
    receipts.acknowledge(8, now=1.0)
    assert receipts.wait_s(1.0) == 0.0
    assert receipts.take() == 8
    receipts.frame_received(16 * KB)
    receipts.acknowledge(9, now=1.0)
    assert receipts.wait_s(1.0) == 0.0
    receipts.acknowledge(8, now=2.0)
    assert receipts.take() == 9, "an older number changes nothing"
