"""The study of privacy: its jobs differ in what they say, and private rows stay within their ε."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from peer.config.options import load
from tools import privacy_study as study

pytest.importorskip("dp_accounting")

DIGITS = ("training.task=digits", "training.precision=float32", "algorithm.name=d-psgd", "compressor.kind=none",
          "graph.kind=complete", "run.rounds=30", "evaluation.every_rounds=0", "training.momentum=none",
          "training.label_adjustment=false")  # fmt: skip


def test_a_private_run_says_what_it_spent_and_learns_less() -> None:
    plain = study.result(load(environment={}, overrides=DIGITS), None)
    private = study.result(load(environment={}, overrides=[*DIGITS, "privacy.epsilon=8"]), None)
    assert plain.epsilon is None
    assert private.epsilon is not None
    assert 7 < private.epsilon <= 8
    assert private.worst < plain.worst


def test_jobs_are_private_where_they_say_so_and_robust_where_some_attack() -> None:
    arguments = argparse.Namespace(attack="shift", data=Path("data"), batch_size=64, rounds=10)
    config = study.settings(arguments, "3", "0.8", 5, study.Choice(0.5, 0.3))
    assert (config.privacy.epsilon, config.privacy.clip_norm, config.privacy.simulation_seed) == (3.0, 0.3, 5)
    assert (config.algorithm.mixing, config.algorithm.attackers) == ("trimmed-mean", 2)
    arguments.attack = None
    plain = study.settings(arguments, "none", "0", 5, study.Choice(0.5, None))
    assert not plain.privacy.is_on
    assert plain.algorithm.mixing == "plain"


def test_the_choice_of_the_grid_is_the_best_for_the_worst_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = []

    def result(config: study.Config, attack: str | None) -> study.Result:
        seeds.append(config.run.seed)
        rate = config.training.learning_rate
        epsilon = config.privacy.epsilon if config.privacy.is_on else None
        return study.Result(50 - abs(rate - 0.3) - config.privacy.clip_norm, 60.0, epsilon)

    monkeypatch.setattr(study, "result", result)
    monkeypatch.setattr(sys, "argv", ["study", "--data", "data", "--skews", "0", "--epsilons", "none,3"])
    assert study.main() == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[1:5] for row in rows] == [["none", "–", "0.3", "–"], ["3", "3.00", "0.3", "0.3"]]
    assert seeds == [100] * 3 + [0, 1] + [100] * 6 + [0, 1]
