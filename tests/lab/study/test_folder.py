"""The folder of a study: what is missing, what is computed once, and the report."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from peer.errors import ConfigError
from peer.lab.study.folder import StudyFolder
from peer.lab.study.row import Cell, Row
from peer.lab.study.study import Study
from tests.lab.study.small_study import SMALL, read, result
from tests.links.namespaces import needs_links

pytestmark = pytest.mark.usefixtures("warm_python")

THIN = "moniqua-1mbit-1ms"


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return read(tmp_path)


def cell(contender: str, profile: str, round_s: float = 1.0) -> Cell:
    return Cell(
        contender=contender,
        profile=profile,
        seed=0,
        step_s=0.5,
        peers=4,
        commit="c",
        load=1.0,
        others_cpus=0.01,
        result=result(round_s=round_s),
    )


def test_a_study_goes_on_with_what_is_missing(study: Study, tmp_path: Path) -> None:
    folder = StudyFolder(study, tmp_path / "out")
    assert len(folder.cells().missing()) == 4
    cell("full", "10mbit").write(tmp_path / "out" / "cells" / "full--10mbit--0.json")
    assert [(contender.name, profile) for contender, profile, _ in folder.cells().missing()] == [
        ("ddp", "10mbit"),
        ("full", THIN),
        ("ddp", THIN),
    ]


def test_a_cell_survives_its_file(tmp_path: Path) -> None:
    written = cell("full", THIN, 2.0)
    written.write(tmp_path / "cell.json")
    assert Cell.read(tmp_path / "cell.json") == written
    # One table, as those who read cells with other programs know it.
    table = json.loads((tmp_path / "cell.json").read_text())
    assert (table["contender"], table["round_s"], table["others_cpus"]) == ("full", 2.0, 0.01)


def test_a_cell_has_as_many_rounds_as_fit(study: Study, tmp_path: Path) -> None:
    folder = StudyFolder(study, tmp_path / "out")
    fast, slow = (folder.prediction(study.contenders[0], profile) for profile in study.profiles)
    assert fast[1] == 8
    assert slow[1] == 3
    # Computed once, then read.
    computed = tmp_path / "out" / "computed" / "full--frame.json"
    computed.write_text(json.dumps({"bytes": 2 * json.loads(computed.read_text())["bytes"]}))
    doubled, _ = StudyFolder(study, tmp_path / "out").prediction(study.contenders[0], THIN)
    assert slow[0] is not None
    assert doubled is not None
    assert doubled > 1.5 * slow[0]


def test_rounds_to_the_target_are_counted_once_for_a_contender_and_its_rival(tmp_path: Path) -> None:
    options = '["algorithm.name=allreduce", "graph.kind=complete", "graph.weights=uniform", "compressor.kind=none"]'
    text = SMALL.replace('["algorithm.name=d-psgd", "compressor.kind=none"]', options)
    job = ["training.task=digits", "training.task_options={hidden=8}", "run.rounds=4", "evaluation.every_rounds=2"]
    study = read(tmp_path, f"{text}options = {options}\n[target]\naccuracy = 0.01\njob = {json.dumps(job)}\n")
    folder = StudyFolder(study, tmp_path / "out")
    assert [folder.rounds_to_target(each) for each in study.contenders] == [2, 2]
    assert len(list((tmp_path / "out" / "computed").glob("target--*.json"))) == 1


def test_report_holds_tables_curves_and_figures(study: Study, tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = StudyFolder(study, out)
    for name, profile, round_s in (("full", THIN, 2.0), ("ddp", THIN, 4.0), ("full", "unshaped", 0.1)):
        cell(name, profile, round_s).write(out / "cells" / f"{name}--{profile}--0.json")
    file, rows, _ = folder.report([64])
    page = file.read_text()
    assert THIN in page
    assert page.count("<svg") >= 2
    # 0.1 s without limits and 1.1 s of links, where 2 s were measured and the links take most of the round: marked.
    assert re.search(r"-3\d\.\d% !", page)
    assert "92%" in page
    lines = list(csv.DictReader((out / "results.csv").open()))
    assert [(line["contender"], line["seconds_for_100_rounds"]) for line in lines] == [
        ("full", "200.0"),
        ("ddp", "400.0"),
    ]
    results = json.loads((out / "results.json").read_text())
    assert [each["contender"] for each in results["cells"]] == [row.cell.contender for row in rows] == ["full", "ddp"]
    assert {(each["contender"], each["peers"]) for each in results["predicted"]} == {("full", 64)}


def test_time_to_a_target_is_rounds_by_seconds() -> None:
    measured = cell("full", THIN, 2.0)
    row = Row(cell=measured, rounds_to_target=30, predicted_round_s=1.5)
    assert (row.seconds_to_target, row.bytes_to_target, row.error) == (60.0, 30.0, -0.25)
    assert Row(cell=measured).seconds_to_target is None


def test_rivals_send_the_model_of_the_job_or_the_one_that_is_named(tmp_path: Path) -> None:
    def rounds(text: str) -> int:
        study = read(tmp_path, text)
        return StudyFolder(study, tmp_path / "out").prediction(study.contenders[1], "10mbit")[1]

    # As many rounds as last 5 s at 10 Mbit/s, three at least: 20,000 parameters of DDP take 0.6 s, 273,258 take 2 s.
    assert rounds(SMALL.replace('model = "resnet20"\n', "")) == 8
    assert rounds(SMALL) == 3
    with pytest.raises(ConfigError, match=r"model: is not a model of known size \(got 'mlp'\); valid: .*resnet20"):
        rounds(SMALL.replace("resnet20", "mlp"))


@pytest.mark.root
@pytest.mark.slow
@needs_links
def test_a_study_runs_its_cells_with_real_peers_and_rivals(tmp_path: Path) -> None:
    text = SMALL.replace("peers = 4", "peers = 2").replace('"10mbit", ', "").replace("step_s = 0.5", "step_s = 0.05")
    text = text.replace('kind=ring"', 'kind=ring", "transport.linger_s=1"').replace("cell_s = 5", "cell_s = 1")
    text = text.replace('model = "resnet20"\n', "")
    text += '[[contenders]]\nname = "local-sgd"\nrival = "local-sgd"\nsettings = { period = 8 }\n'
    folder = StudyFolder(read(tmp_path, text), tmp_path / "out")
    said: list[str] = []
    assert folder.run([], said.append) == 0, said
    assert folder.cells().missing() == []
    full, ddp, local = (row.cell.result for row in folder.rows())
    # A round of eight steps, after which the same is sent as in a round of DDP.
    assert local.round_s > 8 * 0.05 + 60_000 * 8 / 1e6
    assert local.interface_bytes == pytest.approx(ddp.interface_bytes, rel=0.05)
    # A model of 80 kB over 1 Mbit/s, a little smaller by entropy coding; of two workers each sends half of it twice.
    for each in (full, ddp):
        assert each.round_s > 0.05 + 60_000 * 8 / 1e6
        assert 60_000 < each.interface_bytes < 100_000
    assert folder.run([], said.append) == 0
    assert sum("rounds" in line for line in said) == 3
