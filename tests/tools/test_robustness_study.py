"""The study of members that lie: what attackers send is well-formed, wrong, and all that changes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from peer.config.options import Config, load
from peer.run import plan as run_plan
from tools import robustness_study as study


def job(mixing: str, *changes: str) -> Config:
    overrides = [
        "training.task=digits", "algorithm.name=d-psgd", "compressor.kind=none", "graph.kind=complete",
        "run.rounds=40", "evaluation.every_rounds=0", f"algorithm.mixing={mixing}", *changes,
    ]  # fmt: skip
    return load(environment={}, overrides=overrides)


@pytest.mark.parametrize("mixing", ["clipped", "trimmed-mean"])
def test_robust_mixing_withstands_what_ruins_a_plain_run(mixing: str) -> None:
    plain = study.worst_honest(job("plain"), 1, "negative")
    robust = study.worst_honest(job(mixing), 1, "negative")
    assert plain is None or plain < 50
    assert robust is not None
    assert robust > 70


def test_a_run_without_attackers_is_a_plain_one() -> None:
    run = study.AttackedRun(job("plain"), Path(), num_peers=4)
    run.run()
    other = study.Simulator(job("plain"), Path(), num_peers=4)
    other.run()
    assert [p.model().tobytes() for p in run.participants] == [p.model().tobytes() for p in other.participants]


def test_what_attackers_send_is_what_the_study_says() -> None:
    own = np.array([1.0, -2.0], np.float32)
    honest = [np.array([0.0, 1.0], np.float32), np.array([2.0, 1.0], np.float32)]
    rng = np.random.default_rng(0)
    assert study.poison("negative", own, honest, rng).tolist() == [-4.0, 8.0]
    assert study.poison("shift", own, honest, rng).tolist() == [-0.5, 1.0]
    noise = study.poison("noise", np.zeros(10_000, np.float32), honest, rng)
    assert abs(float(noise.std()) - 1.0) < 0.05
    assert {study.poison(attack, own, honest, rng).dtype for attack in study.ATTACKS} == {np.dtype(np.float32)}


def test_the_table_has_a_row_for_each_attack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "--rounds", "2", "--skews", "0.8", "--attackers", "0,1", "--seeds", "0,1"]
    monkeypatch.setattr(sys, "argv", words)
    assert study.main() == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[:3] for row in rows] == [
        ["| 0.8", "0", "none"], *(["| 0.8", "1", attack] for attack in study.ATTACKS)
    ]  # fmt: skip
    assert all(len(row) == 6 for row in rows)


def test_no_job_of_the_study_is_refused() -> None:
    for mixing in study.MIXING:
        config = job(mixing, "algorithm.attackers=2")
        findings = run_plan.validate_config(config, Path(), study.PEERS)
        assert not [finding.sentence for finding in findings if finding.level == "error"]
