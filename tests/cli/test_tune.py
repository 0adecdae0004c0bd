"""`sotto lab tune`: the table, the document, and the file that it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from peer.config import options as configuration
from peer.ops import tune as tuner
from peer.ops.tune import Trial, Tuning
from tests.cli.runner import sotto

SMALL = ("--peers", "3", "--rounds", "30", "--skew", "0", "-s", "training.task_options={hidden = 8}")


def trial(eta: float, gamma: float, accuracy: float | None, rounds: int = 800) -> Trial:
    return Trial(
        averaging_rate=eta,
        learning_rate=gamma,
        rounds=rounds,
        verdict="held" if accuracy is not None else "diverged",
        reason=None if accuracy is not None else "peer 0: the training loss is too high",
        worst_accuracy=accuracy,
        averaged_accuracy=accuracy,
        consensus_distance=0.25 if accuracy is not None else None,
    )


BEST = trial(0.1, 0.05, 0.953)
FOUND = Tuning(
    best=BEST,
    safe=True,
    averages=True,
    rounds=800,
    shortened=False,
    ended="done",
    trials=(
        trial(0.1, 0.05, 0.9, 100),
        trial(0.1, 0.02, 0.7, 100),
        BEST,
        trial(0.2, 0.05, 0.31),
        trial(0.1, 0.1, None),
    ),
    seconds=12.0,
)


@pytest.fixture
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends at once with `FOUND`."""
    monkeypatch.setattr(tuner, "tune", lambda *_, **__: FOUND)


@pytest.mark.usefixtures("_found")
def test_the_table_shows_the_cliff_and_the_chosen_point() -> None:
    result = sotto("lab", "tune")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "◆ 95.3" in rows["0.1"]
    assert "✗ diverged" in rows["0.1"]
    assert "70.0" in rows["0.1"]
    assert "✗ 31.0" in rows["0.2"]
    assert "algorithm.averaging_rate = 0.1\ntraining.learning_rate = 0.05\n" in result.stdout
    assert "not confirmed" not in result.stdout


@pytest.mark.usefixtures("_found")
def test_writing_puts_both_rates_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[training]\nlearning_rate = 0.5 # a guess\n")
    result = sotto("lab", "tune", "--config", str(path), "--write")
    assert result.exit_code == 0
    assert f"wrote {path}" in result.stdout
    assert "learning_rate = 0.05 # a guess" in path.read_text()
    config = configuration.load(path, environment={})
    assert (config.algorithm.averaging_rate, config.training.learning_rate) == (0.1, 0.05)


@pytest.mark.usefixtures("_found")
def test_nothing_is_written_without_being_asked(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[training]\nlearning_rate = 0.5\n")
    assert sotto("lab", "tune", "--config", str(path)).exit_code == 0
    assert path.read_text() == "[training]\nlearning_rate = 0.5\n"


def test_writing_needs_a_file() -> None:
    result = sotto("lab", "tune", "--write")
    assert result.exit_code == 2
    assert "--config FILE" in result.stderr


def test_the_confidence_is_that_of_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(**changes: object) -> str:
        found = replace(FOUND, **changes)  # type: ignore[arg-type]  # some of its fields
        monkeypatch.setattr(tuner, "tune", lambda *_, **__: found)
        return sotto("lab", "tune").stdout

    assert "low confidence: one seed only" in printed()
    several = {"repeats": (0.953, 0.943), "next_best": trial(0.2, 0.05, 0.9), "next_best_repeats": (0.9, 0.902)}
    assert "2 seeds: worst peer 94.3 % to 95.3 %; the next best (η 0.2, γ 0.05) is 4.7 points lower" in printed(
        **several
    )
    assert "more than seeds differ by" in printed(**several)
    assert "within the 8.0 points that seeds differ by" in printed(**several | {"next_best_repeats": (0.95, 0.87)})
    assert "no other safe point came close" in printed(repeats=(0.953, 0.943))


def test_nothing_is_recommended_or_written_where_the_worst_peer_learned_too_little(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = replace(FOUND, best=replace(BEST, worst_accuracy=0.45), guessing=0.1, single_process_accuracy=0.97)
    monkeypatch.setattr(tuner, "tune", lambda *_, **__: found)
    path = tmp_path / "job.toml"
    path.write_text("[training]\nlearning_rate = 0.5\n")
    result = sotto("lab", "tune", "--config", str(path), "--write")
    assert result.exit_code == 0
    assert "no recommendation: in 800 rounds, no point brought the worst peer to a useful model" in result.stdout
    assert "It reached 45.0 %, one process with all data 97.0 % and guessing 10.0 %" in result.stdout
    assert "nothing was written" in result.stdout
    assert path.read_text() == "[training]\nlearning_rate = 0.5\n"
    document = json.loads(sotto("lab", "tune", "--json").stdout)
    assert document["useful"] is False
    assert document["worst_accuracy"] == 0.45


def test_the_document_of_a_real_search() -> None:
    result = sotto("lab", "tune", *SMALL, "--trials", "4", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert len(document["trials"]) == 4
    assert document["ended"] == "trials used up"
    assert document["safe"] is False
    assert document["written"] is None
    assert document["confidence"].startswith("low confidence")
    assert 0 < document["single_process_accuracy"] <= 1
    chosen = {"averaging_rate": document["averaging_rate"], "learning_rate": document["learning_rate"]}
    assert any(chosen.items() <= entry.items() for entry in document["trials"])
    # Progress is for people, and goes elsewhere.
    assert result.stderr.count("trial ") == 4
