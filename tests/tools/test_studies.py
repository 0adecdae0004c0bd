"""The tools that measure: settings are valid, a study goes on where it stopped, the figures are those of the run."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from peer import gossip
from peer.lab.description import read_description
from peer.run import plan as run_plan
from tools import scale, study


def arguments(tmp_path: Path, **changes: object) -> argparse.Namespace:
    values = {"data": tmp_path, "rounds": None, "epochs": 3.0, "seed": 0, "only": None, "skew": None, "set": []}
    return argparse.Namespace(**values | {"device": "cpu"} | changes)


def described(name: str) -> study.Study:
    return read_description(study.Study, study.STUDIES[name])


def test_the_study_of_mnist_has_every_algorithm() -> None:
    assert {each.name for each in described("mnist").contenders} == set(gossip.ALGORITHMS)


@pytest.mark.parametrize("name", study.STUDIES)
def test_no_setting_is_one_that_the_validator_refuses(name: str, tmp_path: Path) -> None:
    for run in study.plan(described(name), arguments(tmp_path)):
        findings = run_plan.validate_config(run.config, Path(), run.peers)
        assert not [finding.sentence for finding in findings if finding.level == "error"], study.describe(run)


@pytest.mark.parametrize("name", study.STUDIES)
def test_every_run_has_a_key_of_its_own_that_the_place_of_the_data_does_not_change(name: str, tmp_path: Path) -> None:
    here, there = (list(study.plan(described(name), arguments(folder))) for folder in (tmp_path, tmp_path / "x"))
    assert len({run.key for run in here}) == len(here)
    assert [run.key for run in here] == [run.key for run in there]
    other_seed = study.plan(described(name), arguments(tmp_path, seed=1))
    assert not {run.key for run in here} & {run.key for run in other_seed}


def test_cifar_runs_have_whole_epochs_of_the_share_of_a_peer(tmp_path: Path) -> None:
    run = next(study.plan(described("cifar"), arguments(tmp_path, epochs=2)))
    assert run.config.run.rounds * run.config.training.batch_size * run.peers == pytest.approx(2 * 50_000, rel=1e-3)


def write_mnist(folder: Path) -> None:
    """Write 200 and 50 images of noise in MNIST's format."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 200), ("t10k", 50)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        header = np.array([0x803, count, 28, 28], dtype=">u4").tobytes()
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        header = np.array([0x801, count], dtype=">u4").tobytes()
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.tobytes()))


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, words)])
    return study.main()


def test_a_study_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mnist(tmp_path)
    results = tmp_path / "results.jsonl"
    words = ("mnist", "--data", tmp_path, "--results", results, "--rounds", 3, "--skew", 0, "--only", "sgp")
    assert call(monkeypatch, *words) == 0
    assert "1/1  sgp" in capsys.readouterr().err
    assert call(monkeypatch, *words, "--only", "d-psgd") == 0
    printed = capsys.readouterr()
    assert "1/1  d-psgd" in printed.err
    assert "\nsgp " in printed.out
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["sgp", "d-psgd"]
    for row in rows:
        # Three rounds of at most 31,400 bytes to one or two neighbours, and an averaged model that guesses.
        assert 0 < row["payload_bytes_per_peer"] <= 3 * 2 * 31_400
        assert row["rounds"] == 3
        assert 0 <= row["worst_accuracy"] <= 0.5


def test_a_diverged_run_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)
    results = tmp_path / "results.jsonl"
    call(
        monkeypatch, "mnist", "--data", tmp_path, "--results", results, "--rounds", 30, "--skew", 0, "--only", "sgp",
        "--set", "training.learning_rate=1e6",
    )  # fmt: skip
    row = json.loads(results.read_text())
    assert row["ended"].startswith("diverged")
    assert "worst_accuracy" not in row


@pytest.mark.parametrize("stacked", [False, True])
def test_the_figures_of_scale_are_of_the_run(stacked: bool) -> None:
    found = scale.measure(4, 4, stacked, ["training.task_options={hidden = 8}"], profile=False)
    assert (found.peers, found.rounds, found.stacked) == (4, 4, stacked)
    assert found.parameters == 20 * 8 + 8 + 8 * 10 + 10
    assert found.peer_rounds_per_s > 0
    assert found.peak_bytes_per_peer >= found.memory_bytes_per_peer
