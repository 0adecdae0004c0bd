"""The bandwidth study: its files, its cells, and what it makes of them. The runs themselves need root and minutes."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import itertools
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bandwidth_study
from bandwidth import cell, elias_gamma, other_work, plan, predict, tables
from links.measure import Measured
from links.profiles import Profile, find

from peer.errors import ConfigError
from peer.simulate import run as simulator
from peer.state.metrics import MetricsStore, RoundRecord

STUDIES = Path(bandwidth_study.__file__).parent / "studies"

SMALL = """
name = "small"
title = "two algorithms"
peers = 4
step_s = 0.5
seeds = [0]
profiles = ["10mbit", "moniqua-1mbit-1ms"]
model = "resnet20"
cell_s = 5
least_rounds = 3
most_rounds = 20
job = ["training.task=synthetic", "training.task_options.parameters=20000", "graph.kind=ring"]

[[contenders]]
name = "full"
options = ["algorithm.name=d-psgd", "compressor.kind=none"]
paper = "last"

[[contenders]]
name = "ddp"
rival = "ddp"
"""


@pytest.fixture
def study(tmp_path: Path) -> plan.Study:
    return read(tmp_path, SMALL)


def read(folder: Path, text: str) -> plan.Study:
    file = folder / "study.toml"
    file.write_text(text)
    return plan.read_plan(file)


def result(**changes: Any) -> cell.CellResult:
    figures = {item: 1.0 for item in cell.CellResult.__dataclass_fields__ if item not in ("rounds", "loss_curve")}
    return cell.CellResult(**{**figures, "rounds": 10, "loss_curve": ((0.0, 5.0, 2.0), (1.0, 9.0, 1.0)), **changes})


def test_every_study_of_ours_can_be_read_and_its_jobs_are_valid() -> None:
    for file in STUDIES.glob("*.toml"):
        study = plan.read_plan(file)
        for contender in study.contenders:
            if contender.rival is None:
                assert study.config(contender, 0, 5).peer.min_step_s == study.step_s
                if study.target_job:
                    assert study.target_config(contender, 0).evaluation.every_rounds > 0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"10mbit"', '"11mbit"', "there is no link profile '11mbit'"),
        ("peers = 4", "peers = true_", "TOML"),
        ("cell_s = 5", "", "cell_s: is missing"),
        ("cell_s = 5", "cells = 5", "no such key"),
        ('name = "ddp"', 'name = "full"', "same name"),
        ('rival = "ddp"', 'rivals = "ddp"', "is no contender"),
        ('rival = "ddp"', 'rival = "dpp"', "no such rival"),
    ],
)
def test_what_is_wrong_with_a_study_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        read(tmp_path, SMALL.replace(old, new))


def test_a_study_goes_on_with_what_is_missing(study: plan.Study, tmp_path: Path) -> None:
    bench = bandwidth_study.Bench(study, tmp_path / "out")
    assert len(bench.missing()) == 4
    (tmp_path / "out" / "cells" / "full--10mbit--0.json").write_text("{}")
    assert [(contender.name, profile) for contender, profile, _ in bench.missing()] == [
        ("ddp", "10mbit"),
        ("full", "moniqua-1mbit-1ms"),
        ("ddp", "moniqua-1mbit-1ms"),
    ]


def test_cells_can_be_chosen_by_contender_and_by_profile(study: plan.Study) -> None:
    def chosen(*only: str) -> list[tuple[str, str]]:
        return [(contender.name, profile) for contender, profile, _ in study.cells(only)]

    assert chosen("ddp", "10mbit") == [("ddp", "10mbit")]
    assert chosen("ddp") == [("ddp", "10mbit"), ("ddp", "moniqua-1mbit-1ms")]
    assert chosen("10mbit") == [("full", "10mbit"), ("ddp", "10mbit")]
    with pytest.raises(ConfigError, match=r"--only: is neither .* full, ddp, 10mbit, moniqua-1mbit-1ms"):
        chosen("dpp")


def test_the_simulator_says_how_long_a_round_takes(study: plan.Study) -> None:
    config = study.config(study.contenders[0], 0, 4)
    thin = predict.predict(config, 4, find("moniqua-1mbit-1ms"), 0.5, predict.frame_bytes(config, 4))
    # Two models of 80 kB, which entropy coding makes a little smaller, over an upload of 1 Mbit/s.
    assert 0.5 + 2 * 60_000 * 8 / 1e6 < thin.round_s < 0.5 + 2 * 80_000 * 8 * 1.046 / 1e6
    assert thin.link_share == pytest.approx(1 - 0.5 / thin.round_s)


@pytest.mark.parametrize("options", [(), ("algorithm.name=allreduce", "graph.kind=complete", "graph.weights=uniform")])
def test_what_the_simulator_says_of_a_round_needs_no_training(
    study: plan.Study, tmp_path: Path, options: tuple[str, ...]
) -> None:
    contender = plan.Contender(name="one", options=(*study.contenders[0].options, *options))
    config, profile = study.config(contender, 0, 4), find("moniqua-1mbit-1ms")
    link_bytes = predict.frame_bytes(config, 4)
    assert 60_000 < link_bytes < 80_000
    simulator.run(
        config, Path(), num_peers=5, directory=tmp_path, step_s=0.5, links=predict.link_model(profile), baseline=False
    )
    with contextlib.closing(MetricsStore(tmp_path / "metrics.sqlite", read_only=True)) as store:
        ends = [record.time_s for record in store.rounds() if record.peer == 0]
    predicted = predict.predict(config, 5, profile, 0.5, link_bytes)
    assert predicted.round_s == pytest.approx((ends[-1] - ends[0]) / 3, rel=0.01)


def test_a_cell_has_as_many_rounds_as_fit(study: plan.Study, tmp_path: Path) -> None:
    bench = bandwidth_study.Bench(study, tmp_path / "out")
    fast, slow = (bench.prediction(study.contenders[0], profile) for profile in study.profiles)
    assert fast[1] == 8
    assert slow[1] == 3
    # Computed once, then read.
    assert bench.prediction(study.contenders[0], study.profiles[0]) == fast


def test_figures_of_a_cell_leave_the_first_round_out() -> None:
    def row(peer: int, round_: int, time_s: float) -> RoundRecord:
        return RoundRecord(peer=peer, round=round_, time_s=time_s, loss=2.0 - round_, frame_bytes=100, train_s=0.1)

    records = [[row(peer, 0, 9.0), row(peer, 1, 10.0), row(peer, 2, 11.0 + peer)] for peer in range(2)]
    link = Measured(
        sender=0, receiver=1, asked_kbit=1, goodput_kbit=1, asked_round_trip_ms=1, round_trip_ms=1,
        least_round_trip_ms=1,
    )  # fmt: skip
    found = cell.summarize(records, [600, 900], 1, link)
    assert found.round_s == pytest.approx(1.25)
    assert found.rounds == 2
    assert found.mean_round_s == pytest.approx(1.25)
    assert found.interface_bytes == 250
    assert found.loss_curve[-1] == (11.5, 300.0, 0.0)


def test_a_cell_begins_when_the_last_process_has_held_up_everybody(study: plan.Study) -> None:
    ring = study.config(study.contenders[0], 0, 4)
    assert cell.settle_rounds(ring, 8) == 1 + 4
    both = ("algorithm.name=allreduce", "graph.kind=complete", "graph.weights=uniform", "compressor.kind=none")
    assert cell.settle_rounds(study.config(plan.Contender(name="all", options=both), 0, 4), 8) == 1 + 1


def test_messages_are_weighed_once_they_are_like_all_that_follow(study: plan.Study) -> None:
    modulo = ("algorithm.name=moniqua", "compressor.kind=modulo", "compressor.bits=8", "algorithm.theta_value=0.05")
    config = study.config(plan.Contender(name="modulo", options=modulo), 0, 4)
    # Codes are told against those of the round before, which the first message has not.
    assert predict.frame_bytes(config, 4) < 0.9 * predict.frame_bytes(config, 4, rounds=1)


@pytest.mark.parametrize("places", [[0, 1], [5, 6, 7, 300, 100_000], list(range(3, 5000, 7))])
def test_places_come_back_from_gamma_codes(places: list[int]) -> None:
    codes = elias_gamma.encode_places(np.array(places))
    assert elias_gamma.decode_places(codes).tolist() == places
    # A gap of b bits takes 2 b − 1; the first place and the number of bits take 16 bytes.
    bits = sum(2 * (after - before).bit_length() - 1 for before, after in itertools.pairwise(places))
    assert codes.size == (bits + 7) // 8 + 16


@pytest.mark.parametrize(("program", "package"), [("hivemind", "hivemind"), ("decentralizepy", "zmq")])
def test_a_rival_whose_package_is_missing_says_what_to_install(program: str, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    file = Path(bandwidth_study.__file__).parent / "bandwidth" / f"{program}_program.py"
    done = subprocess.run([sys.executable, str(file), "{}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install --target" in done.stderr.splitlines()[-1]


def test_what_others_compute_is_told_from_what_children_of_ours_did() -> None:
    burn = "import sys, time\nwhile time.process_time() < 0.4: pass\nprint(flush=True); sys.stdin.read()"
    before = other_work.others_cpu_s()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = other_work.others_cpu_s()
    assert running - before > 0.3
    # It has ended, and is one of ours.
    assert other_work.others_cpu_s() - running < -0.2


def test_report_holds_tables_curves_and_figures(study: plan.Study, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bench = bandwidth_study.Bench(study, out)
    thin = "moniqua-1mbit-1ms"
    for name, profile, round_s in (("full", thin, 2.0), ("ddp", thin, 4.0), ("full", "unshaped", 0.1)):
        row = {"contender": name, "profile": profile, "seed": 0, "peers": 4, "step_s": 0.5, "load": 1.0}
        row |= asdict(result(round_s=round_s)) | {"others_cpus": 0.01, "commit": "c"}
        (out / "cells" / f"{name}--{profile}--0.json").write_text(json.dumps(row))
    page = bench.report([]).read_text()
    assert thin in page
    assert page.count("<svg") >= 2
    # 0.1 s without limits and 1.1 s of links, where 2 s were measured and the links take most of the round: marked.
    assert re.search(r"-3\d\.\d% !", page)
    assert "92%" in page
    lines = list(csv.DictReader((out / "results.csv").open()))
    assert [(line["contender"], line["seconds_for_100_rounds"]) for line in lines] == [
        ("full", "200.0"),
        ("ddp", "400.0"),
    ]
    assert len(json.loads((out / "results.json").read_text())["cells"]) == 2


def test_time_to_a_target_is_rounds_by_seconds() -> None:
    row = {**asdict(result(round_s=2.0, interface_bytes=10.0)), "rounds_to_target": 30, "predicted_round_s": 1.5}
    found = tables.derived(row)
    assert (found["seconds_to_target"], found["bytes_to_target"], found["error"]) == (60.0, 300.0, -0.25)


def test_virtual_links_have_the_figures_of_their_profile() -> None:
    model = predict.link_model(Profile(up_kbit=768, down_kbit=1600, latency_ms=75))
    assert (model.up_kbit_s, model.down_kbit_s, model.latency_s) == (768, 1600, 0.075)
    assert predict.link_model(find("unshaped")).up_kbit_s is None
