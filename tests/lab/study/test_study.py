"""Files that describe studies."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from peer.config.options import Config, load
from peer.errors import ConfigError
from peer.lab.study.checkout import commit
from peer.lab.study.study import FILES, RIVALS, find_study, read_plan
from peer.run.plan import build_compressor, build_schedule, check_rules, refuse_errors
from tests.lab.study.small_study import SMALL, read

ROOT = Path(__file__).resolve().parents[3]
STUDIES = [*FILES.glob("*.toml"), *(ROOT / "tools" / "rivals").glob("*.toml")]


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_every_study_of_ours_can_be_read_and_its_jobs_are_valid(file: Path) -> None:
    study = read_plan(file)
    for contender in study.contenders:
        rival = study.rival(contender)
        if rival is not None:
            assert rival.program.is_file()
        else:
            steps = study.steps_per_round(contender)
            config = study.config(contender, 0, 5)
            assert config.peer.min_step_s == study.step_s * steps
            check(config, study.peers)
            if study.target.job:
                assert study.target_config(contender, 0).evaluation.every_rounds > 0
    for contender, skew, seed in study.curves():
        config = load(environment={}, overrides=study.race_settings(contender, skew, seed, None))
        assert study.race is not None
        assert study.race.targets[0] > 0.1
        assert config.data.skew == skew
        check(config, study.peers)
        # Rivals count gradient steps, ours their rounds.
        period = 1 if contender.rival is not None else study.steps_per_round(contender)
        assert config.run.rounds * period == study.race.steps


def check(config: Config, num_peers: int) -> None:
    """Raise ConfigError where a run would be refused."""
    refuse_errors(check_rules(config, build_schedule(config, Path(), num_peers), build_compressor(config)))


def test_there_are_studies() -> None:
    assert len(STUDIES) >= 3


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"10mbit"', '"11mbit"', r"profiles: unknown link profile \(got '11mbit'\); valid: moniqua-200mbit"),
        ("peers = 4", "peers = true_", "TOML"),
        ("peers = 4", "peers = 1", "peers: is not valid.*greater than or equal to 2"),
        ("cell_s = 5", "", "cell_s: is missing"),
        ("cell_s = 5", "cells = 5", "cells: unknown key|cell_s: is missing"),
        ('paper = "last"', 'papers = "last"', r"contenders\.0\.papers: unknown key"),
        ('name = "ddp"', 'name = "full"', "same name"),
        ('rival = "ddp"', 'rival = "dpp"', r"ddp: unknown rival \(got 'dpp'\); valid: .*d-psgd-gloo"),
        ('rival = "ddp"', 'rival = "ddp"\n[rivals.own]\nsent_models = 1', r"rivals\.own\.program: is missing"),
    ],
)
def test_what_is_wrong_with_a_study_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in SMALL
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, SMALL.replace(old, new))


def test_a_study_brings_programs_of_its_own_from_its_folder(tmp_path: Path) -> None:
    own = SMALL.replace('rival = "ddp"', 'rival = "mine"') + '[rivals.mine]\nprogram = "mine.py"\nsent_models = 0.5\n'
    study = read(tmp_path, own)
    rival = study.rival(study.contenders[1])
    assert rival is not None
    assert (rival.program, rival.sent_models, rival.settle_rounds) == (tmp_path / "mine.py", 0.5, 1)
    assert study.rival(study.contenders[0]) is None


def test_cells_can_be_chosen_by_contender_and_by_profile(tmp_path: Path) -> None:
    study = read(tmp_path)

    def chosen(*only: str) -> list[tuple[str, str]]:
        return [(contender.name, profile) for contender, profile, _ in study.cells(only)]

    assert chosen("ddp", "10mbit") == [("ddp", "10mbit")]
    assert chosen("ddp") == [("ddp", "10mbit"), ("ddp", "moniqua-1mbit-1ms")]
    assert chosen("10mbit") == [("full", "10mbit"), ("ddp", "10mbit")]
    with pytest.raises(ConfigError, match=r"--only: is neither .* full, ddp, 10mbit, moniqua-1mbit-1ms"):
        chosen("dpp")


def test_a_study_is_found_by_its_name_and_by_its_path(tmp_path: Path) -> None:
    assert find_study("moniqua") == FILES / "moniqua.toml"
    (tmp_path / "mine.toml").write_text(SMALL)
    assert find_study(str(tmp_path / "mine.toml")) == tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match=r"unknown study \(got 'moniqa'\); valid: moniqua, "):
        find_study("moniqa")


def test_rivals_of_the_package_need_nothing_but_torch() -> None:
    assert {rival.program.name for rival in RIVALS.values()} == {"torch_program.py"}


def test_figures_carry_the_commit_of_the_checkout() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout, or git is not installed")
    name = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = commit().removesuffix("+")
    assert len(found) >= 4
    assert name.startswith(found)
