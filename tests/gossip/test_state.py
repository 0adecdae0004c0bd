"""State is everything a round reads: a peer restored from it goes on bit for bit; bad messages leave it untouched."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from peer.compress.payload import Dense, ValueType
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip import ALGORITHMS
from peer.gossip.base import Memory
from peer.wire.message import MessageKind
from tests.gossip.drive import carry_for, gossip, peers, ring, schedule_of, spread, total
from tests.gossip.scenarios import column_stochastic

TOP_K = {"compressor": ("top_k", {"fraction": 0.3, "value_bits": 4}), "averaging_rate": 0.2}
MODULO = {"compressor": ("modulo", {"bits": 6}), "theta": (0.05,), "verified": True}
SETTINGS = {
    "local": {},
    "allreduce": {},
    "low-rank": {},
    "compressed-allreduce": {"compressor": TOP_K["compressor"]},
    "parameter-server": {"compressor": ("qsgd", {"bits": 4})},
    "d-psgd": {"compressor": ("none", {"value_type": "bfloat16"})},
    "naive-quantized": {"compressor": ("grid", {"step": 0.01})},
    "sgp": {},
    "deep-squeeze": TOP_K,
    "sparse-push": TOP_K,
    "scsp": {**TOP_K, "rounds": 12, "final_rounds": 4},
    "choco-sgd": TOP_K,
    "quant-sgp": TOP_K,
    "dcd-psgd": {"compressor": ("qsgd", {"bits": 8})},
    "ecd-psgd": {"compressor": ("qsgd", {"bits": 8})},
    "moniqua": MODULO,
    "d2": {"averaging_rate": 0.5},
    "moniqua-d2": {**MODULO, "averaging_rate": 0.5},
}
SYNCHRONOUS = [name for name, cls in ALGORITHMS.items() if not cls.spec.asynchronous]


IN_BFLOAT16 = [
    *("choco-sgd", "quant-sgp", "dcd-psgd"),
    *("deep-squeeze", "sparse-push", "scsp", "low-rank", "compressed-allreduce"),
]


def _peers(name, dtype=np.float32, **more):
    rng = np.random.default_rng(1)
    push_sum = ALGORITHMS[name].spec.push_sum
    w = [column_stochastic(rng, 5), column_stochastic(rng, 5)] if push_sum else [ring(5)]
    x0 = rng.normal(size=60).astype(dtype)
    return peers(name, schedule_of(*w), x0, sizes=[11, 49], **SETTINGS[name], **more)


def _rounds(algorithms, start, stop):
    carry = carry_for(algorithms)
    for t in range(start, stop):
        rng = np.random.default_rng(100 + t)
        gradients = [rng.normal(size=60).astype(algorithms[0].x.dtype) for _ in algorithms]
        gossip(algorithms, t, gradients, 0.05, carry)


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, {}) for name in SYNCHRONOUS), *((name, {"in_bfloat16": True}) for name in IN_BFLOAT16)],
)
def test_a_restored_peer_goes_on_bit_for_bit(name, more):
    undisturbed = _peers(name, **more)
    _rounds(undisturbed, 0, 12)
    crashed = _peers(name, **more)
    _rounds(crashed, 0, 7)
    fresh = _peers(name, **more)
    for old, new in zip(crashed, fresh, strict=True):
        new.restore({key: np.array(value) for key, value in old.state().items()})
        new.restore_transport({key: np.array(value) for key, value in old.transport_state().items()})
    _rounds(fresh, 7, 12)
    for a, b in zip(undisturbed, fresh, strict=True):
        assert a.x.tobytes() == b.x.tobytes()
        assert a.u == b.u
        assert a.state().keys() == b.state().keys()
        for key, value in a.state().items():
            assert np.asarray(value).tobytes() == np.asarray(b.state()[key]).tobytes(), key


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_nothing_leaves_float32(name):
    algorithms = _peers(name)
    _rounds(algorithms, 0, 12)
    for a in algorithms:
        assert a.x.dtype == a.model().dtype == np.float32
        vectors = [value for value in a.state().values() if value.size == 60]
        assert all(value.dtype == np.float32 for value in vectors)
        assert np.isfinite(a.x).all()


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_what_is_kept_in_bfloat16_follows_what_float32_would_hold(name):
    """It is the same at everybody who keeps it, and moves neither the mean of all peers far nor peers apart."""
    halves, floats = _peers(name, in_bfloat16=True), _peers(name)
    for algorithms in (halves, floats):
        _rounds(algorithms, 0, 12 if name == "scsp" else 40)
        for a in algorithms:
            copies = a.replicas.of.items() if a.spec.memory is Memory.REPLICAS else ()
            assert all(copy.tobytes() == algorithms[peer].replicas.own.tobytes() for peer, copy in copies)
    for half, full in zip(halves, floats, strict=True):
        kept = half.replicas.own if half.spec.memory is Memory.REPLICAS else half.error_memory
        assert kept.dtype == np.uint16
        assert half.x.dtype == full.x.dtype == np.float32
    np.testing.assert_allclose(total(halves), total(floats), atol=0.3)
    assert spread(halves) <= 1.2 * spread(floats) + 0.05


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_only_models_in_float32_are_kept_in_bfloat16(name):
    with pytest.raises(ValueError, match="float64 cannot be kept in bfloat16"):
        _peers(name, np.float64, in_bfloat16=True)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_metrics_are_numbers_after_every_round(name):
    algorithms = _peers(name)
    for t in range(12):
        _rounds(algorithms, t, t + 1)
        metrics = dataclasses.asdict(algorithms[0].metrics())
        assert all(value is None or np.isfinite(value) for value in metrics.values())
    spec = ALGORITHMS[name].spec
    assert (metrics["error_norm"] is not None) == (spec.memory is Memory.ERRORS)
    assert (metrics["replica_error"] is not None) == (spec.memory is Memory.REPLICAS)
    assert (metrics["theta"] is not None) == spec.modulo


@pytest.mark.parametrize("name", ["d-psgd", "sgp", "choco-sgd", "quant-sgp", "moniqua", "d2", "naive-quantized"])
def test_neighbor_distance_is_that_of_the_models(name):
    """At the start of a round with models known to differ, in full precision."""
    rng = np.random.default_rng(2)
    x0 = rng.normal(size=(4, 30))
    more = {"compressor": ("modulo", {"bits": 16}), "theta": (20.0,)} if name == "moniqua" else {}
    algorithms = peers(name, schedule_of(ring(4)), x0, **more)
    gossip(algorithms, 0)
    wanted = np.mean([np.linalg.norm(x0[j] - x0[0]) for j in (1, 3)])
    assert algorithms[0].metrics().neighbor_distance == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("name", ["allreduce", "low-rank", "compressed-allreduce", "parameter-server"])
def test_who_sees_no_model_of_others_does_not_say_how_far_apart_they_are(name):
    algorithms = _peers(name)
    algorithms[1].x += 0.5
    _rounds(algorithms, 0, 2)
    assert {algorithm.metrics().neighbor_distance for algorithm in algorithms} == {None}


@pytest.mark.parametrize(
    "name",
    [name for name in SYNCHRONOUS if name not in ("local", "parameter-server", "low-rank", "compressed-allreduce")],
)
def test_messages_that_cannot_be_used_are_refused_before_anything_changes(name):
    algorithms = _peers(name)
    exchanges = [a.begin(0, np.ones(60, np.float32), 0.1) for a in algorithms]
    receiver = algorithms[0]
    inbox = {j: exchanges[j].sends[0] for j in sorted(exchanges[0].awaits)}
    sender = max(inbox)
    good = inbox[sender]
    before = {key: np.array(value) for key, value in receiver.state().items()}
    dense = Dense(np.zeros(11, np.float32), ValueType.FLOAT32)
    lies = [
        dataclasses.replace(good, layers=good.layers[:1]),
        dataclasses.replace(good, layers=good.layers[::-1]),
        dataclasses.replace(good, layers=(dense, dense)),
        dataclasses.replace(good, kind=MessageKind.PAIR_REPLY),
        dataclasses.replace(good, mixing_weight=float("nan")),
        dataclasses.replace(good, mixing_weight=1.5),
        dataclasses.replace(good, push_weight=-1.0),
    ]
    for lie in lies:
        with pytest.raises(RemoteProtocolError) as caught:
            receiver.advance({**inbox, sender: lie})
        assert caught.value.peer == sender
        after = receiver.state()
        assert all(before[key].tobytes() == np.asarray(after[key]).tobytes() for key in before)
    receiver.advance(inbox)


def test_what_only_a_bug_can_cause_stops_the_process():
    algorithms = _peers("d2")
    exchanges = [a.begin(0, np.ones(60, np.float32), 0.1) for a in algorithms]
    inbox = {j: exchanges[j].sends[0] for j in exchanges[0].awaits}
    with pytest.raises(LocalProtocolError, match="lacking"):
        algorithms[0].advance({})
    with pytest.raises(LocalProtocolError, match="not awaited"):
        algorithms[0].advance({**inbox, 2: exchanges[2].sends[1]})
    with pytest.raises(LocalProtocolError, match="took"):
        algorithms[0].advance(dict.fromkeys(inbox, next(iter(inbox.values()))))


def test_a_state_of_another_shape_is_refused():
    for name in ("deep-squeeze", "quant-sgp", "d2", "moniqua"):
        a = _peers(name)[0]
        for key, value in a.state().items():
            if value.size == 60:
                with pytest.raises(ValueError, match="shape"):
                    a.restore({**a.state(), key: value[:10]})


def test_differences_have_to_come_in_order():
    """A stale copy would lose Σx while Σu stays perfect."""
    algorithms = _peers("quant-sgp")
    first = [a.begin(0, np.zeros(60, np.float32), 0.0) for a in algorithms]
    assert algorithms[0].advance({}) is None
    second = [a.begin(1, np.zeros(60, np.float32), 0.0) for a in algorithms[:1]]
    sender = min(second[0].awaits)
    late = first[sender].sends[0]
    with pytest.raises(LocalProtocolError, match="absorbed first"):
        algorithms[0].advance({sender: dataclasses.replace(late, round=1)})


def test_a_late_message_that_nothing_was_held_back_for_is_refused():
    algorithms = _peers("d-psgd")
    first = [a.begin(0, np.zeros(60, np.float32), 0.0) for a in algorithms]
    inbox = {j: first[j].sends[0] for j in first[0].awaits}
    algorithms[0].advance(inbox)
    with pytest.raises(LocalProtocolError, match="held back"):
        algorithms[0].absorb_late(next(iter(inbox.values())))
