"""A cluster that is divided for a while, both parts of which go on: what becomes of the push-sum weight?"""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.config import load
from peer.errors import DivergenceError
from peer.gossip import starvation
from peer.node.participant import Participant
from peer.round_record import RoundRecord
from peer.simulate.network import Cut, LinkModel
from peer.simulate.rounds import Simulator

CUT = Cut(peers=frozenset({0, 1}), from_s=20.0, until_s=60.0)


def divided(algorithm: str, *overrides: str) -> tuple[list[float], float]:
    """Return (weights of the four peers at the end of the partition, their sum when all is over)."""
    config = load(
        environment={},
        overrides=[
            f"algorithm.name={algorithm}",
            "algorithm.averaging_rate=0.5",
            "graph.kind=exponential",
            "compressor.fraction=0.5",
            "training.task_options={hidden = 8}",
            "run.rounds=80",
            "evaluation.every_rounds=0",
            "rounds.late=skip",
            "rounds.late_after_s=0.5",
            "rounds.max_skipped_rounds=80",
            "rounds.leave_out_after_s=2.5",
            *overrides,
        ],
    )
    weights: dict[int, float] = {}

    def after_round(participant: Participant, record: RoundRecord) -> None:
        if record.round == 58:
            weights[participant.peer] = participant.algorithm.u

    simulator = Simulator(
        config, Path(), num_peers=4, links=LinkModel(cuts=(CUT,)), step_s=1.0, after_round=after_round
    )
    assert simulator.run()
    for participant in simulator.participants:
        participant.session.absorb_late()
    return [weights[peer] for peer in range(4)], sum(peer.algorithm.u for peer in simulator.participants)


@pytest.mark.parametrize("algorithm", ["sgp", "quant-sgp"])
def test_both_parts_of_a_divided_cluster_keep_their_weight(algorithm: str) -> None:
    weights, total = divided(algorithm)
    assert min(weights) > 0.4
    assert sum(weights) > 2.9
    assert total == pytest.approx(4.0, abs=1e-9)


def test_without_that_they_would_give_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation, "STARVED_BELOW", 0.0)
    with pytest.raises(DivergenceError, match="the push-sum weight fell"):
        divided("sgp", "rounds.leave_out_after_s=1e9")
