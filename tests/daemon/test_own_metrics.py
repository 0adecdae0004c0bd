"""Peers of a task with metrics of its own: each tells the others its figures, and shows the worst of all."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from peer.config.options import load
from peer.daemon.process import open_peer
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.state.metrics import MetricsStore
from tests.cli.runner import sotto

pytestmark = pytest.mark.usefixtures("warm_python")

JOB = (
    "run.rounds=30",
    "evaluation.every_rounds=10",
    "training.task=tests.train.measured_tasks:regression",
    "training.warmup_rounds=0",
    "training.learning_rate=0.05",
    "data.holdout_fraction=0.2",
)


def test_peers_tell_each_other_their_metrics(tmp_path: Path) -> None:
    hosts = [Host("127.0.0.1", port) for port in free_ports(2)]
    files = write_cluster(tmp_path, load(environment={}, overrides=(*JOB, "transport.linger_s=5")), hosts)
    peers = [open_peer(load(file, environment={}), file.parent) for file in files]

    async def together() -> list[int]:
        return await asyncio.gather(*(peer.main() for peer in peers))

    try:
        assert asyncio.run(together()) == [0, 0]
        statuses = [peer.parts.operator.status() for peer in peers]
    finally:
        for peer in peers:
            peer.close()
    for status in statuses:
        assert (status["criterion"], status["accuracy"]) == ("RMSE", None)
        assert json.loads(json.dumps(status))["metrics"].keys() == {"RMSE", "test loss", "perplexity"}
    figures = [status["metrics"]["RMSE"] for status in statuses]  # type: ignore[index]
    for status in statuses:
        worst = status["worst"]
        assert isinstance(worst, dict)
        assert worst["metrics"]["RMSE"] == max(figures), "the larger error, of whichever peer it is"
    for file in files:
        rows = MetricsStore(file.parent / "state" / "metrics.sqlite", read_only=True).evaluations()
        assert {row.split for row in rows} == {"test", "holdout"}
        assert all(row.metrics["RMSE"] > 0 for row in rows)


def test_a_simulation_shows_them_wherever_accuracy_is(tmp_path: Path) -> None:
    settings = [word for setting in JOB for word in ("--set", setting)]
    shown = sotto("simulate", "--peers", "3", "--runs-dir", str(tmp_path), "--name", "lines", "--no-live", *settings)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"worst peer RMSE \d", shown.stderr)
    assert re.search(r"worst peer +\d[\d.]*\s", shown.stdout)
    assert "accuracy" not in shown.output
    summary = json.loads((tmp_path / "lines" / "summary.json").read_text())
    assert next(iter(summary["criteria"].items())) == ("RMSE", "lower")
    assert summary["worst_metrics"]["RMSE"] == max(summary["peer_metrics"]["RMSE"])
    assert summary["single_process_metrics"]["RMSE"] > 0
    assert len(summary["holdout_metrics"]["RMSE"]) == 3
    assert (summary["peer_accuracy"], summary["averaged_accuracy"]) == ([], None)
    page = (tmp_path / "lines" / "report.html").read_text()
    for text in (
        "RMSE by round",
        "Perplexity by round",
        "Worst peer, RMSE",
        "test RMSE",
        "hold-out RMSE",
        "Lower values",
    ):
        assert text in page, text
    assert "Accuracy by" not in page


@pytest.mark.slow
def test_peers_on_this_machine_show_them_too(tmp_path: Path) -> None:
    settings = [word for setting in JOB for word in ("--set", setting)]
    shown = sotto("up", "--peers", "2", "--runs-dir", str(tmp_path), "--name", "lines", "--no-live", *settings)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"averaged RMSE \d", shown.stderr)
    assert "accuracy" not in shown.output
    summary = json.loads((tmp_path / "lines" / "summary.json").read_text())
    assert summary["averaged_metrics"]["RMSE"] > 0
    assert summary["single_process_metrics"]["RMSE"] > 0
