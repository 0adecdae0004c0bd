"""The table at the end of a run and the table of `sotto status`."""

from __future__ import annotations

import csv
import io
import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from peer.report.compare_page import compare_page
from peer.report.compare_table import compare_table
from peer.report.comparison import contenders
from peer.report.metrics_file import write_metrics
from peer.report.run_data import load_run
from peer.report.run_page import render
from peer.report.status_table import status_table
from peer.report.summary_table import summary_table
from peer.report.whole_models import equal_interval, reduction, references
from peer.run.summary import sum_up
from peer.state.metrics import EvaluationRecord, MetricsStore, Summary
from peer.watch.figures import Figures, MetricsFiles
from tests.report.sample_run import round_record, sample_summary, write_sample_run

ABOUT: dict[str, Any] = dict.fromkeys(("name", "algorithm", "compressor", "graph"), "some")
ABOUT |= {"num_peers": 4, "rounds": 40, "seed": 0, "parameters": 0, "seconds": 1.0}


def shown(table: RenderableType) -> str:
    output = io.StringIO()
    Console(file=output, width=140).print(table)
    return output.getvalue()


def test_accuracy_and_traffic_of_a_run() -> None:
    summary = sample_summary(["kitchen", "garage", "[bold]attic"], 1000)
    text = shown(summary_table(summary))
    for figure in (
        "kitchen",
        "[bold]attic",
        "95.0 %",
        "97.2 %",
        "97.5 %",
        "−2.5 pts",
        "128×",
        "55×",
        "0.250",
        "41.0 ms",
        "saved: against whole float32 models in every round",
    ):
        assert figure in text
    assert "ended early" not in text


@pytest.mark.parametrize(
    ("precision", "words"),
    [("float32", "full precision (float32)"), ("bfloat16", "bfloat16 (parameters and"), ("int8", "8 bits (int8")],
)
def test_the_table_says_in_which_precision_the_peers_trained(precision: str, words: str) -> None:
    summary = sample_summary(["a"], 10)
    summary.precision = precision
    assert f"trained in {words}" in shown(summary_table(summary))


def test_the_table_says_what_each_device_chose_and_by_how_much() -> None:
    summary = sample_summary(["a", "b"], 10)
    slow, fast = {"float32": 0.004, "int8": 0.002}, {"float32": 0.001, "int8": 0.0015}
    summary.chosen_precisions = {"a": {"precision": "int8", "step_s": slow}}
    summary.precision = "int8"
    text = shown(summary_table(summary))
    assert "trained in 8 bits (int8 products), the fastest here" in text
    assert "a in int8: 2 ms a step, float32 2.00×" in text
    summary.chosen_precisions["b"] = {"precision": "float32", "step_s": fast}
    summary.precision = "fastest"
    text = shown(summary_table(summary))
    assert "the precision that is fastest on each device: 8 bits (int8 products) on 1, full precision (float32)" in text
    assert "b in float32: 1 ms a step, int8 1.50×" in text
    summary.chosen_precisions["c"] = {"precision": "int4"}
    assert "int4" not in shown(summary_table(summary))


def test_eighty_columns_are_enough() -> None:
    output = io.StringIO()
    summary = sample_summary([f"peer-{i}" for i in range(8)], 1000)
    summary.seconds = 3599
    Console(file=output, width=80).print(summary_table(summary))
    summary.simulated, summary.seconds = True, 7200
    Console(file=output, width=80).print(summary_table(summary))
    assert "…" not in output.getvalue()


def test_what_was_not_measured_is_left_out() -> None:
    summary = sample_summary(["a"], 10)
    summary.socket_bytes = summary.packet_bytes = summary.single_process_accuracy = None
    summary.peer_accuracy = []
    summary.ended = "stopped"
    text = shown(summary_table(summary))
    assert "socket" not in text
    assert "pts" not in text
    assert "ended early: stopped" in text


def test_a_figure_that_nobody_measured_is_no_zero_anywhere(tmp_path: Path) -> None:
    """A training script without `evaluate` judges no sample, and a peer alone sends nothing."""
    run = write_sample_run(tmp_path / "run", rounds=40)
    files = sorted(run.glob("peers/*/state/metrics.sqlite"))
    stores = [MetricsStore(file) for file in [run / "metrics.sqlite", *files]]
    for store in stores:
        store.put(*(replace(row, values=0, payload_bytes=0, entropy_bits=0.0) for row in store.rounds()))
        for row in store.evaluations():
            store.put(replace(row, correct=(0,) * len(row.total), total=(0,) * len(row.total), loss=None))
    names = [f"peer-{index}" for index in range(4)]
    summary = Summary(**ABOUT, peer_names=names)
    sum_up(summary, stores[1:])
    for store in stores:
        store.close()
    summary.save(run / "summary.json")
    document = json.loads((run / "summary.json").read_text())
    nothing = ("worst_accuracy", "averaged_accuracy", "single_process_accuracy", "bits_per_parameter")
    assert [document[key] for key in nothing] == [None] * len(nothing)
    assert [document[key] for key in ("peer_accuracy", "holdout_accuracy", "class_accuracy")] == [[], [], []]
    data = load_run(run)
    write_metrics([data], "evaluations", tmp_path / "evaluations.csv")
    with open(tmp_path / "evaluations.csv", encoding="utf-8") as file:
        assert {row["accuracy"] for row in csv.DictReader(file)} == {""}
    figures = Figures()
    MetricsFiles(run, figures).read()
    assert (figures.curves, figures.average.figures) == ({}, {})
    with closing(MetricsStore(files[0], read_only=True)) as store:
        answer = {"name": "a", **store.last_figures(0)}
    found = contenders([data, data])
    pages = (render(data), compare_page(found))
    for text in (*map(shown, (summary_table(summary), compare_table(found), status_table([answer]))), *pages):
        assert not re.search(r"\b0(\.0+)? %", text)
    assert "not measured" in shown(summary_table(summary))
    assert "averaged model" not in shown(summary_table(summary))
    assert re.search("bits a parameter +–", shown(summary_table(summary)))
    assert re.search("parameters +–", shown(summary_table(summary)))


def test_peers_that_measured_are_compared_without_those_that_did_not() -> None:
    stores = [MetricsStore(None) for _ in range(3)]
    for peer, store in enumerate(stores):
        total = (0 if peer == 1 else 10, 0)
        store.put(round_record(peer, 0, 1))
        store.put(EvaluationRecord(peer=peer, round=1, split="test", correct=(total[0] // 2, 0), total=total))
    summary = Summary(**ABOUT, peer_names=["a", "b", "c"])
    sum_up(summary, stores)
    assert (summary.peer_accuracy, summary.members, summary.class_accuracy) == ([0.5, 0.5], [0, 2], [0.5, None])
    text = shown(summary_table(summary))
    assert re.search(r"^ *a +50\.0 %", text, re.MULTILINE)
    assert not re.search(r"^ *b ", text, re.MULTILINE)
    assert "its class" not in text


def test_a_thousand_peers_do_not_fill_the_screen() -> None:
    text = shown(summary_table(sample_summary([f"peer-{i}" for i in range(1000)], 10)))
    assert len(text.splitlines()) < 30
    assert "median peer" in text
    assert "worst peer" in text


def test_a_sample_of_the_peers_is_called_one() -> None:
    summary = sample_summary([f"peer-{i}" for i in range(1000)], 10)
    summary.peer_accuracy, summary.is_sample = [0.5, 0.6, 0.7] * 20, True
    text = shown(summary_table(summary))
    assert re.search(r"mean, from 60 of 1,000 +60\.0 % ± 2\.1\b", text)
    assert "worst of 60 peers" in text
    assert "worst peer" not in text


def test_the_reduction_is_against_the_same_messages_in_full_precision() -> None:
    summary = sample_summary(["a"], 10)
    assert reduction(summary, summary.payload_bytes) == 4 * 9610 / 300
    assert reduction(summary, 0) is None
    assert reduction(summary, None) is None


def test_other_ways_to_train_are_computed_for_the_rounds_that_were_done() -> None:
    summary = sample_summary(["a", "b", "c"], 100)
    summary.completed_rounds = 64
    mean = 2 * 2 * 4 * 9610
    found = {each.name: each.num_bytes for each in references(summary)}
    assert found["Local SGD, mean in every round"] == 64 * mean
    assert found["Local SGD, mean every 32 rounds"] == 2 * mean
    assert found["local"] == 0
    assert equal_interval(summary) == pytest.approx(64 * mean / summary.payload_bytes)
    summary.payload_bytes = 0
    assert equal_interval(summary) is None


def test_status_shows_what_each_peer_said() -> None:
    training = {"name": "kitchen", "round": 7, "rounds": 10, "loss": 0.5, "accuracy": 0.9, "payload_bytes": 1234}
    answers: list[dict[str, object]] = [
        {**training, "state": "training", "neighbors": 2, "neighbors_up": 1},
        {"name": "garage", "error": "peer 1: cannot be reached", "state": "unreachable"},
        {"index": 2},
    ]
    text = shown(status_table(answers))
    for figure in ("kitchen", "7/10", "0.500", "90.0 %", "1.23 kB", "1/2", "training", "garage", "cannot be reached"):
        assert figure in text


def test_status_shows_the_metric_of_an_own_task_in_the_place_of_accuracy() -> None:
    own = {"criterion": "RMSE", "metrics": {"RMSE": 0.25, "F1": 0.5}, "accuracy": None}
    text = shown(status_table([{"name": "a", **own}, {"name": "b", "state": "unreachable"}]))
    assert "RMSE" in text
    assert "0.250" in text
    assert "accuracy" not in text
    assert "%" not in text


def test_the_table_at_the_end_shows_each_metric_and_marks_the_largest_error_as_the_worst() -> None:
    summary = sample_summary(["a", "b"], 10)
    summary.criteria = {"RMSE": "lower", "accuracy": "higher"}
    summary.peer_metrics, summary.averaged_metrics = {"RMSE": [0.25, 0.75]}, {"RMSE": 0.125}
    summary.single_process_metrics, summary.holdout_metrics = {"RMSE": 0.5}, {"RMSE": [0.3, 0.9]}
    text = shown(summary_table(summary))
    for row in (
        "RMSE", "worst peer +0.750", "worst on its own hold-out +0.900", "averaged model +0.125",
        r"worst − one process +\+0.250", "test accuracy", "worst peer +95.0 %",
    ):  # fmt: skip
        assert re.search(row, text), row


def test_status_names_neighbours_that_break_the_protocol_and_says_once_what_to_do() -> None:
    offender = {"name": "attic", "offences": 3, "last": "its checksum is wrong", "advice": "exclude it"}
    answers = [{"name": "kitchen", "offenders": [offender]}, {"name": "garage", "offenders": [offender]}, {"name": "x"}]
    lines = shown(status_table(answers)).splitlines()
    for peer in ("kitchen", "garage"):
        assert f"{peer}: attic has broken the protocol 3 times, most recently: its checksum is wrong" in " ".join(lines)
    assert lines.count("attic: exclude it") == 1


def test_status_names_peers_of_different_releases() -> None:
    answers = [{"name": "kitchen", "version": "0.2.0"}, {"name": "garage", "version": "0.2.0"}, {"index": 2}]
    assert "runs" not in shown(status_table(answers))
    answers[2] = {"name": "attic", "version": "0.1.0"}
    assert "attic runs 0.1.0, the others 0.2.0: what came with the newer one waits for all" in shown(
        status_table(answers)
    )


def test_only_asynchronous_runs_have_a_staleness() -> None:
    summary = sample_summary(["a"], 10)
    assert "staleness" not in shown(summary_table(summary))
    summary.exchanges, summary.staleness, summary.most_staleness = 3200, 1.98, 9.0
    text = shown(summary_table(summary))
    assert "3,200" in text
    assert "1.98" in text
    assert "most 9" in text
    answers = [{"name": "a", "exchanges": 417, "staleness": 1.98}, {"name": "b", "state": "unreachable"}]
    text = shown(status_table(answers))
    assert "1.98" in text
    assert "staleness" not in shown(status_table([{"name": "a", "round": 3}]))


def test_a_peer_that_diverged_is_told_of_once_with_who_says_so() -> None:
    claim = {"name": "garage", "round": 20, "reason": "the loss is too high", "told_by": "attic"}
    text = shown(status_table([{"name": "a", "diverged": [claim]}, {"name": "b", "diverged": [claim]}]))
    assert text.count("garage diverged after 20 rounds, attic says: the loss is too high") == 1


def test_a_simulation_tells_both_clocks() -> None:
    summary = sample_summary(["a"], 100)
    summary.simulated = True
    words = " ".join(shown(summary_table(summary)).split())
    for figure in ("real time 41 s", "virtual time 4.1 s", "a virtual round 41.0 ms"):
        assert figure in words
    assert "local SGD" not in words, "one peer has nobody to average with"


def test_status_says_which_limit_of_a_device_is_reached_and_until_when() -> None:
    reached = [{"reason": "outside its hours", "until": "2026-12-01 22:00+01:00"}, {"reason": "hot", "until": None}]
    limits = {"then": "pause", "reached": reached, "warnings": ["nearly used"]}
    text = shown(status_table([{"name": "a", "limits": limits}, {"name": "b"}]))
    assert "a is paused until 2026-12-01 22:00+01:00: outside its hours" in text
    assert "a is paused: hot" in text
    assert "a: nearly used" in text


def test_the_status_says_what_privacy_spent() -> None:
    privacy = {"epsilon": 1.234, "delta": 1e-5, "limit": 3.0, "noise_multiplier": 1.5}
    text = shown(status_table([{"name": "a", "privacy": privacy}, {"name": "b", "privacy": None}]))
    assert "a has spent at most ε = 1.23 of 3 (δ = 1e-05)" in text
    unlimited = shown(status_table([{"name": "a", "privacy": {**privacy, "limit": None}}]))
    assert "a has spent at most ε = 1.23 (δ = 1e-05)" in unlimited


def test_the_status_says_in_which_precision_a_device_chose_to_train() -> None:
    chosen = {"precision": "bfloat16", "step_s": {"float32": 0.003, "bfloat16": 0.002}}
    text = shown(status_table([{"name": "a", "precision": chosen}, {"name": "b", "precision": None}, {"name": "c"}]))
    assert "a trains in bfloat16: 2 ms a step, float32 1.50×" in text
    assert "b trains in" not in text
    assert "trains in" not in shown(status_table([{"name": "a", "precision": {"precision": "[bold]"}}]))
