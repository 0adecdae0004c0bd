"""Several runs beside each other: which belong together, where their curves lie, what it took them, what differs."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from rich.console import Console

from peer.cli.results import metrics
from peer.errors import ConfigError, StateError
from peer.records import ACCURACY, Criterion, RoundRecord
from peer.report.compare_page import compare_page
from peer.report.compare_table import compare_table, result_tables, target_rows
from peer.report.comparison import Contender, Spread, comparison_lines, contenders, differences, style, target
from peer.report.curves import worst_figure
from peer.report.line_chart import Axis, Line
from peer.report.metrics_file import TABLES, write_metrics
from peer.report.run_data import RunData, load_run
from peer.report.terminal_chart import terminal_chart
from peer.state.metrics import EvaluationRecord, MetricsStore, Summary
from tests.cli.runner import sotto
from tests.report.sample_run import sample_summary

ROUNDS = 40


def worst_accuracy(run: RunData) -> list[tuple[int, float]]:
    return worst_figure(run, ACCURACY)


def write_run(
    folder: Path,
    accuracy: Mapping[int, float],
    *,
    seed: int = 0,
    algorithm: str = "quant-sgp",
    frame_bytes: int = 100,
    round_s: float = 0.5,
) -> Path:
    """Write a run of two peers; `accuracy` is that of the worse one by completed rounds."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'[run]\nname = "{folder.name}"\nseed = {seed}\n[algorithm]\nname = "{algorithm}"\n[data]\nskew = 0.5\n'
        f'[peer]\nindex = {seed}\n[[peers]]\nname = "a{seed}"\n'
    )
    store = MetricsStore(folder / "metrics.sqlite")
    for peer in (0, 1):
        for t in range(ROUNDS):
            row = RoundRecord(
                peer=peer, round=t, time_s=round_s * (t + 1), loss=1 / (t + 1 + seed), frame_bytes=frame_bytes
            )
            store.put(row)
        for done, value in accuracy.items():
            correct = round(1000 * value) + (50 if peer else 0)
            store.put(EvaluationRecord(peer=peer, round=done, split="test", correct=(correct,), total=(1000,)))
    store.close()
    summary = sample_summary(["a", "b"], ROUNDS)
    summary.seed, summary.algorithm = seed, algorithm
    summary.peer_accuracy = [accuracy[max(accuracy)], accuracy[max(accuracy)] + 0.05]
    summary.save(folder / "summary.json")
    return folder


@pytest.fixture
def found(tmp_path: Path) -> list[Contender]:
    """Two seeds of one configuration, one run of another one, which sends a hundred times as much."""
    runs = [
        write_run(tmp_path / "sgp-1", {10: 0.5, 20: 0.7, 40: 0.9}, seed=1),
        write_run(tmp_path / "dpsgd", {10: 0.8, 20: 0.85, 40: 0.88}, algorithm="d-psgd", frame_bytes=10_000),
        write_run(tmp_path / "sgp-2", {10: 0.6, 20: 0.8, 40: 0.8}, seed=2),
    ]
    return contenders([load_run(run) for run in runs])


def test_runs_that_differ_in_their_seed_alone_are_one_contender(found: list[Contender]) -> None:
    assert [each.name for each in found] == ["sgp", "dpsgd"]
    assert [[run.directory.name for run in each.runs] for each in found] == [["sgp-1", "sgp-2"], ["dpsgd"]]
    assert differences(found) == [("algorithm.name", ["quant-sgp", "d-psgd"])]


def test_runs_of_unknown_configuration_are_never_put_together(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / name / "run", {40: 0.5})) for name in "ab"]
    assert len(contenders(runs)) == 1
    for run in runs:
        run.config = None
    assert [each.name for each in contenders(runs)] == ["run (1)", "run (2)"]
    runs[0].config = "not TOML ="
    assert len(contenders(runs)) == 2


def test_the_number_of_peers_and_the_kind_of_clock_tell_runs_apart(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / f"r{number}", {40: 0.5}, seed=number)) for number in range(3)]
    for run, (peers, simulated) in zip(runs, ((2, False), (3, False), (2, True)), strict=True):
        assert run.summary is not None
        run.summary.num_peers, run.summary.simulated = peers, simulated
    assert len(contenders(runs)) == 3
    assert dict(differences(contenders(runs))) == {"peers": ["2", "3", "2"], "simulated": ["no", "no", "yes"]}


def test_scripts_with_one_seed_stay_apart(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / name, {40: 0.5}, seed=1)) for name in ("slow", "fast")]
    for run in runs:
        run.config = '[training]\ntask = "loop"\n'
    assert [each.name for each in contenders(runs)] == ["slow", "fast"]


def test_a_curve_is_the_mean_of_the_seeds_with_their_range(found: list[Contender]) -> None:
    axis, lines = comparison_lines(found, worst_accuracy, "round")
    assert axis is not None
    assert [(line.label, line.style) for line in lines] == [("sgp", "run-0"), ("dpsgd", "run-1")]
    np.testing.assert_allclose(lines[0].points, [(10, 0.55), (20, 0.75), (40, 0.85)])
    np.testing.assert_allclose(lines[0].band, [(10, 0.5, 0.6), (20, 0.7, 0.8), (40, 0.8, 0.9)])
    assert lines[1].band == ()
    assert not axis.log


def test_curves_of_very_different_length_have_a_logarithmic_axis(found: list[Contender]) -> None:
    axis, lines = comparison_lines(found, worst_accuracy, "bytes")
    assert axis is not None
    assert [line.points[-1][0] for line in lines] == [100 * ROUNDS, 10_000 * ROUNDS]
    assert axis.log
    by_time, _ = comparison_lines(found, worst_accuracy, "time")
    assert by_time is not None
    assert not by_time.log


def test_the_target_is_what_all_reach_in_all_their_runs(found: list[Contender]) -> None:
    reached = target(found)
    assert reached is not None
    assert (reached.criterion, reached.value) == (ACCURACY, 0.8)
    # One seed has it after 40 rounds, the other after 20; d-psgd after 10.
    assert reached.reached["sgp"]["round"] == Spread(30, 20, 40)
    assert reached.reached["dpsgd"]["round"] == Spread(10, 10, 10)
    assert reached.reached["dpsgd"]["bytes"] == Spread(100_000, 100_000, 100_000)
    assert reached.reached["dpsgd"]["time"] == Spread(5, 5, 5)
    heads, rows = target_rows(reached)
    assert heads == ["run", "rounds", "bytes of a peer", "time"]
    assert rows[0] == ["sgp", "30 (20–40)", "3.00 kB (2.00–4.00)", "15 s (10–20)"]


def test_lower_figures_may_be_better(found: list[Contender]) -> None:
    for each in found:
        for run in each.runs:
            assert run.summary is not None
            run.summary.criteria = {"RMSE": "lower"}
            run.evaluations = [replace(row, metrics={"RMSE": 1 - row.accuracy}) for row in run.evaluations]
    reached = target(found)
    assert reached is not None
    # The worse peer of each has the larger error: 0.2 is the least that all of them come down to.
    assert (reached.criterion, reached.value) == (Criterion("RMSE", "lower"), pytest.approx(0.2))
    assert reached.reached["dpsgd"]["round"] == Spread(10, 10, 10)
    text = shown(found)
    assert "until the worst peer has 0.200" in text
    assert "RMSE of the worst peer by round" in text


def test_without_evaluations_there_is_no_target(found: list[Contender]) -> None:
    found[1].runs[0].evaluations = []
    assert target(found) is None
    assert "until the worst peer" not in shown(found)


def test_results_have_mean_and_range_and_no_column_that_is_empty(found: list[Contender]) -> None:
    (_, (heads, rows)), _ = result_tables(found)
    assert heads == ["run", "seeds", "worst peer", "averaged", "one process"]
    assert rows[0][:3] == ["sgp", "2", "85.0 % (80.0–90.0)"]
    for each in found:
        for run in each.runs:
            assert run.summary is not None
            run.summary.socket_bytes = None
    assert "socket" not in result_tables(found)[1][1][0]
    assert "seeds" not in result_tables(found[1:])[0][1][0]


def shown(found: list[Contender], width: int = 80) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(compare_table(found))
    return output.getvalue()


def test_the_terminal_shows_tables_and_curves(found: list[Contender]) -> None:
    text = shown(found)
    for part in ("85.0 %", "until the worst peer has 80.0 %", "algorithm.name", "Accuracy of the worst peer by bytes"):
        assert part in text
    assert re.search("[⠁-⣿]", text)
    assert max(map(len, text.splitlines())) <= 80


def test_names_are_neither_markup_nor_html(tmp_path: Path) -> None:
    names = ("[red]a", "<b>b")
    runs = [load_run(write_run(tmp_path / name, {40: 0.5}, algorithm=name)) for name in names]
    assert "[red]a" in shown(contenders(runs))
    page = compare_page(contenders(runs))
    assert "<b>b" not in page
    assert "&lt;b&gt;b" in page


def test_the_page_has_all_curves_and_their_ranges(found: list[Contender]) -> None:
    page = compare_page(found)
    assert page.count('class="plot"') == 2 * 3, "accuracy of the averaged model was not recorded"
    assert 'class="band run-0"' in page
    assert "Not recorded." in page
    assert "Until the worst peer has 80.0 %" in page


def test_a_ninth_contender_is_dashed() -> None:
    assert [style(number) for number in (0, 7, 8)] == ["run-0", "run-7", "dashed run-0"]


def test_a_terminal_chart_goes_up_where_values_do() -> None:
    line = Line(label="a", points=[(0, 1), (10, 100), (20, float("nan"))], style="run-0")
    plain = terminal_chart("t", [line], Axis(label="round", unit="count"), Axis(label="loss", log=True), width=40).plain
    rows = plain.splitlines()[1:13]
    assert rows[0].startswith("100 ┤")
    assert rows[-1].startswith("  1 ┤")
    columns = [row.find(next(iter(re.findall("[⠁-⣿]", row)))) for row in rows]
    assert columns == sorted(columns, reverse=True)
    assert plain.splitlines()[-1].split() == ["0", "round", "10"]
    assert not terminal_chart("t", [], Axis(label="x"), Axis(label="y"), width=40)


def test_curves_in_a_terminal_have_letters() -> None:
    lines = [Line(label=name, points=[(0, low), (10, low + 1)], style="run-0") for name, low in (("x", 0), ("y", 5))]
    plain = terminal_chart("", lines, Axis(label=""), Axis(label=""), width=40).plain
    assert sorted(re.findall("[a-z]", plain)) == ["a", "b"]


def test_compare_writes_page_and_json(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, {40: 0.5}, algorithm=name)) for name in ("a", "b")]
    page = tmp_path / "c.html"
    answer = json.loads(sotto("lab", "compare", *runs, "-o", str(page), "--json").stdout)
    assert [each["name"] for each in answer["contenders"]] == ["a", "b"]
    assert answer["differences"] == {"algorithm.name": {"a": "a", "b": "b"}}
    assert answer["target"]["value"] == 0.5
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert sotto("lab", "compare", *runs, "-o", str(tmp_path / "no" / "c.html")).exit_code == 5
    assert sotto("lab", "compare", str(tmp_path / "nothing")).exit_code == 5


@pytest.fixture
def two_runs(tmp_path: Path) -> list[RunData]:
    return [load_run(write_run(tmp_path / name, {20: 0.25, 40: 0.5})) for name in ("a", "b")]


def test_metrics_as_csv_hold_every_row(two_runs: list[RunData], tmp_path: Path) -> None:
    assert write_metrics(two_runs, "rounds", tmp_path / "m.csv") == 2 * 2 * ROUNDS
    with open(tmp_path / "m.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * ROUNDS
    last = rows[-1]
    assert (last["run"], last["peer_name"], last["peer"], last["round"]) == ("b", "b", "1", str(ROUNDS - 1))
    assert float(last["loss"]) == 1 / ROUNDS
    assert last["theta"] == ""


def test_metrics_as_parquet_keep_numbers_lists_and_what_is_missing(two_runs: list[RunData], tmp_path: Path) -> None:
    file = tmp_path / "m.parquet"
    write_metrics(two_runs, "rounds", file)
    rounds = pyarrow.parquet.read_table(file)
    assert rounds.num_rows == 2 * 2 * ROUNDS
    assert str(rounds.schema.field("loss").type) == "double"
    assert str(rounds.schema.field("frame_bytes").type) == "int64"
    assert rounds.column("theta").null_count == rounds.num_rows
    write_metrics(two_runs, "evaluations", file)
    evaluations = pyarrow.parquet.read_table(file).to_pylist()
    assert len(evaluations) == 2 * 2 * 2
    assert [evaluations[-1][name] for name in ("run", "round", "correct", "accuracy")] == ["b", 40, [550], 0.55]


def test_unreadable_metrics_are_an_error_and_never_fewer_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {ROUNDS: 0.5})
    file = run / "peer-9" / "state" / "metrics.sqlite"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no database" * 100)
    with pytest.raises(StateError, match=r"peer-9/state/metrics\.sqlite cannot be read"):
        write_metrics([load_run(run)], "rounds", tmp_path / "m.csv")
    assert not (tmp_path / "m.csv").exists()


def test_a_spreadsheet_takes_no_name_for_a_formula(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "=1+1", {ROUNDS: 0.5}))
    write_metrics([run], "rounds", tmp_path / "m.csv")
    with open(tmp_path / "m.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"'=1+1"}
    assert {float(row["loss"]) for row in rows} == {row.loss for row in run.rounds}, "numbers stay numbers"


def test_every_table_can_be_written_and_named(two_runs: list[RunData], tmp_path: Path) -> None:
    choice = next(parameter for parameter in metrics.params if parameter.name == "table")
    assert list(choice.type.choices) == list(TABLES)
    for table in TABLES:
        for ending in ("csv", "parquet"):
            write_metrics(two_runs, table, tmp_path / f"m.{ending}")
    with pytest.raises(ConfigError, match="ending of no known format"):
        write_metrics(two_runs, "rounds", tmp_path / "m.xls")
    assert not (tmp_path / "m.xls").exists()


def test_sotto_metrics_tells_what_it_wrote(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {40: 0.5})
    result = sotto("lab", "metrics", str(run), "-o", str(tmp_path / "m.csv"))
    assert result.stdout == f"wrote {tmp_path / 'm.csv'}: {2 * ROUNDS} rows\n"
    answer = json.loads(
        sotto("lab", "metrics", str(run), "-o", str(tmp_path / "m.csv"), "-t", "links", "--json").stdout
    )
    assert answer["rows"] == 0
    assert sotto("lab", "metrics", str(run), "-o", str(tmp_path / "no" / "m.csv")).exit_code == 2


def test_a_summary_without_a_run_is_compared_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", {40: 0.5})
    (folder / "metrics.sqlite").unlink()
    assert isinstance(Summary.load(folder / "summary.json"), Summary)
    found = contenders([load_run(folder)])
    assert target(found) is None
    assert "50.0 %" in shown(found)
