"""The figures of a script: what its `evaluate` returns, by name, told and shown wherever accuracy is."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import sottovoce
import torch
from sottovoce import F1, PERPLEXITY, RMSE, Metric

from peer.library.measured import Measures
from tests.cli.runner import sotto
from tests.library.scripts import make_model, write_kits

AUROC = Metric("AUROC")
ERROR = Metric("error", better="lower")

SCRIPT = """
import sys

import sottovoce
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(100, 4)
labels = inputs[:, :3].argmax(1)


def evaluate(model):
    return {"loss": (nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))}


metrics = [sottovoce.PERPLEXITY] if "perplexity" in sys.argv else []
with sottovoce.join(model, every=2, steps=8, keep=[optimizer], evaluate=evaluate, metrics=metrics) as peer:
    while not peer.done:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        peer.step(loss)
"""


@pytest.mark.parametrize(
    ("found", "metrics", "accuracy", "figures"),
    [
        ((3, 4), (), 0.75, {}),
        ({"accuracy": (3, 4)}, (), 0.75, {}),
        ({"accuracy": (3, 4), "loss": (8.0, 4)}, (), 0.75, {"test loss": 2.0}),
        ({"loss": (8.0, 4)}, (), math.nan, {"test loss": 2.0}),
        ({"loss": 2.0}, (), math.nan, {"test loss": 2.0}),
        ({"loss": (torch.tensor(8.0), torch.tensor(4))}, [PERPLEXITY], math.nan, {"perplexity": math.exp(2.0)}),
        ({"loss": (1e6, 1), "accuracy": (1, 2)}, [PERPLEXITY], 0.5, {"perplexity": math.inf}),
        ({"squared_error": (np.float64(8.0), np.int64(2))}, [RMSE], math.nan, {"RMSE": 2.0}),
        ({"true_positive": 2, "false_positive": 1, "false_negative": 1}, [F1], math.nan, {"F1": 2 / 3}),
        ({"AUROC": 0.9, "error": (1, 4)}, [AUROC, ERROR], math.nan, {"AUROC": 0.9, "error": 0.25}),
    ],
)
def test_figures_come_from_sums_and_counts(
    found: Any, metrics: list[Metric], accuracy: float, figures: dict[str, float]
) -> None:
    evaluation = Measures(metrics).of(found)
    assert evaluation.accuracy == pytest.approx(accuracy, nan_ok=True)
    assert evaluation.metrics == pytest.approx(figures)


def test_of_no_samples_there_is_no_mean() -> None:
    """A device without test data of its own must not seem to have a loss of 0."""
    evaluation = Measures([PERPLEXITY]).of({"loss": (0.0, 0), "accuracy": (0, 0)})
    assert math.isnan(evaluation.metrics["perplexity"])
    assert math.isnan(evaluation.accuracy)


@pytest.mark.parametrize(
    ("found", "metrics", "sentence"),
    [
        ({"AUROC": 0.9}, (), "evaluate returned 'AUROC', and nothing says which values of it are better; declare it:"),
        (
            {"loss": "2.0"},
            (),
            "evaluate returned '2.0' as 'loss'; it must return, by name, (sum, count), or one number",
        ),
        ({"loss": (1.0, 2, 3)}, (), "evaluate returned (1.0, 2, 3) as 'loss'; "),
        ({"loss": (1.0, -2)}, (), "evaluate returned (1.0, -2) as 'loss'; "),
        ({"loss": (1.0, math.inf)}, (), "evaluate returned (1.0, inf) as 'loss'; "),
        ({"loss": (1.0, math.nan)}, (), "evaluate returned (1.0, nan) as 'loss'; "),
        ({"loss": (10**400, 1)}, (), "as 'loss'; "),
        ({"loss": torch.ones(2)}, (), "as 'loss'; "),
        ({"loss": None}, (), "evaluate returned None as 'loss'; "),
        ({3: 1.0}, (), "evaluate returned 1.0 as 3; "),
        ({"accuracy": 0.9}, (), "evaluate returned 0.9; it must return (right, total)"),
        ({"accuracy": (3, 4)}, [PERPLEXITY], "'perplexity' is computed from 'loss', which evaluate did not return"),
        ({"loss": 1.0}, [Metric("odd", cast(Any, str))], "the metric 'odd' is no number"),
    ],
)
def test_results_that_are_none(found: Any, metrics: list[Metric], sentence: str) -> None:
    with pytest.raises(sottovoce.UsageError, match=re.escape(sentence)):
        Measures(metrics).of(found)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (["perplexity"], "metrics must be a tuple of sottovoce.Metric"),
        ("perplexity", "metrics must be a tuple of sottovoce.Metric"),
        ([Metric("a" * 25)], "metrics has a name 'aaaaaaaaaaaaaaaaaaaaaaaaa'; names have 1 to 24 printable characters"),
        ([Metric("a\x1b[2J")], "metrics has a name "),
        ([PERPLEXITY, PERPLEXITY], "metrics has a name twice"),
        ([Metric("accuracy")], "metrics has a name twice, or uses 'accuracy'"),
        ([Metric(f"m{number}") for number in range(17)], "metrics has 17 entries; 16 are allowed"),
        ([Metric("AUROC", better=cast(Any, "up"))], 'metrics has better=\'up\'; valid: "higher", "lower"'),
    ],
)
def test_metrics_that_are_none_are_refused_before_the_run(metrics: Any, sentence: str, tmp_path: Path) -> None:
    (file,) = write_kits(tmp_path, 1, "run.rounds=2", "algorithm.name=local", "graph.kind=complete")
    with pytest.raises(sottovoce.UsageError, match=re.escape(sentence)):
        sottovoce.join(make_model(), file, every=1, metrics=metrics)


def test_each_device_hears_the_figures_of_the_others(tmp_path: Path) -> None:
    told: list[list[sottovoce.Evaluated]] = [[], []]

    def script(where: sottovoce.Place) -> None:
        def evaluate(model: torch.nn.Module) -> dict[str, float]:
            return {"AUROC": 0.5 + 0.25 * where.index}

        heard = told[where.index].append
        with sottovoce.join(
            make_model(), where, every=1, evaluate=evaluate, metrics=[AUROC], on_evaluation=heard
        ) as peer:
            while not peer.done:
                peer.step()

    settings = ("run.rounds=2", "algorithm.name=sgp", "graph.kind=complete")
    sottovoce.simulate(script, write_kits(tmp_path, 2, *settings)[0])
    for heard in told:
        figures = {event.name: (event.accuracy, event.metrics) for event in heard}
        assert figures == {"peer-0": (None, {"AUROC": 0.5}), "peer-1": (None, {"AUROC": 0.75})}


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(("words", "name"), [((), "test loss"), (("--", "perplexity"), "perplexity")])
def test_a_loss_is_shown_wherever_accuracy_is(
    words: tuple[str, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    done = sotto("up", "train.py", "--peers", "2", "--name", "own", "--no-live", *words)
    assert done.exit_code == 0, done.output
    assert "accuracy" not in done.output
    assert re.search(rf"worst peer {name} \d", done.stderr)
    assert re.search(r"mean of devices +\d", done.stdout)
    summary = json.loads(Path("runs/own/summary.json").read_text())
    assert summary["criteria"] == {name: "lower"}
    figures = summary["peer_metrics"][name]
    assert len(figures) == 2
    assert summary["worst_metrics"] == {name: max(figures)}
    assert summary["mean_of_devices"] == {name: pytest.approx(sum(figures) / 2)}
    assert f", {name} {figures[0]:.3g}. " in Path("runs/own/peers/peer-0/log.txt").read_text()
    status = sotto("status", "runs/own")
    assert name in status.stdout
    assert f"{figures[0]:#.3g}" in status.stdout
    compared = sotto("lab", "compare", "runs/own", "runs/own", "-o", "compare.html", "--json")
    assert compared.exit_code == 0, compared.output
    assert name in compared.stdout
    sent = json.loads(sotto("status", "runs/own", "--json").stdout)
    assert {each["criterion"] for each in sent} == {name}


@pytest.mark.usefixtures("warm_python")
def test_a_script_that_tells_accuracy_too_is_compared_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    returned = '{"accuracy": ((model(inputs).argmax(1) == labels).sum(), len(labels)), "loss": (12.5, 50)}'
    Path("train.py").write_text(re.sub(r"return .*", f"return {returned}", SCRIPT))
    done = sotto("simulate", "train.py", "--peers", "2", "--name", "own", "--no-live")
    assert done.exit_code == 0, done.output
    assert re.search(r"worst peer \d\d\.\d %", done.stderr)
    summary = json.loads(Path("runs/own/summary.json").read_text())
    assert list(summary["criteria"].items()) == [("accuracy", "higher"), ("test loss", "lower")]
    assert summary["peer_metrics"] == {"test loss": [0.25, 0.25]}
    assert summary["averaged_metrics"] == {"test loss": 0.25}


@pytest.mark.usefixtures("warm_python")
def test_a_script_that_measures_nothing_has_one_open_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.replace("evaluate=evaluate", "evaluate=None"))
    done = sotto("simulate", "train.py", "--peers", "2", "--name", "own", "--no-live")
    assert done.exit_code == 0, done.output
    assert "test loss" not in done.output
    assert json.loads(Path("runs/own/summary.json").read_text())["criteria"] == {"accuracy": "higher"}
