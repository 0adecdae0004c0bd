"""The session: which message belongs to which round, and what going on without a neighbour means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from peer import compress
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.base import Algorithm, AlgorithmSpec, Exchange, GraphNeed, Metrics, NodeContext
from peer.gossip.late_neighbors import LatePolicy
from peer.gossip.session import Session
from peer.gossip.topology import build_schedule
from peer.random import PhiloxSource
from peer.wire.message import Message, MessageKind


class Recorder(Algorithm):
    """Sends to peer 2, hears 0 and 1, and writes down what it is given."""

    spec = AlgorithmSpec(
        name="recorder", summary="", source="", graph=GraphNeed.COLUMN, tolerates_late=True, may_send_nothing=True
    )
    phases = 1

    def __init__(self) -> None:
        node = NodeContext(
            peer=3,
            schedule=build_schedule(4, "complete"),
            layout=Layout.of_sizes([1]),
            draw_source=PhiloxSource(0, 3),
            compressor=compress.build("none"),
        )
        super().__init__(node, np.zeros(1))
        self.log: list[str] = []
        self._phase = 0

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        self.log.append(f"begin {t}")
        self._phase = 0
        return Exchange({2: message(3, t)}, frozenset({0, 1}))

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        self.log.append(f"advance {sorted(inbox)}")
        self._phase += 1
        return None if self._phase == self.phases else Exchange({}, frozenset({1}), phase=self._phase)

    def absorb_late(self, late: Message) -> None:
        self.log.append(f"late {late.round} of {late.sender}")

    def answer(self, request: Message) -> Message:
        return message(3, request.round, kind=MessageKind.REPAIR)

    def metrics(self) -> Metrics:
        return Metrics()


def message(sender: int, round_: int, phase: int = 0, kind: MessageKind = MessageKind.GOSSIP) -> Message:
    return Message(kind, sender, round_, phase)


def session(algorithm: Recorder, *, late: LatePolicy | None = None, max_lead: int = 3) -> Session:
    return Session(algorithm, in_neighbors=(0, 1), max_lead=max_lead, late=late)


G = np.zeros(1)


def test_a_round_is_complete_when_every_neighbor_was_heard() -> None:
    algorithm = Recorder()
    s = session(algorithm)
    effects = s.begin(G, 0.1, now=0.0)
    assert [receiver for receiver, _ in effects.sends] == [2]
    assert effects.finished is None
    assert s.receive(message(1, 0), 1.0).finished is None
    assert s.waiting_for == (0,)
    assert s.receive(message(0, 0), 2.0).finished == 0
    assert algorithm.log == ["begin 0", "advance [0, 1]"]
    assert s.round == 1


def test_messages_that_come_early_wait_for_their_round() -> None:
    algorithm = Recorder()
    s = session(algorithm)
    for sender in (0, 1):
        for round_ in (0, 1):
            s.receive(message(sender, round_), 0.0)
    assert s.begin(G, 0.1, 1.0).finished == 0
    assert s.inbox.unconsumed_counts() == {0: 1, 1: 1}
    assert s.begin(G, 0.1, 2.0).finished == 1
    assert s.inbox.unconsumed_counts() == {}


def test_a_message_counts_once_however_often_it_comes() -> None:
    algorithm = Recorder()
    s = session(algorithm)
    s.begin(G, 0.1, 0.0)
    assert s.receive(message(0, 0), 0.0).duplicates == 0
    assert s.receive(message(0, 0), 0.0).duplicates == 1
    s.receive(message(1, 0), 0.0)
    assert s.receive(message(0, 0), 0.0).duplicates == 1
    assert algorithm.log.count("advance [0, 1]") == 1


def test_the_phases_of_a_round_are_kept_apart() -> None:
    algorithm = Recorder()
    algorithm.phases = 2
    s = session(algorithm)
    s.begin(G, 0.1, 0.0)
    s.receive(message(1, 0, phase=1), 0.0)
    s.receive(message(0, 0), 0.0)
    assert s.receive(message(1, 0), 0.0).finished == 0
    assert algorithm.log == ["begin 0", "advance [0, 1]", "advance [1]"]


def test_a_sender_with_nothing_to_give_completes_the_round_too() -> None:
    algorithm = Recorder()
    s = session(algorithm)
    s.begin(G, 0.1, 0.0)
    s.receive(message(0, 0, kind=MessageKind.NOTHING), 0.0)
    assert s.receive(message(1, 0), 0.0).finished == 0
    assert algorithm.log[-1] == "advance [1]"


def test_a_late_neighbor_is_skipped_and_its_message_applied_between_rounds() -> None:
    algorithm = Recorder()
    s = session(algorithm, late=LatePolicy(after_s=1.0, max_skipped=5))
    s.begin(G, 0.1, 0.0)
    assert s.receive(message(0, 0), 0.1).wake_at == 1.0
    assert s.timer(0.9).finished is None
    effects = s.timer(1.0)
    assert (effects.finished, effects.skipped) == (0, (1,))
    s.receive(message(1, 0), 1.5)
    s.begin(G, 0.1, 2.0)
    assert algorithm.log == ["begin 0", "advance [0]", "late 0 of 1", "begin 1"]


def test_who_still_owes_a_round_is_late_in_the_next_one_without_waiting() -> None:
    algorithm = Recorder()
    s = session(algorithm, late=LatePolicy(after_s=1.0, max_skipped=5))
    s.begin(G, 0.1, 0.0)
    s.receive(message(0, 0), 0.0)
    s.timer(1.0)
    s.begin(G, 0.1, 1.0)
    effects = s.receive(message(0, 1), 1.0)
    assert (effects.finished, effects.skipped) == (1, (1,))
    # Both come now; they are applied in the order of their rounds.
    s.receive(message(1, 0), 1.1)
    s.receive(message(1, 1), 1.1)
    s.absorb_late()
    assert algorithm.log[-2:] == ["late 0 of 1", "late 1 of 1"]


def test_a_message_behind_a_late_one_is_not_applied_before_it() -> None:
    algorithm = Recorder()
    s = session(algorithm, late=LatePolicy(after_s=1.0, max_skipped=5))
    s.begin(G, 0.1, 0.0)
    s.receive(message(0, 0), 0.0)
    s.timer(1.0)
    s.begin(G, 0.1, 1.0)
    s.receive(message(1, 0), 1.1)
    s.receive(message(1, 1), 1.1)
    # Round 1 goes without peer 1 although its message is here: the replica needs the difference of round 0 first.
    assert s.receive(message(0, 1), 1.2).skipped == (1,)
    s.absorb_late()
    assert algorithm.log == ["begin 0", "advance [0]", "begin 1", "advance [0]", "late 0 of 1", "late 1 of 1"]


def test_a_neighbor_that_was_always_punctual_is_given_up_long_before_the_limit() -> None:
    s = session(Recorder(), late=LatePolicy(after_s=2.0, max_skipped=5, adaptive=True), max_lead=9)
    for round_ in range(10):
        now = 10.0 * round_
        s.begin(G, 0.1, now)
        s.receive(message(0, round_), now + 0.001)
        assert s.receive(message(1, round_), now + 0.4).finished == round_
    s.begin(G, 0.1, 100.0)
    # Peer 0 comes at once, as ever; of peer 1 it is known that it takes 0.4 s.
    assert s.receive(message(0, 10), 100.001).wake_at == pytest.approx(100.45)
    assert s.timer(100.44).finished is None
    assert s.timer(100.45).skipped == (1,)
    # What came too late says how late it was, once.
    s.receive(message(1, 10), 101.5)
    assert s.late_neighbors.deadlines is not None
    assert s.late_neighbors.deadlines.lateness_s(1) == pytest.approx(0.4)
    assert s.receive(message(1, 10), 109.0).duplicates == 1
    # Where the punctual one is missing, its own short deadline counts.
    s.begin(G, 0.1, 110.0)
    assert s.receive(message(1, 11), 110.02).wake_at == pytest.approx(110.06, abs=0.01)


def test_nothing_is_kept_of_rounds_that_nobody_owes() -> None:
    s = session(Recorder(), late=LatePolicy(after_s=1.0, max_skipped=5, adaptive=True), max_lead=9)
    for round_ in range(3):
        s.begin(G, 0.1, float(round_))
        s.receive(message(0, round_), round_ + 0.1)
        s.receive(message(1, round_), round_ + 0.2)
    assert not s.state().late.began_at


def test_the_beginning_of_a_round_is_kept_until_the_last_late_message_of_it_has_come() -> None:
    s = session(Recorder(), late=LatePolicy(after_s=1.0, max_skipped=5, adaptive=True), max_lead=9)
    s.begin(G, 0.1, 0.0)
    s.timer(1.0)
    s.receive(message(0, 0), 1.5)
    assert s.late_neighbors.deadlines is not None
    assert s.late_neighbors.deadlines.lateness_s(0) == 1.5
    s.absorb_late()
    assert s.state().late.began_at == {0: 0.0}
    s.receive(message(1, 0), 1.75)
    s.absorb_late()
    assert not s.state().late.began_at


def test_after_too_many_rounds_without_it_a_neighbor_is_waited_for() -> None:
    algorithm = Recorder()
    s = session(algorithm, late=LatePolicy(after_s=1.0, max_skipped=2), max_lead=9)
    now = 0.0
    for round_ in range(2):
        s.begin(G, 0.1, now)
        s.receive(message(0, round_), now)
        now += 1.0
        assert round_ > 0 or s.timer(now).finished == 0
    s.begin(G, 0.1, now)
    # There is no time at which to go on: a driver that set its timer to one would never rest.
    assert s.receive(message(0, 2), now).wake_at is None
    assert s.timer(now + 100.0).finished is None
    assert s.waiting_for == (1,)
    for round_ in range(3):
        effects = s.receive(message(1, round_), now + 101.0)
    assert effects.finished == 2


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (message(2, 0), "no in-neighbour"),
        (message(0, 5), "more than 3 ahead"),
        (message(0, 0, kind=MessageKind.PAIR_REQUEST), "synchronous run"),
        (message(0, 1, kind=MessageKind.REPAIR_REQUEST), "not sent yet"),
    ],
)
def test_what_an_honest_peer_would_not_send_is_refused(wrong: Message, text: str) -> None:
    s = session(Recorder())
    s.begin(G, 0.1, 0.0)
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        s.receive(wrong, 0.0)
    assert caught.value.peer == wrong.sender
    assert s.waiting_for == (0, 1)


def test_nobody_may_be_left_out_where_others_keep_a_replica() -> None:
    class Keeper(Recorder):
        spec = AlgorithmSpec(name="keeper", summary="", source="", graph=GraphNeed.COLUMN)

    s = session(Keeper())
    s.begin(G, 0.1, 0.0)
    with pytest.raises(RemoteProtocolError, match="keeper forbids"):
        s.receive(message(0, 0, kind=MessageKind.NOTHING), 0.0)


def test_a_request_is_answered_in_the_middle_of_a_round() -> None:
    s = session(Recorder())
    s.begin(G, 0.1, 0.0)
    [(receiver, answer)] = s.receive(message(0, 0, kind=MessageKind.REPAIR_REQUEST), 0.0).sends
    assert (receiver, answer.kind) == (0, MessageKind.REPAIR)


def test_the_state_between_rounds_carries_over_what_is_owed() -> None:
    policy = LatePolicy(after_s=1.0, max_skipped=5)
    first = session(Recorder(), late=policy)
    first.begin(G, 0.1, 0.0)
    with pytest.raises(LocalProtocolError, match="between rounds"):
        first.state()
    first.receive(message(0, 0), 0.0)
    first.timer(1.0)
    algorithm = Recorder()
    second = session(algorithm, late=policy)
    second.restore(first.state())
    second.receive(message(1, 0), 2.0)
    second.begin(G, 0.1, 2.0)
    assert algorithm.log == ["late 0 of 1", "begin 1"]


def test_skipping_needs_an_algorithm_that_can() -> None:
    class Strict(Recorder):
        spec = AlgorithmSpec(name="strict", summary="", source="", graph=GraphNeed.DOUBLY)

    with pytest.raises(LocalProtocolError, match="strict"):
        session(Strict(), late=LatePolicy(after_s=1.0, max_skipped=1))


def test_who_left_us_out_of_a_round_that_went_on_without_it_has_nothing_to_be_absorbed() -> None:
    algorithm = Recorder()
    s = session(algorithm, late=LatePolicy(after_s=1.0, max_skipped=5))
    s.begin(G, 0.1, 0.0)
    s.receive(message(0, 0), 0.0)
    s.timer(1.0)
    s.begin(G, 0.1, 1.0)
    s.receive(message(1, 0), 1.1)
    # It waits behind a message that is late.
    s.receive(message(1, 1, kind=MessageKind.NOTHING), 1.1)
    s.receive(message(0, 1), 1.2)
    s.absorb_late()
    assert algorithm.log[-1] == "late 0 of 1"
    s.begin(G, 0.1, 2.0)
    s.receive(message(0, 2), 2.0)
    # Its record lists what was applied since the round before.
    assert s.receive(message(1, 2), 2.0).applied == ((0, 1), (2, 0), (2, 1))


class Weighted(Recorder):
    """Has a push-sum weight of the test's choice."""

    spec = replace(Recorder.spec, push_sum=True)


def test_who_has_less_weight_than_usual_gives_none_while_it_is_owed_messages() -> None:
    algorithm, policy = Weighted(), LatePolicy(after_s=1.0, max_skipped=1000)
    s = session(algorithm, late=policy, max_lead=1000)

    def round_with(u: float, *heard: int) -> frozenset[int]:
        algorithm.u = u
        t = s.round
        s.begin(G, 0.1, 2.0 * t)
        for sender in heard:
            s.receive(message(sender, t), 2.0 * t)
        s.timer(2.0 * t + 1.5)
        assert s.round == t + 1
        return algorithm.left_out

    assert round_with(0.5, 0, 1) == frozenset()
    assert round_with(0.95, 0) == frozenset()
    everyone = {0, 1, 2}
    assert round_with(0.8, 0) == everyone
    assert round_with(0.95, 0) == frozenset()
    # What is less for long is the usual weight after a while: who lost something for good gives again.
    given = [round_with(0.7, 0) == frozenset() for _ in range(100)]
    assert not given[0]
    assert given[-1]
    again = session(Weighted(), late=policy, max_lead=1000)
    again.restore(s.state())
    assert again.state() == s.state()
