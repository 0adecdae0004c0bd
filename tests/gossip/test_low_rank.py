"""Low-rank all-reduce: one model to the bit, nothing forgotten, and sums that say who contributed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from peer import compress, native, wire
from peer.compress import block_float
from peer.compress.float_types import floats_of
from peer.compress.layout import Layout
from peer.compress.payload import Dense, Levels, ValueType
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip import build, factors
from peer.gossip.base import NodeContext
from peer.gossip.factors import Factors
from peer.gossip.options import LowRankOptions
from peer.random import PhiloxSource
from peer.train.momentum import Momentum
from peer.wire.message import MessageKind
from tests.gossip.drive import NESTEROV, carry_for, expect_momentum_on_the_mean, gossip, gradients_of, schedule_of

LAYOUT = Layout.of_shapes([(12, 2, 5), (12,), (9, 14), (1,)])
EPSILON = 2.0**-24
"""The largest relative error of one operation in float32."""


def peers(n=4, *, rank=2, bits=8, exponents="vector", layout=LAYOUT, momentum=None, dtype=np.float32, seed=7, **more):
    schedule = schedule_of(np.full((n, n), 1 / n))
    nodes = [
        NodeContext(
            peer=i,
            schedule=schedule,
            layout=layout,
            draw_source=PhiloxSource(seed, i),
            compressor=compress.build("none"),
            low_rank=LowRankOptions(rank=rank, bits=bits, exponents=exponents),
            **({} if momentum is None else {"momentum": lambda: Momentum(**momentum)}),
            **more,
        )
        for i in range(n)
    ]
    x0 = np.random.default_rng(1).normal(size=layout.size).astype(dtype)
    return [build("low-rank", node, x0) for node in nodes]


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize(
    "momentum", [None, {"kind": "nesterov", "weight_decay": 0.01}, {"kind": "qg"}, {"kind": "adam"}]
)
def test_all_peers_hold_one_model_to_the_bit(n, momentum):
    algorithms = peers(n, momentum=momentum)
    for t in range(9):
        gossip(algorithms, t, gradients_of(algorithms, t), 0.05, carry_for(algorithms))
        assert len({a.x.tobytes() for a in algorithms}) == 1
        states = [{k: v.tobytes() for k, v in a.state().items() if k != "error_memory"} for a in algorithms]
        assert all(state == states[0] for state in states)


@pytest.mark.parametrize("in_bfloat16", [False, True])
@pytest.mark.parametrize("exponents", ["vector", "layer"])
@pytest.mark.parametrize(("rank", "bits"), [(1, 8), (2, 2), (2, 8), (4, 12)])
def test_what_was_told_and_what_is_kept_is_all_there_was(rank, bits, exponents, in_bfloat16):
    """Σ_j E_j + n U = Σ_j (E_j + g_j) in every round, to the rounding of the float type, and of the memories: once with
    the gradient in it, once without what was contributed."""
    n = 5
    algorithms = peers(n, rank=rank, bits=bits, exponents=exponents, in_bfloat16=in_bfloat16)
    for t in range(30):
        gradients = gradients_of(algorithms, t)
        had_each = [
            floats_of(a.error_memory).astype(np.float64) + g for a, g in zip(algorithms, gradients, strict=True)
        ]
        had = sum(had_each)
        x = algorithms[0].x.astype(np.float64)
        gossip(algorithms, t, gradients, 1.0, carry_for(algorithms))
        update = x - algorithms[0].x
        has_each = [floats_of(a.error_memory).astype(np.float64) for a in algorithms]
        has = sum(has_each) + n * update
        # E + g, the r products and r − 1 sums of each own contribution, and the difference: of numbers up to `largest`.
        # U and the step of x likewise, n times. Factors that are multiplied out are rounded once themselves.
        largest = max(
            max(float(np.abs(each).max() + np.abs(g).max()) for each, g in zip(has_each, gradients, strict=True)),
            float(np.abs(x).max()),
            float(np.abs(update).max()),
        )
        roundings = 2 * rank + 4
        room = 2 * n * roundings * EPSILON * (1 + rank) * largest
        if in_bfloat16:
            room = room + 2.0**-7 * sum(map(np.abs, [*had_each, *has_each]))
        assert (np.abs(has - had) <= room).all()


def test_the_equations():
    """One round of each side in float64, against the matrices themselves."""
    n, layout = 3, Layout.of_shapes([(12, 10), (4,)])
    algorithms = peers(n, rank=2, bits=16, layout=layout, dtype=np.float64)
    factors = Factors(layout, 2)
    memory, x = np.zeros((n, layout.size)), algorithms[0].x.copy()
    q = factors.first_basis(0, PhiloxSource(7, 0).draws(0)).reshape(2, 10).T
    for t in range(2):
        gradients = gradients_of(algorithms, t)
        m = memory + np.array(gradients)
        matrices, vectors = m[:, :120].reshape(n, 12, 10), m[:, 120:]
        if t == 0:
            p = (matrices @ q).mean(axis=0)
            told, update = matrices @ q @ q.T, p @ q.T
            p, _ = np.linalg.qr(p)
        else:
            told, update = p @ (p.T @ matrices), p @ (p.T @ matrices.mean(axis=0))
        x -= 0.1 * np.concatenate((update.reshape(-1), vectors.mean(axis=0)))
        memory = np.concatenate(((matrices - told).reshape(n, -1), np.zeros((n, 4))), axis=1)
        gossip(algorithms, t, gradients, 0.1, carry_for(algorithms))
        for a, kept in zip(algorithms, memory, strict=True):
            # 16 bits: a rounding of 2^-16 of the largest number of a vector, of the sum as well.
            np.testing.assert_allclose(a.x, x, atol=2e-4)
            np.testing.assert_allclose(a.error_memory, kept, atol=3e-3)


@pytest.mark.skipif(not native.available(), reason="the kernels are not built")
@pytest.mark.parametrize(("rank", "length"), [(1, 2), (4, 9), (16, 17), (16, 27), (16, 576)])
def test_the_kernel_and_numpy_give_the_same_bases_to_the_bit(rank, length, monkeypatch):
    rng = np.random.default_rng(rank * length)
    draws = PhiloxSource(7, 0).draws(3)
    for scale in (1.0, 1e-320, 1e-9, 1e300):
        vectors = rng.normal(size=(rank, length)) * scale
        for dependent in (vectors, np.where(np.arange(rank)[:, None] == rank // 2, vectors[0], vectors), 0 * vectors):
            bases = []
            for lib in (native.lib, None):
                monkeypatch.setattr(factors, "lib", lib)
                bases.append(factors._orthonormal(dependent.copy(), draws, 5))
            assert bases[0].tobytes() == bases[1].tobytes()
            np.testing.assert_allclose(bases[0] @ bases[0].T, np.eye(rank), atol=1e-12)


def test_what_ranks_leave_out_comes_later():
    """With one gradient for ever, the sum of all updates is that of all gradients, but for a memory that stays."""
    algorithms = peers(3, rank=2)
    gradients = gradients_of(algorithms, 0, spread=3.0)
    mean = np.mean(gradients, axis=0, dtype=np.float64)
    start = algorithms[0].x.astype(np.float64)
    kept = []
    for t in range(200):
        gossip(algorithms, t, gradients, 1.0)
        kept.append(float(np.linalg.norm(sum(a.error_memory for a in algorithms) / 3)))
    moved = (start - algorithms[0].x) / 200
    assert np.linalg.norm(moved - mean) < 0.1 * np.linalg.norm(mean)
    assert max(kept[150:]) < 1.2 * max(kept[50:150])


def test_vectors_that_matter_little_take_few_bytes_where_a_layer_has_one_exponent():
    """An embedding: words as frequent as Zipf has them, and directions of which each has half the length of the one
    before. The same bytes leave much less of it unsaid."""
    rng, rounds = np.random.default_rng(3), 6
    words = rng.normal(size=(512, 16)) / np.arange(1, 513)[:, None]
    directions = np.linalg.qr(rng.normal(size=(64, 16)))[0] * 2.0 ** -np.arange(16)
    gradient = (words @ directions.T).astype(np.float32)
    told, unsaid = [], []
    for exponents, bits in (("vector", 4), ("layer", 7)):
        layout, frames = Layout.of_shapes([gradient.shape]), []
        algorithms = peers(3, rank=8, bits=bits, exponents=exponents, layout=layout)
        start, carry = algorithms[0].x.copy(), carry_for(algorithms)

        def counted(message, layout=layout, frames=frames, carry=carry):
            frames.append(len(wire.encode(message, layout)))
            return carry(message)

        for t in range(rounds):
            gossip(algorithms, t, [gradient.reshape(-1)] * 3, 1.0, counted)
        told.append(sum(frames))
        unsaid.append(np.linalg.norm(start - algorithms[0].x - rounds * gradient.reshape(-1)))
    assert told[1] < told[0]
    assert unsaid[1] < 0.65 * unsaid[0]


def test_peers_that_cancel_each_other_out_do_not_hide_what_they_agree_on():
    """A scale taken from the sum before would be too small for any of them."""
    algorithms = peers(2, rank=2, bits=8)
    rng = np.random.default_rng(3)
    common, apart = rng.normal(size=(2, LAYOUT.size)).astype(np.float32)
    start = algorithms[0].x.astype(np.float64)
    for t in range(100):
        gossip(algorithms, t, [common + 100 * apart, common - 100 * apart], 1.0)
    moved = (start - algorithms[0].x) / 100
    assert np.linalg.norm(moved - common) < 0.2 * np.linalg.norm(common)


@pytest.mark.parametrize(("shapes", "n"), [([(1,)], 3), ([(2,), (3,)], 8), ([(9, 11)], 4)])
def test_members_without_a_part_of_the_numbers_own_nothing(shapes, n):
    algorithms = peers(n, layout=Layout.of_shapes(shapes))
    for t in range(4):
        gossip(algorithms, t, gradients_of(algorithms, t), 0.1, carry_for(algorithms))
    assert len({a.x.tobytes() for a in algorithms}) == 1


def test_a_round_takes_two_parts_of_each_link():
    algorithms = peers(4)
    exchanges = [a.begin(0, g, 0.1) for a, g in zip(algorithms, gradients_of(algorithms, 0), strict=True)]
    assert all(exchange.awaits == exchange.sends.keys() == {0, 1, 2, 3} - {i} for i, exchange in enumerate(exchanges))
    sums = [a.advance({j: exchanges[j].sends[i] for j in exchanges[i].awaits}) for i, a in enumerate(algorithms)]
    assert all(exchange.phase == 1 and exchange.awaits == {0, 1, 2, 3} - {i} for i, exchange in enumerate(sums))
    size = Factors(LAYOUT, 2).size[0]
    told = [message.layers[1].codes.size for message in exchanges[0].sends.values()]
    assert sum(told) + sums[0].sends[1].layers[1].codes.size == size
    assert max(told) - min(told) <= 1


@pytest.mark.parametrize("exponents", ["vector", "layer"])
def test_messages_that_cannot_be_used_are_refused_before_anything_changes(exponents):
    algorithms = peers(3, exponents=exponents)
    exchanges = [a.begin(0, g, 0.1) for a, g in zip(algorithms, gradients_of(algorithms, 0), strict=True)]
    receiver = algorithms[0]
    inbox = {j: exchanges[j].sends[0] for j in (1, 2)}
    good = inbox[2]
    before = {key: np.array(value) for key, value in receiver.state().items()}
    exponents, codes = good.layers
    lies = [
        dataclasses.replace(good, kind=MessageKind.GOSSIP),
        dataclasses.replace(good, layers=good.layers[:1]),
        dataclasses.replace(good, layers=(codes, exponents)),
        dataclasses.replace(good, layers=(exponents, Dense(np.zeros(codes.codes.size, "f4"), ValueType.FLOAT32))),
        dataclasses.replace(good, layers=(exponents, dataclasses.replace(codes, codes=codes.codes[:-1]))),
        dataclasses.replace(good, layers=(dataclasses.replace(exponents, codes=exponents.codes[:-1]), codes)),
        dataclasses.replace(good, layers=(exponents, dataclasses.replace(codes, bits=9))),
        dataclasses.replace(good, layers=(exponents, dataclasses.replace(codes, scale=2.0))),
    ]
    for lie in lies:
        with pytest.raises(RemoteProtocolError) as caught:
            receiver.advance({**inbox, 2: lie})
        assert caught.value.peer == 2
        assert all(before[key].tobytes() == value.tobytes() for key, value in receiver.state().items())
    with pytest.raises(LocalProtocolError, match="lacking"):
        receiver.advance({1: inbox[1]})
    with pytest.raises(LocalProtocolError, match="took"):
        receiver.advance({**inbox, 2: dataclasses.replace(good, phase=1)})
    assert receiver.advance(inbox) is not None


def test_momentum_acts_on_the_mean():
    """At full rank and 16 bits it is all-reduce with momentum on the mean."""
    layout = Layout.of_sizes([40])
    algorithms = peers(3, bits=16, layout=layout, momentum=NESTEROV, dtype=np.float64)
    expect_momentum_on_the_mean(algorithms, atol=1e-3)


def test_a_part_weighs_what_its_codes_weigh():
    algorithms = peers(2, layout=Layout.of_shapes([(64, 576)]), rank=4)
    exchange = algorithms[0].begin(1, gradients_of(algorithms, 1)[0], 0.1)
    message = exchange.sends[1]
    frame = wire.encode(message, algorithms[0].node.layout)
    numbers = message.layers[1].codes.size
    assert numbers == 4 * 576 // 2
    assert len(frame) < numbers + 60
    assert isinstance(message.layers[0], Levels)
    assert block_float.read(message.layers, 8) is not None
