"""A cluster that is divided for a while, both parts of which go on: what becomes of the push-sum weight?"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from peer.compress.payload import FloatArray
from peer.config.options import load
from peer.errors import DivergenceError
from peer.gossip import starvation
from peer.node.participant import Participant
from peer.records import RoundRecord
from peer.simulate.network import Cut, LinkModel
from peer.simulate.rounds import Simulator

HALVES, ONE_ALONE = frozenset({0, 1}), frozenset({3})


class Division(NamedTuple):
    """What became of four peers."""

    weights: list[float]
    """Their push-sum weights at the end of the partition."""
    total: float
    """The sum of their weights when all is over."""
    apart: float
    """The distance between the models of peers 0 and 3 at the end of the partition."""
    apart_later: float
    """The same when all is over."""


def divided(algorithm: str, part: frozenset[int], *overrides: str) -> Division:
    """Cut a part of four peers off for half of the rounds."""
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
    models: dict[int, FloatArray] = {}

    def after_round(participant: Participant, record: RoundRecord) -> None:
        if record.round == 58:
            weights[participant.peer] = participant.algorithm.u
            models[participant.peer] = participant.model().copy()

    links = LinkModel(cuts=(Cut(peers=part, from_s=20.0, until_s=60.0),))
    simulator = Simulator(config, Path(), num_peers=4, links=links, step_s=1.0, after_round=after_round)
    assert simulator.run()
    peers = simulator.participants
    for participant in peers:
        participant.session.absorb_late()
    return Division(
        [weights[peer] for peer in range(4)],
        sum(peer.algorithm.u for peer in peers),
        float(np.linalg.norm(models[0] - models[3])),
        float(np.linalg.norm(peers[0].model() - peers[3].model())),
    )


@pytest.mark.parametrize("algorithm", ["sgp", "quant-sgp"])
@pytest.mark.parametrize("part", [HALVES, ONE_ALONE], ids=["halves", "one-alone"])
def test_both_parts_of_a_divided_cluster_keep_their_weight_and_find_together(
    algorithm: str, part: frozenset[int]
) -> None:
    found = divided(algorithm, part)
    assert min(found.weights) > 0.4
    assert sum(found.weights) > 2.9
    assert found.total == pytest.approx(4.0, abs=1e-9)
    assert found.apart_later < found.apart / 500


def test_without_that_they_would_give_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation, "STARVED_BELOW", 0.0)
    with pytest.raises(DivergenceError, match="the push-sum weight fell"):
        divided("sgp", HALVES, "rounds.leave_out_after_s=1e9")
