"""Races: curves from real training, and what they and cells say together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.errors import ConfigError, SottoError
from peer.lab.study import race
from peer.lab.study.folder import StudyFolder
from peer.lab.study.race import Curve, Point
from peer.lab.study.race_folder import RaceFolder
from peer.lab.study.row import Cell
from peer.lab.study.study import Study
from tests.cli.runner import sotto
from tests.lab.study.small_study import SMALL_RACE, read, result

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return read(tmp_path, SMALL_RACE)


def curve(contender: str, *, seed: int = 0, skew: float = 0.8, worst: tuple[float, ...] = (0.2, 0.4)) -> Curve:
    points = tuple(Point(steps=4 * (n + 1), worst=each, averaged=each + 0.01) for n, each in enumerate(worst))
    return Curve(contender=contender, skew=skew, seed=seed, commit="c", seconds=1.0, payload_bytes=500.0, points=points)


def write(folder: Path, each: Curve) -> None:
    (folder / "curves").mkdir(parents=True, exist_ok=True)
    each.write(folder / "curves" / f"{each.contender}--{each.skew:g}--{each.seed}.json")


def cell(contender: str, round_s: float) -> Cell:
    figures = result(round_s=round_s, interface_bytes=4000.0)
    return Cell(
        contender=contender, profile="10mbit", seed=0, step_s=0.05, peers=2, commit="c", load=1.0, others_cpus=0.0,
        result=figures,
    )  # fmt: skip


def both(targets: tuple[float | None, ...]) -> list[float]:
    """Return the figures of all targets, −1 for one that is not reached."""
    return [-1.0 if each is None else each for each in targets]


def test_steps_to_a_target_are_linear_between_evaluations() -> None:
    rising = curve("ddp", worst=(0.2, 0.4, 0.3, 0.6))
    assert rising.steps_to(0.3) == pytest.approx(6.0)
    assert rising.steps_to(0.4) == pytest.approx(8.0)
    assert rising.steps_to(0.5) == pytest.approx(12 + 4 * 2 / 3)
    assert rising.steps_to(0.1) == pytest.approx(2.0)
    assert rising.steps_to(0.61) is None


def test_a_curve_survives_its_file(tmp_path: Path) -> None:
    written = curve("ddp")
    written.write(tmp_path / "curve.json")
    assert Curve.read(tmp_path / "curve.json") == written


def test_curves_are_those_of_all_contenders_skews_and_seeds(tmp_path: Path) -> None:
    text = SMALL_RACE.replace("skews = [0.8]", "skews = [0, 0.8]")
    text = text.replace('name = "ddp"', 'name = "ddp"\nseeds = [0, 3]')
    study = read(tmp_path, text)
    found = [(contender.name, skew, seed) for contender, skew, seed in study.curves(["ddp", "sgp"])]
    assert found == [(name, skew, seed) for skew in (0.0, 0.8) for name, seed in (("sgp", 0), ("ddp", 0), ("ddp", 3))]
    assert len(list(study.curves())) == 14
    # A profile chooses no curve, and who is timed as another has no cell.
    assert len(list(study.curves(["10mbit"]))) == 14
    assert [contender.name for contender, _, _ in study.cells()] == ["sgp", "allreduce", "ddp", "powersgd", "local-sgd"]


def test_a_race_goes_on_with_the_curves_that_are_missing(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def train(study: Study, contender: object, skew: float, seed: int, data: Path | None) -> Curve:
        name = getattr(contender, "name", "")
        trained.append(name)
        if name == "powersgd" and trained.count(name) == 1:
            raise ConfigError("does not start")
        return curve(name)

    monkeypatch.setattr(race, "train", train)
    folder = RaceFolder(study, tmp_path)
    said: list[str] = []
    write(tmp_path, curve("ddp"))
    assert folder.run([], said.append) == 1
    assert trained == ["sgp", "allreduce", "powersgd", "local-sgd", "diloco"]
    assert any("does not start" in line for line in said)
    assert folder.run([], said.append) == 0
    assert trained[5:] == ["powersgd"]
    assert folder.curves().missing() == []


def test_seconds_and_bytes_are_steps_times_those_of_a_step(study: Study, tmp_path: Path) -> None:
    for each in (curve("sgp"), curve("sgp", seed=1), curve("ddp"), curve("diloco", worst=(0.1, 0.9999))):
        write(tmp_path, each)
    cells = [cell("sgp", 2.0), cell("ddp", 4.0), cell("local-sgd", 8.0)]
    found = {each.contender: each for each in RaceFolder(study, tmp_path).finishes(cells)}
    # The only one that reaches both targets comes first, then by the one that all reach.
    assert list(found) == ["diloco", "sgp", "ddp"]
    sgp, diloco = found["sgp"], found["diloco"]
    # Two gradient steps a round; seed 1 is not one of the race's.
    assert (sgp.step_s, sgp.interface_bytes, sgp.seeds, sgp.worst) == (1.0, 2000.0, 1, 0.4)
    assert both(sgp.steps_to) == pytest.approx([0.2, -1])
    assert both(sgp.seconds_to) == pytest.approx([0.2, -1])
    assert both(sgp.bytes_to) == pytest.approx([400.0, -1])
    # Timed as local SGD, which averages every four steps.
    assert (diloco.step_s, diloco.interface_bytes) == (2.0, 1000.0)


def test_seeds_are_averaged_and_the_lowest_is_the_worst(study: Study, tmp_path: Path) -> None:
    study = study.model_copy(update={"contenders": (study.contenders[2].model_copy(update={"seeds": (0, 1)}),)})
    for each in (curve("ddp"), curve("ddp", seed=1, worst=(0.01, 0.2))):
        write(tmp_path, each)
    (found,) = RaceFolder(study, tmp_path).finishes([cell("ddp", 1.0)])
    assert (found.seeds, found.worst) == (2, 0.2)
    assert found.averaged == pytest.approx(0.31)
    assert both(found.steps_to) == pytest.approx([(0.2 + 4.0) / 2, -1])


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "period = 4, bits",
            "period = 3, bits",
            r"race\.steps and race\.evaluate_every: local-sgd comm.* 3",
        ),
        ('timed_as = "local-sgd"', 'timed_as = "gossip"', r"diloco\.timed_as: is no contender"),
        ("evaluate_every = 4", "", r"race\.evaluate_every: is missing"),
        ("targets = [0.01, 0.999]", "targets = []", r"race\.targets: is not valid"),
    ],
)
def test_what_is_wrong_with_a_race_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in SMALL_RACE
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, SMALL_RACE.replace(old, new))


def test_every_kind_of_contender_is_trained_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("race.toml").write_text(SMALL_RACE)
    done = sotto("lab", "study", "run", "race.toml", "--curves", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["race"] == []
    curves = {file.stem: Curve.read(file) for file in Path("runs/small-race/curves").iterdir()}
    assert set(curves) == {f"{name}--0.8--0" for name in ("sgp", "allreduce", "ddp", "powersgd", "local-sgd", "diloco")}
    for each in curves.values():
        assert [point.steps for point in each.points] == [4, 8]
        assert each.points[-1].worst > 0.1
    assert curves["sgp--0.8--0"].payload_bytes is not None
    # The same samples, rates and start: all-reduce of gradients by torch differs from ours by rounding alone.
    ours, torchs = (curves[f"{name}--0.8--0"] for name in ("allreduce", "ddp"))
    assert [point.worst for point in torchs.points] == pytest.approx([point.worst for point in ours.points], abs=0.01)
    # Nothing is left to be done.
    again = sotto("lab", "study", "run", "race.toml", "--curves")
    assert "sgp at skew" not in again.stderr
    # A cell is all that the table of a link needs beside them.
    folder = Path("runs/small-race")
    cell("ddp", 0.5).write(folder / "cells" / "ddp--10mbit--0.json")
    shown = sotto("lab", "study", "report", "race.toml")
    assert "race at skew 0.8, 10mbit" in shown.stdout
    report = json.loads(sotto("lab", "study", "report", "race.toml", "--json").stdout)
    (row,) = report["race"]
    assert row["seconds_to"][0] == pytest.approx(0.5 * row["steps_to"][0])
    page = (folder / "report.html").read_text()
    assert "Race at skew 0.8, 10mbit" in page
    assert "accuracy of the worst peer" in page


def test_a_rival_that_diverges_says_so(study: Study) -> None:
    wild = study.contenders[2].model_copy(update={"training": ("training.learning_rate=1e30",)})
    with pytest.raises(SottoError, match=r"ddp failed: .*the loss is not finite after 4 steps"):
        race.train(study, wild, 0.8, 0, None)


def test_cells_take_the_settings_of_a_rival_into_account(study: Study, tmp_path: Path) -> None:
    folder = StudyFolder(study, tmp_path / "out")
    local = study.contenders[4]
    assert study.steps_per_round(local) == 4
    rival = study.rival(local)
    assert rival is not None
    assert rival.sent_models == pytest.approx(1.75 / 4)
    # Four local steps, and a quarter of a model of 80 kB at 10 Mbit/s: 0.23 s.
    assert folder.prediction(local, "10mbit") == (None, 4)
