"""One peer of an asynchronous run without I/O: whom it asks, when it asks again, and what its rows say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peer.compress.layout import Layout
from peer.errors import LocalProtocolError, RemoteProtocolError, StateError
from peer.gossip import build_pair_node
from peer.gossip.effects import Effects
from peer.node.pair_participant import EXCHANGES_SKIPPED, PairParticipant
from peer.records import RoundRecord
from tests.gossip.drive import contexts, ring, schedule_of
from tests.gossip.event_logs import next_exchange
from tests.node.local_steps import SIZES, Pull


def participants(n: int, **more: Any) -> list[PairParticipant]:
    nodes = contexts(schedule_of(ring(n)), Layout.of_sizes(SIZES), rounds=100)
    starts = np.arange(n, dtype=np.float32)[:, None] * np.ones(8, np.float32)
    return [
        PairParticipant(
            algorithm=build_pair_node("ad-psgd", node, start), local_steps=Pull(float(i)), cpu_clock=lambda: 0.0, **more
        )
        for i, (node, start) in enumerate(zip(nodes, starts, strict=True))
    ]


def deliver(peers: list[PairParticipant], sender: int, effects: Effects, now: float = 0.0) -> None:
    """Deliver what a call sends, and what that sends, until nothing is on its way."""
    waiting = [(sender, outgoing) for outgoing in effects.frames]
    while waiting:
        source, outgoing = waiting.pop(0)
        answer = peers[outgoing.receiver].receive(source, outgoing.frame, now)
        waiting.extend((outgoing.receiver, each) for each in answer.frames)


def iterate(peers: list[PairParticipant], peer: int, now: float = 0.0) -> RoundRecord:
    deliver(peers, peer, peers[peer].read(), now)
    peers[peer].compute()
    record = peers[peer].step(now).record
    assert record is not None
    return record


def test_an_iteration_reads_averages_and_steps() -> None:
    peers = participants(3)
    record = iterate(peers, 0)
    partner = next(i for i in (1, 2) if peers[i].algorithm.staleness.exchanges)
    # The gradient at what was read is 0; what was averaged meanwhile stays.
    assert np.array_equal(peers[0].model(), np.full(8, partner / 2, np.float32))
    assert (record.round, record.loss, record.rate) == (0, 1.0, 0.25)
    assert (record.exchanges, record.staleness, record.messages, record.values) == (1, 1.0, 1, 8)
    assert record.frame_bytes > record.payload_bytes > 0
    assert peers[0].round == 1


def test_whoever_is_busy_is_left_alone_and_another_is_asked_after_the_pause() -> None:
    peers = participants(3)
    first = peers[0].read().frames[0]
    # The one that is asked is in an exchange of its own; nobody answers that yet.
    peers[first.receiver].read()
    busy = peers[first.receiver].receive(0, first.frame, 1.0)
    effects = peers[0].receive(first.receiver, busy.frames[-1].frame, 1.0)
    wake_at = effects.wake_at
    assert effects.frames == []
    assert wake_at is not None
    assert 1.0 < wake_at < 1.1
    assert peers[0].timer(wake_at - 1e-4).frames == []
    (second,) = peers[0].timer(wake_at).frames
    assert second.receiver == 3 - first.receiver
    assert peers[0].open_partner == second.receiver


def test_what_has_not_come_about_by_the_step_is_dropped() -> None:
    peers = participants(3)
    first = peers[0].read().frames[0]
    peers[first.receiver].read()
    busy = peers[first.receiver].receive(0, first.frame, 1.0)
    peers[0].receive(first.receiver, busy.frames[-1].frame, 1.0)
    peers[0].compute()
    effects = peers[0].step(1.0)
    assert effects.finished == 0
    assert effects.wake_at is None
    assert peers[0].timer(10.0).frames == []
    assert peers[0].can_read


def test_a_neighbour_that_is_down_is_not_chosen() -> None:
    peers = participants(3)
    peers[0].reachable = frozenset({2})
    for _ in range(10):
        (request,) = peers[0].read().frames
        assert request.receiver == 2
        deliver(peers, 0, Effects(frames=[request]))
        peers[0].compute()
        peers[0].step(0.0)
    peers[0].reachable = frozenset()
    assert peers[0].read().frames == []


def test_a_step_before_the_reply_holds_the_next_read_back() -> None:
    peers = participants(3)
    effects = peers[0].read()
    assert effects.open_request == effects.frames[0]
    peers[0].compute()
    assert peers[0].step(0.0).open_request == effects.frames[0]
    assert not peers[0].can_read
    deliver(peers, 0, effects)
    assert peers[0].can_read
    assert peers[0].open_partner is None
    # It is repeated after a reconnect, and the answer is the same.
    before = [peer.model().copy() for peer in peers]
    deliver(peers, 0, effects)
    assert all(np.array_equal(peer.model(), x) for peer, x in zip(peers, before, strict=True))


def test_an_exchange_whose_partner_is_gone_is_given_up() -> None:
    peers = participants(3)
    effects = peers[0].read()
    peers[0].compute()
    peers[0].step(0.0)
    partner = effects.frames[0].receiver
    assert peers[0].abandon(partner).open_request is None
    assert peers[0].can_read
    assert peers[0].read(waited_s=2.5).frames
    peers[0].compute()
    record = peers[0].step(3.0).record
    assert record is not None
    assert record.wait_s == 2.5


def test_what_is_answered_after_the_last_step_is_counted_with_it() -> None:
    peers = participants(3)
    record = iterate(peers, 0)
    answered = 0
    while not answered:
        iterate(peers, 1)
        answered = peers[0].algorithm.staleness.exchanges - record.exchanges
    closing = peers[0].closing_record()
    assert closing is not None
    assert closing.exchanges == record.exchanges + answered
    assert closing.messages == record.messages + answered
    assert closing.payload_bytes > record.payload_bytes
    assert (closing.round, closing.loss, closing.staleness) == (record.round, record.loss, record.staleness)


def test_an_open_request_survives_in_the_state() -> None:
    peers = participants(3)
    iterate(peers, 0)
    effects = peers[0].read()
    peers[0].compute()
    peers[0].step(0.0)
    values, arrays = peers[0].to_checkpoint()
    again = participants(3)[0]
    assert again.restore(values, arrays).open_request == effects.open_request
    assert np.array_equal(again.local_steps.state()["kept"], peers[0].local_steps.state()["kept"])
    assert np.array_equal(again.model(), peers[0].model())
    assert again.round == 2
    # New ones can get numbers that nobody has seen.
    again.skip_exchanges()
    assert next_exchange(again.algorithm) == next_exchange(peers[0].algorithm) + EXCHANGES_SKIPPED
    peers[0] = again
    deliver(peers, 0, Effects(frames=[effects.frames[0]]))
    assert again.algorithm.staleness.exchanges == 2


def test_a_state_in_flux_or_of_another_model_is_refused() -> None:
    peers = participants(3)
    values, arrays = peers[0].to_checkpoint()
    peers[0].read()
    with pytest.raises(LocalProtocolError, match="flux"):
        peers[0].to_checkpoint()
    with pytest.raises(StateError, match="another shape"):
        peers[1].restore({**values, "layout": "another"}, arrays)
    with pytest.raises(StateError, match="does not fit"):
        peers[1].restore(values, {name: value for name, value in arrays.items() if name != "algorithm/x"})


def test_frames_in_the_name_of_others_are_refused() -> None:
    peers = participants(3)
    (request,) = peers[0].read().frames
    liar = 3 - request.receiver
    with pytest.raises(RemoteProtocolError, match=f"peer {liar}: sent a frame in the name of peer 0"):
        peers[request.receiver].receive(liar, request.frame, 0.0)
    with pytest.raises(RemoteProtocolError, match="peer 1"):
        peers[0].receive(1, request.frame[:-1], 0.0)


def test_calls_out_of_order_are_refused() -> None:
    peers = participants(3)
    with pytest.raises(LocalProtocolError, match="computed at what was read"):
        peers[0].compute()
    with pytest.raises(LocalProtocolError, match="needs a gradient"):
        peers[0].step(0.0)
