from __future__ import annotations

from peer.net.liveness import Liveness


def liveness(**changes: float) -> Liveness:
    times = {"heartbeat_s": 1.0, "their_heartbeat_s": 2.0, "chunk_bytes": 40_960} | changes
    return Liveness(
        heartbeat_s=times["heartbeat_s"], their_heartbeat_s=times["their_heartbeat_s"],
        chunk_bytes=int(times["chunk_bytes"]), now=0.0,
    )  # fmt: skip


def test_three_silent_intervals_of_the_slower_end_are_too_long() -> None:
    live = liveness()
    assert live.verdict(6.0) is None
    assert live.verdict(6.1) == "nothing was heard for 6 s"
    live.received(6.0)
    assert live.verdict(12.0) is None


def test_we_speak_up_at_our_own_pace() -> None:
    live = liveness()
    assert not live.needs_heartbeat(0.9)
    assert live.needs_heartbeat(1.0)
    live.sent(1.0)
    assert not live.needs_heartbeat(1.9)


def test_bytes_of_a_message_under_way_are_a_sign_of_life_for_a_while() -> None:
    live = liveness()
    for second in range(1, 16):
        live.socket_received(1000 * second, float(second))
        assert live.verdict(float(second)) is None
    # 6 s of silence are allowed, and 10 s for 40 kB.
    live.socket_received(17_000, 17.0)
    assert live.verdict(17.0) == "one message took longer than 16 s"


def test_bytes_that_do_not_grow_are_silence() -> None:
    live = liveness()
    for second in range(1, 7):
        live.socket_received(1000, float(second))
    live.socket_received(None, 6.5)
    assert live.verdict(6.5) == "nothing was heard for 6 s"
