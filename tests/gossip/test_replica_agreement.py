"""A copy that is not what it should be is found by its digest, and mended by sending the layer whole."""

from __future__ import annotations

import numpy as np
import pytest

from peer import wire
from peer.compress.float_types import floats_of
from peer.errors import RemoteProtocolError
from peer.gossip import replicas
from peer.gossip.replicas import CHECK_EVERY
from peer.wire.message import Message, MessageKind, RepairWish
from tests.gossip.drive import gossip, peers, ring, schedule_of

SIZES = [30, 20, 10]
IN_BFLOAT16 = "quant-sgp in bfloat16"
SETTINGS = {
    IN_BFLOAT16: {"compressor": ("top_k", {"fraction": 0.2}), "averaging_rate": 0.3, "in_bfloat16": True},
    "choco-sgd": {"compressor": ("top_k", {"fraction": 0.2}), "averaging_rate": 0.3},
    "quant-sgp": {"compressor": ("top_k", {"fraction": 0.2}), "averaging_rate": 0.3},
    "dcd-psgd": {"compressor": ("qsgd", {"bits": 8})},
    "ecd-psgd": {"compressor": ("qsgd", {"bits": 8})},
}


def three(name):
    x0 = np.random.default_rng(1).normal(size=(3, sum(SIZES))).astype(np.float32)
    start = x0[0] if name in ("dcd-psgd", "ecd-psgd") else x0
    return peers(name.removesuffix(" in bfloat16"), schedule_of(ring(3)), start, sizes=SIZES, **SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_copies_that_agree_are_found_to_agree(name):
    algorithms = three(name)
    for t in range(2 * CHECK_EVERY + 1):
        gossip(algorithms, t)
        for sender in algorithms:
            round_, digests = sender.replicas.own_digests
            assert round_ == t - t % CHECK_EVERY
            for holder in algorithms:
                if holder is not sender:
                    assert holder.replicas.compare(sender.node.peer, round_, digests) == ()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_flipped_bit_is_found_and_mended_within_the_stated_rounds(name):
    algorithms = three(name)
    holder, sender = algorithms[0], algorithms[2]
    for t in range(5):
        gossip(algorithms, t)
    layer = holder.replicas.of[2][SIZES[0] : SIZES[0] + SIZES[1]]
    spelled = layer if name == IN_BFLOAT16 else layer.view(np.uint32)
    spelled[np.abs(floats_of(layer)).argmax()] ^= 1 << 6 if name == IN_BFLOAT16 else 1 << 22
    for t in range(5, CHECK_EVERY + 1):
        gossip(algorithms, t)
    layers = holder.replicas.compare(2, *sender.replicas.own_digests)
    assert layers == (1,)
    request = Message(MessageKind.REPAIR_REQUEST, 0, CHECK_EVERY, wanted=tuple(RepairWish(i, 0, 0) for i in layers))
    holder.replicas.take(sender.answer(request))
    assert holder.replicas.of[2].tobytes() == sender.replicas.own.tobytes()
    for t in range(CHECK_EVERY + 1, 2 * CHECK_EVERY + 1):
        gossip(algorithms, t)
    assert holder.replicas.compare(2, *sender.replicas.own_digests) == ()


@pytest.mark.parametrize("name", ["quant-sgp", IN_BFLOAT16])
def test_a_layer_that_comes_before_the_differences_in_it_waits_for_them(name):
    algorithms = three(name)
    holder, sender = algorithms[0], algorithms[2]
    gossip(algorithms, 0)
    holder.replicas.of[2][:3] = 7
    exchanges = [a.begin(1, np.zeros_like(a.x), 0.0) for a in algorithms]
    # The sender's own copy holds the difference of round 1 by now, and the holder's does not.
    whole = sender.answer(Message(MessageKind.REPAIR_REQUEST, 0, 0, wanted=(RepairWish(0, 0, 0),)))
    holder.replicas.take(whole)
    assert holder.replicas.of[2][0] == 7
    # It survives a crash in between.
    again = three(name)[0]
    again.restore({name: np.array(value) for name, value in holder.state().items()})
    assert "replica.whole.2" in again.state()
    holder.advance({j: exchanges[j].sends[0] for j in (1, 2)})
    assert holder.replicas.of[2].tobytes() == sender.replicas.own.tobytes()
    assert "replica.whole.2" not in holder.state()


def test_a_layer_that_comes_too_late_is_left_alone():
    algorithms = three("quant-sgp")
    gossip(algorithms, 0)
    whole = algorithms[2].answer(Message(MessageKind.REPAIR_REQUEST, 0, 0, wanted=(RepairWish(0, 0, 0),)))
    gossip(algorithms, 1)
    before = algorithms[0].replicas.of[2].tobytes()
    algorithms[0].replicas.take(whole)
    assert algorithms[0].replicas.of[2].tobytes() == before


def test_what_no_honest_peer_sends_is_refused():
    holder, _, sender = three("quant-sgp")
    gossip([holder, _, sender], 0)
    with pytest.raises(RemoteProtocolError, match="digests of a replica that is not kept"):
        holder.replicas.compare(2, 0, (1, 2))
    with pytest.raises(RemoteProtocolError, match="no layer"):
        sender.answer(Message(MessageKind.REPAIR_REQUEST, 0, 0))
    with pytest.raises(RemoteProtocolError, match="does not keep"):
        sender.answer(Message(MessageKind.REPAIR_REQUEST, 0, 0, wanted=(RepairWish(0, 4, 4),)))
    whole = sender.answer(Message(MessageKind.REPAIR_REQUEST, 0, 0, wanted=(RepairWish(0, 0, 0),)))
    whole.layers[0].integers[5] = np.array([np.inf], np.float32).view(np.int32)[0]
    with pytest.raises(RemoteProtocolError, match="numbers up to inf"):
        holder.check_repair(whole)
    (d2, *_others) = peers("sgp", schedule_of(ring(3)), np.zeros(4, np.float32))
    with pytest.raises(RemoteProtocolError, match="has none"):
        d2.check_repair(whole)


@pytest.mark.parametrize("name", ["choco-sgd", "quant-sgp", IN_BFLOAT16])
@pytest.mark.parametrize("whole_below", [0, 15])
def test_differences_that_are_compressed_layer_by_layer_have_the_same_bytes(name, whole_below, monkeypatch):
    found = []
    for large in (1 << 22, 1):
        monkeypatch.setattr(replicas, "LARGE", large)
        x0 = np.random.default_rng(1).normal(size=(3, sum(SIZES))).astype(np.float32)
        settings = SETTINGS[name] | {"compressor": ("top_k", {"fraction": 0.2, "value_bits": 4})}
        algorithm = name.removesuffix(" in bfloat16")
        algorithms = peers(algorithm, schedule_of(ring(3)), x0, sizes=SIZES, whole_below=whole_below, **settings)
        sent = []
        for t in range(3):
            exchange = algorithms[0].begin(t, np.full(sum(SIZES), 0.1, np.float32), 0.1)
            sent += [wire.encode(message, algorithms[0].node.layout) for message in exchange.sends.values()]
        found.append((sent, algorithms[0].replicas.own.tobytes()))
    assert found[0] == found[1]
