"""When training makes no sense any more, and what the guard says then."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from peer.compress.payload import FloatArray
from peer.config.options import GuardOptions, load
from peer.errors import DivergenceError
from peer.node.divergence_guard import reason_to_stop, require_finite_loss, require_finite_model
from peer.node.participant import Participant
from peer.records import RoundRecord
from peer.simulate import virtual_run
from peer.simulate.rounds import Simulator

OPTIONS = GuardOptions(max_loss=100.0, max_neighbor_distance=10.0, min_push_weight=1e-3)
MODEL = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("record", "model", "says"),
    [
        (RoundRecord(peer=0, round=7, time_s=0.0, loss=99.0), MODEL, None),
        (RoundRecord(peer=0, round=7, time_s=0.0), MODEL, None),
        (RoundRecord(peer=0, round=7, time_s=0.0, loss=101.0), MODEL, "round 7 is 101, above guard.max_loss 100"),
        (RoundRecord(peer=0, round=7, time_s=0.0, loss=math.nan), MODEL, "the training loss of round 7 is not finite"),
        (RoundRecord(peer=0, round=7, time_s=0.0, push_weight=9e-4), MODEL, "the push-sum weight fell to 0.0009"),
        (RoundRecord(peer=0, round=7, time_s=0.0), MODEL * np.float32("inf"), "not finite after round 7"),
        # The norm of the model is 2.
        (RoundRecord(peer=0, round=7, time_s=0.0, neighbor_distance=19.0), MODEL, None),
        (RoundRecord(peer=0, round=7, time_s=0.0, neighbor_distance=21.0), MODEL, "the neighbours are 21 away"),
    ],
)
def test_why_a_run_should_stop(record: RoundRecord, model: FloatArray, says: str | None) -> None:
    reason = reason_to_stop(OPTIONS, record, model)
    assert (reason is None) == (says is None)
    assert says is None or says in str(reason)


def test_a_peer_with_little_weight_is_judged_by_its_model() -> None:
    """x is a hundredth of z: beside x the neighbours look far away, beside z they are near."""
    u = 0.01
    z = np.full(4, 50.0, np.float32)
    record = RoundRecord(peer=0, round=7, time_s=0.0, push_weight=u, neighbor_distance=50.0)
    assert reason_to_stop(OPTIONS, record, z) is None
    assert reason_to_stop(OPTIONS, record, z * np.float32(u)) is not None


def test_the_simulator_hands_the_guard_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, FloatArray]] = []
    states: list[tuple[FloatArray, float]] = []

    def judge(options: GuardOptions, record: RoundRecord, model: FloatArray, **others: bool) -> str | None:
        seen.append((record.peer, model.copy()))
        return None

    def after_round(participant: Participant, record: RoundRecord) -> None:
        states.append((participant.algorithm.x.copy(), participant.algorithm.u))

    monkeypatch.setattr(virtual_run, "reason_to_stop", judge)
    overrides = ["algorithm.name=sgp", "graph.kind=star", "graph.weights=uniform", "run.rounds=10"]
    config = load(environment={}, overrides=[*overrides, "evaluation.every_rounds=0"])
    assert Simulator(config, tmp_path, num_peers=5, after_round=after_round).run()
    assert len(seen) == len(states) == 50
    for (_, model), (x, u) in zip(seen, states, strict=True):
        np.testing.assert_array_equal(model, x / np.float32(u))
    assert max(u for _, u in states) > 1.8


def test_nothing_that_is_not_finite_is_sent() -> None:
    require_finite_loss(3, 1e30)
    # The square of this model overflows; the model does not.
    require_finite_model(3, np.full(4, 1e30, np.float32))
    with pytest.raises(DivergenceError, match="the training loss of round 3 is not finite"):
        require_finite_loss(3, math.inf)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(DivergenceError, match="not finite after round 3"):
            require_finite_model(3, np.array([0.0, bad], np.float32))
