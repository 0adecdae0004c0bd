"""All-reduce of compressed sums: one model to the bit, nothing forgotten whoever is lost, lies that change nothing."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from peer.compress.decompress import decompress_layers
from peer.compress.float_types import floats_of
from peer.compress.layout import Layout
from peer.compress.payload import Dense, Residues, Rounding, Sparse, ValueType
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip import build
from peer.gossip.membership import Membership
from peer.gossip.topology import build_schedule
from peer.gossip.views import ViewSchedule
from peer.train.momentum import Momentum
from peer.wire.message import MessageKind
from tests.gossip import drive
from tests.gossip.drive import NESTEROV, carry_for, contexts, expect_momentum_on_the_mean, gossip

LAYOUT = Layout.of_sizes([7, 120, 1, 60, 12])
EPSILON = 2.0**-24
"""The largest relative error of one operation in float32."""
SPREAD = 2.0
gradients_of = partial(drive.gradients_of, spread=SPREAD)
TOP_K = "top_k", {"fraction": 0.1, "value_bits": 2, "four_levels": True}
COMPRESSORS = [
    TOP_K,
    ("top_k", {"fraction": 0.1}),
    ("random_k", {"fraction": 0.2, "value_bits": 4}),
    ("qsgd", {"bits": 3, "unbiased": False}),
    ("sign", {}),
    ("none", {"value_type": "bfloat16"}),
]


def peers(n=4, *, compressor=TOP_K, layout=LAYOUT, momentum=None, dtype=np.float32, **more):
    rule = {} if momentum is None else {"momentum": partial(Momentum, **momentum)}
    schedules = [
        ViewSchedule(n, Membership(tuple(range(n))), lambda _: build_schedule(n, "complete")) for _ in range(n)
    ]
    x0 = np.random.default_rng(1).normal(size=layout.size).astype(dtype)
    nodes = [contexts(each, layout, compressor=compressor, **rule, **more)[peer] for peer, each in enumerate(schedules)]
    return [build("compressed-allreduce", node, x0) for node in nodes]


def memories(algorithms):
    return sum(floats_of(a.error_memory).astype(np.float64) for a in algorithms)


def tolerance(algorithms, gradients):
    """Each number is rounded where the gradient, each contribution and what was told come to it and leave it, and where
    x moves: at numbers no larger than the sums of all."""
    n = len(algorithms)
    largest = sum(np.abs(floats_of(a.error_memory)).max() for a in algorithms) + sum(np.abs(g).max() for g in gradients)
    return n * (2 * n + 4) * EPSILON * (largest + np.abs(algorithms[0].x).max())


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("momentum", [None, {"kind": "nesterov", "weight_decay": 0.01}, {"kind": "adam"}])
def test_all_peers_hold_one_model_to_the_bit(n, momentum):
    algorithms = peers(n, momentum=momentum)
    for t in range(9):
        gossip(algorithms, t, gradients_of(algorithms, t), 0.05, carry_for(algorithms))
        states = [{k: v.tobytes() for k, v in a.state().items() if k != "error_memory"} for a in algorithms]
        assert all(state == states[0] for state in states)


@pytest.mark.parametrize("in_bfloat16", [False, True])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda each: f"{each[0]} {each[1]}")
def test_what_was_told_and_what_is_kept_is_all_there_was(compressor, in_bfloat16):
    """Σ_j E_j + n U = Σ_j (E_j + g_j) in every round, to the rounding of the float type, and of the memories: once with
    the gradient in it, once without what was sent or told. Rounding is 0 in the mean."""
    algorithms, off = peers(5, compressor=compressor, whole_below=4, in_bfloat16=in_bfloat16), []
    for t in range(30):
        gradients = gradients_of(algorithms, t)
        room, had, x = tolerance(algorithms, gradients), memories(algorithms) + sum(map(np.float64, gradients)), None
        x = algorithms[0].x.astype(np.float64)
        had_each = [floats_of(a.error_memory) + g for a, g in zip(algorithms, gradients, strict=True)]
        gossip(algorithms, t, gradients, 1.0, carry_for(algorithms))
        if in_bfloat16:
            rounded = [*had_each, *(floats_of(a.error_memory) for a in algorithms)]
            room = room + 2.0**-7 * sum(map(np.abs, rounded))
        off.append((memories(algorithms) + 5 * (x - algorithms[0].x) - had) / room)
    assert np.abs(off).max() <= 1.0
    assert abs(np.mean(off)) < 0.02


@pytest.mark.parametrize("heard", [(), (0,), (0, 2), (0, 1, 2, 4)])
@pytest.mark.parametrize("told", [False, True])
def test_nothing_is_forgotten_where_a_peer_is_lost_in_a_round(heard, told):
    """Some owners heard the contribution of peer 3; and all or none the sum that it told."""
    algorithms = peers(5)
    for t in range(3):
        gossip(algorithms, t, gradients_of(algorithms, t), 0.1)
    gradients = gradients_of(algorithms, 3)
    lost, others = algorithms[3], [a for a in algorithms if a.node.peer != 3]
    rest = [gradients[a.node.peer] for a in others]
    had, x = memories(others) + sum(map(np.float64, rest)), others[0].x.astype(np.float64)
    room = tolerance(algorithms, gradients)
    begun = {a.node.peer: a.begin(3, g, 1.0) for a, g in zip(algorithms, gradients, strict=True)}
    sums = {}
    for a in algorithms:
        me = a.node.peer
        inbox = {j: begun[j].sends[me] for j in begun[me].awaits if j != 3 or me in heard}
        sums[me] = a.advance(inbox)
    for a in others:
        inbox = {j: sums[j].sends[a.node.peer] for j in sums[a.node.peer].awaits if j != 3 or told}
        assert a.advance(inbox) is None
    assert len({a.x.tobytes() for a in others}) == 1
    moved, expected = (x - others[0].x), had
    for owner in range(5):
        part = lost._shares(3).parts[owner].numbers
        counted = 5 if owner in heard or (owner == 3 and told) else 4
        moved[part] *= counted
        if owner in heard:
            payload = lost._contributions[owner]
            expected[part] += decompress_layers(payload, lost._shares(3).parts[owner].layout, np.float64)
    if told:
        # What the lost owner kept, and what it contributed itself, went with it.
        part = lost._shares(3).parts[3].numbers
        expected[part] += (gradients[3].astype(np.float64) + before_of(lost, gradients[3]))[part]
        moved[part] += lost.error_memory[part]
    assert np.abs(memories(others) + moved - expected).max() <= room


def before_of(lost, gradient):
    """Return the error memory with which the lost peer began the round."""
    again = peers(5)
    for t in range(3):
        gossip(again, t, gradients_of(again, t), 0.1)
    return again[lost.node.peer].error_memory.astype(np.float64)


@pytest.mark.parametrize("phase", [0, 1])
def test_what_a_peer_had_sent_before_a_crash_is_what_counts(phase):
    """Where arithmetic is not repeatable, the others have other numbers than those that come out again."""
    algorithms = peers(4)
    gradients = gradients_of(algorithms, 0)
    sent = [
        Dense(np.full(size, 0.5, np.float32), ValueType.FLOAT32)
        for size in algorithms[0]._shares(0).parts[2 - 2 * phase].pieces
    ]
    algorithms[0].node.imposed_parts[0, phase, 2] = tuple(sent)
    had, x = sum(map(np.float64, gradients)), algorithms[0].x.astype(np.float64)
    gossip(algorithms, 0, gradients, 1.0, carry_for(algorithms))
    assert not algorithms[0].node.imposed_parts
    assert len({a.x.tobytes() for a in algorithms}) == 1
    if phase:
        part = algorithms[0]._shares(0).parts[0].numbers
        np.testing.assert_allclose((x - algorithms[0].x)[part], 0.5 / 4, atol=1e-6)
    difference = memories(algorithms) + 4 * (x - algorithms[0].x) - had
    assert np.abs(difference).max() <= tolerance(algorithms, gradients)


def test_without_compression_it_is_all_reduce_with_momentum_on_the_mean():
    algorithms = peers(3, compressor="none", momentum=NESTEROV, dtype=np.float64)
    expect_momentum_on_the_mean(algorithms, atol=1e-12, spread=SPREAD)
    assert not any(a.error_memory.any() for a in algorithms)


def test_what_a_round_leaves_out_comes_later():
    """With one gradient for ever, the sum of all updates is that of all gradients, but for a memory that stays."""
    algorithms = peers(3)
    gradients = gradients_of(algorithms, 0)
    mean, start, kept = np.mean(gradients, axis=0, dtype=np.float64), algorithms[0].x.astype(np.float64), []
    for t in range(200):
        gossip(algorithms, t, gradients, 1.0)
        kept.append(float(np.linalg.norm(memories(algorithms) / 3)))
    moved = (start - algorithms[0].x) / 200
    assert np.linalg.norm(moved - mean) < 0.1 * np.linalg.norm(mean)
    assert max(kept[150:]) < 1.2 * max(kept[50:150])


def test_no_two_pieces_are_rounded_by_the_same_numbers():
    """Else what is left out of one would be left out of all of them."""
    algorithms = peers(4, compressor=("qsgd", {"bits": 2, "unbiased": False}), layout=Layout.of_sizes([400]))
    same = np.tile(np.random.default_rng(3).normal(size=100).astype(np.float32), 4)
    exchange = algorithms[0].begin(0, same, 0.1)
    codes = {tuple(message.layers[0].codes.tolist()) for message in exchange.sends.values()}
    assert len(codes) == 3


@pytest.mark.parametrize(("sizes", "n"), [([1], 3), ([2, 3], 8), ([99], 4)])
def test_members_without_a_part_of_the_numbers_own_nothing(sizes, n):
    algorithms = peers(n, layout=Layout.of_sizes(sizes))
    for t in range(4):
        gossip(algorithms, t, gradients_of(algorithms, t), 0.1, carry_for(algorithms))
    assert len({a.x.tobytes() for a in algorithms}) == 1


@pytest.mark.parametrize("phase", [0, 1])
def test_messages_that_cannot_be_used_are_refused_before_anything_changes(phase):
    algorithms = peers(3)
    exchanges = [a.begin(0, g, 0.1) for a, g in zip(algorithms, gradients_of(algorithms, 0), strict=True)]
    if phase:
        inboxes = [{j: exchanges[j].sends[i] for j in exchanges[i].awaits} for i in range(3)]
        exchanges = [a.advance(inbox) for a, inbox in zip(algorithms, inboxes, strict=True)]
    receiver, inbox = algorithms[0], {j: exchanges[j].sends[0] for j in (1, 2)}
    good = inbox[2]
    first, *rest = good.layers
    assert isinstance(first, Sparse)
    before = {key: np.array(value) for key, value in receiver.state().items()}
    residues = Residues(1.0, 4, Rounding.NEAREST, np.zeros(first.size, np.uint8), None)
    longer = dataclasses.replace(first, size=first.size + 1)
    for lie in (
        dataclasses.replace(good, kind=MessageKind.GOSSIP),
        dataclasses.replace(good, layers=()),
        dataclasses.replace(good, layers=tuple(rest)),
        dataclasses.replace(good, layers=(*good.layers, first)),
        dataclasses.replace(good, layers=(longer, *rest)),
        dataclasses.replace(good, layers=(residues, *rest)),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            receiver.advance({**inbox, 2: lie})
        assert caught.value.peer == 2
        assert all(before[key].tobytes() == value.tobytes() for key, value in receiver.state().items())
    with pytest.raises(LocalProtocolError, match="took"):
        receiver.advance({**inbox, 2: dataclasses.replace(good, phase=1 - phase)})
    receiver.advance(inbox)
