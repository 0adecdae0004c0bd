"""Messages that break the contract of their types are the caller's fault, and never become bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from peer.compress.layout import Layout
from peer.compress.payload import (
    Dense,
    LayerPayload,
    Levels,
    MoreBits,
    Residues,
    Rounding,
    Sparse,
    ValueType,
    WholeIntegers,
)
from peer.errors import DivergenceError, LocalProtocolError
from peer.wire import Message, MessageKind, RepairWish, encode

LAYOUT = Layout.of_sizes([4])
GOOD = Levels(1.0, 1, -1, 1, 2, np.zeros(4, np.uint8))
HONEST = Message(MessageKind.GOSSIP, 1, 2, layers=(GOOD,))


def singles(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    "layer",
    [
        Dense(singles(1, 2, 3), ValueType.FLOAT32),
        Dense(np.ones(4), ValueType.FLOAT32),
        Dense(singles(1, 2, 3, 1.001), ValueType.BFLOAT16),
        Dense(singles(1, 2, 3, 70000), ValueType.FLOAT16),
        replace(GOOD, codes=np.full(4, 4, np.uint8)),
        replace(GOOD, codes=np.zeros(4, np.uint16)),
        replace(GOOD, codes=np.zeros(8, np.uint8)[::2]),
        replace(GOOD, bits=0),
        replace(GOOD, bits=17),
        replace(GOOD, divisor=0),
        replace(GOOD, step=0),
        replace(GOOD, base=2**53),
        replace(GOOD, scale=math.inf),
        replace(GOOD, scale=1e308, base=-(2**40)),
        Sparse(4, np.array([1, 1]), Dense(singles(1, 2), ValueType.FLOAT32)),
        Sparse(4, np.array([2, 1]), Dense(singles(1, 2), ValueType.FLOAT32)),
        Sparse(4, np.array([0, 4]), Dense(singles(1, 2), ValueType.FLOAT32)),
        Sparse(4, np.array([-1, 2]), Dense(singles(1, 2), ValueType.FLOAT32)),
        Sparse(4, np.array([1]), Dense(singles(1, 2), ValueType.FLOAT32)),
        Sparse(5, np.array([1]), Dense(singles(1), ValueType.FLOAT32)),
        Sparse(4, np.array([1], np.int32), Dense(singles(1), ValueType.FLOAT32)),
        Residues(math.nan, 8, Rounding.DITHER, np.zeros(4, np.uint8), None),
        Residues(1.0, 8, Rounding.DITHER, np.zeros(4, np.uint8), 2**64),
        Residues(1.0, 17, Rounding.DITHER, np.zeros(4, np.uint16), None),
        MoreBits(8, 4, np.zeros(4, np.uint8)),
        WholeIntegers(np.zeros(4, np.int64)),
    ],
    ids=str,
)
def test_payloads_that_no_section_can_hold_are_refused(layer: LayerPayload) -> None:
    with pytest.raises(LocalProtocolError):
        encode(replace(HONEST, layers=(layer,)), LAYOUT)


@pytest.mark.parametrize(("value", "value_type"), [(math.nan, ValueType.FLOAT32), (math.inf, ValueType.BFLOAT16)])
def test_a_model_that_is_not_finite_has_diverged(value: float, value_type: ValueType) -> None:
    with pytest.raises(DivergenceError, match="lower the learning rate"):
        encode(replace(HONEST, layers=(Dense(singles(1, 2, 3, value), value_type),)), LAYOUT)


REPAIR = Message(MessageKind.REPAIR, 1, 2, layers=(MoreBits(8, 4, np.zeros(4, np.uint8)),), layer_ids=(0,))


@pytest.mark.parametrize(
    "message",
    [
        replace(HONEST, layers=()),
        replace(HONEST, layers=(GOOD, GOOD)),
        replace(HONEST, layer_ids=(0,)),
        replace(HONEST, sender=-1),
        replace(HONEST, round=2**64),
        replace(HONEST, phase=-1),
        replace(HONEST, mixing_weight=math.nan),
        replace(HONEST, push_weight=-0.5),
        replace(HONEST, wanted=(RepairWish(0, 8, 4),)),
        replace(HONEST, kind=MessageKind.NOTHING),
        replace(REPAIR, layer_ids=None),
        replace(REPAIR, layer_ids=(1,)),
        replace(REPAIR, layers=(GOOD,)),
        replace(REPAIR, layers=(MoreBits(61, 4, np.zeros(4, np.uint8)),)),
        replace(REPAIR, layers=(WholeIntegers(np.zeros(4, np.int32)),)),  # type: ignore[arg-type]
        Message(MessageKind.REPAIR_REQUEST, 1, 2, wanted=(RepairWish(0, 65, 4),)),
        Message(MessageKind.REPAIR_REQUEST, 1, 2, wanted=(RepairWish(0, 8, 17),)),
        Message(MessageKind.REPAIR_REQUEST, 1, 2, wanted=(RepairWish(0, 8, 4), RepairWish(0, 8, 4))),
        Message(MessageKind.REPAIR_REQUEST, 1, 2, wanted=(RepairWish(1, 8, 4),)),
    ],
    ids=str,
)
def test_messages_that_no_frame_can_hold_are_refused(message: Message) -> None:
    with pytest.raises(LocalProtocolError):
        encode(message, LAYOUT)


def test_the_honest_messages_of_these_tests_are_fine() -> None:
    encode(HONEST, LAYOUT)
    encode(REPAIR, LAYOUT)
