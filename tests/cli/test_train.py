"""Commands that train: run folders, figures, exit codes. The simulator does the training; real processes are tested
where they live."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from peer.cli.training_run import choose_directory, open_view, with_live_page
from peer.config.options import load
from peer.errors import ConfigError
from peer.ops.local_cluster import Cluster
from peer.records import PeerProgress, Progress
from peer.report import live
from peer.terminal import command
from peer.train import baseline
from tests.cli.runner import sotto

SMALL = ("-n", "2", "--rounds", "6", "-s", "evaluation.every_rounds=3", "-s", "training.warmup_rounds=0", "--no-live")


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_simulation_leaves_a_whole_run_folder() -> None:
    result = sotto("simulate", *SMALL, "--name", "small", "--seed", "5", "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    folder = Path("runs/small")
    assert answer["directory"] == str(folder)
    assert answer["rounds"] == 6
    assert answer["seed"] == 5
    assert answer["worst_accuracy"] == min(answer["peer_accuracy"])
    assert answer["payload_bytes"] > 0
    files = {"config.toml", "graph.svg", "metrics.sqlite", "model.safetensors", "report.html", "summary.json"}
    assert files <= {path.name for path in folder.iterdir()}
    assert load(folder / "config.toml", environment={}).run.rounds == 6
    assert json.loads((folder / "summary.json").read_text())["payload_bytes"] == answer["payload_bytes"]
    assert answer["simulated"]
    assert answer["commands"] == ["sotto simulate " + " ".join((*SMALL, "--name", "small", "--seed", "5", "--json"))]
    age = datetime.now(UTC) - datetime.fromisoformat(answer["started_at"])
    assert 0 <= age.total_seconds() < 600
    # Six local steps of 10 ms of virtual time, whatever they took.
    assert (answer["completed_rounds"], answer["training_seconds"]) == (6, pytest.approx(0.06))
    assert answer["seconds"] != answer["training_seconds"]
    page = (folder / "report.html").read_text()
    assert "quant-sgp" in page
    assert "--name small" in page
    assert "<polyline" in page


@pytest.mark.parametrize("command", ["up", "simulate"])
def test_a_quiet_run_prints_its_figures_alone(command: str) -> None:
    result = sotto(command, *SMALL[:-1], "--quiet", "--no-baseline")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "worst peer" in result.stdout


@pytest.mark.parametrize("command", ["up", "simulate"])
def test_ctrl_c_before_a_run_begins_leaves_no_folder(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("peer.report.graph_view.svg", interrupted)
    assert sotto(command, *SMALL, "--name", "early").exit_code != 0
    assert not Path("runs/early").exists()


def test_a_second_ctrl_c_keeps_what_peers_have_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(cluster: Cluster, **_: object) -> None:
        (cluster.peer_files[0].parent / "log.txt").write_text("peer-0 listens on port 7700")
        raise KeyboardInterrupt

    monkeypatch.setattr("peer.ops.local_cluster.up", interrupted)
    assert sotto("up", *SMALL, "--name", "broken").exit_code == 130
    assert Path("runs/broken/peers/peer-0/log.txt").exists()


def test_the_same_seed_gives_the_same_figures() -> None:
    figures = []
    for _ in range(2):
        answer = json.loads(sotto("simulate", *SMALL, "--no-save", "--no-baseline", "--json").stdout)
        figures.append([answer[key] for key in ("peer_accuracy", "payload_bytes", "consensus_distance")])
    assert figures[0] == figures[1]
    assert not Path("runs").exists()


def test_without_json_a_table_is_printed_and_progress_goes_to_stderr() -> None:
    result = sotto("simulate", *SMALL, "--no-baseline")
    assert "worst peer" in result.stdout
    assert "report: runs/digits-simulated/report.html" in result.stdout
    assert "simulating  round 6/6" in result.stderr


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_diverging_run_ends_with_4_and_still_gets_its_report() -> None:
    result = sotto("simulate", *SMALL, "-s", "training.learning_rate=1e30", "--name", "wild")
    assert result.exit_code == 4
    assert "Traceback" not in result.output
    assert result.stderr.splitlines()[-1].startswith("sotto: error: ")
    assert "Ended early" in Path("runs/wild/report.html").read_text()


@pytest.mark.parametrize("command", ["up", "simulate"])
def test_ctrl_c_ends_the_comparison_and_keeps_the_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = baseline.single_process

    def interrupted(*arguments: Any, **options: Any) -> baseline.Baseline:
        os.kill(os.getpid(), signal.SIGINT)
        return whole(*arguments, **options)

    monkeypatch.setattr("peer.run.summary.single_process", interrupted)
    result = sotto(command, *SMALL, "--name", "small")
    assert result.exit_code == 130, result.stderr
    assert "one process on all data" in result.stderr
    found = json.loads(Path("runs/small/summary.json").read_text())
    assert (found["ended"], found["single_process_accuracy"]) == ("completed", None)
    assert found["averaged_accuracy"] > 0
    assert {"model.safetensors", "report.html"} <= {path.name for path in Path("runs/small").iterdir()}


def test_ctrl_c_stops_after_the_round_and_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(live.LineView):
        has_asked = False

        def update(self, progress: Progress) -> None:
            if not self.has_asked and progress.round and progress.round < progress.rounds:
                self.has_asked = True
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(live, "LineView", Impatient)
    result = sotto("simulate", *SMALL, "--rounds", "1000000", "--name", "long")
    assert result.exit_code == 130
    assert "stopping after this round" in result.stderr
    assert json.loads(Path("runs/long/summary.json").read_text())["ended"] == "stopped"
    assert Path("runs/long/report.html").exists()


def test_the_time_left_counts_from_the_first_round_on(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, shown = iter((0.0, 5.0, 100.0, 110.0, 130.0)), []
    monkeypatch.setattr("peer.cli.training_run.time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(live.LineView, "update", lambda view, progress: shown.append(progress))
    with open_view(True, load(environment={})) as show:
        for done in (4, 5, 7):
            peers = (PeerProgress(name="peer-0", round=done),)
            show(Progress(phase="training", rounds=10, elapsed_s=0.0, peers=peers))
    begun = [(each.elapsed_s, each.begun_at_round, each.begun_at_s) for each in shown]
    assert begun == [(5.0, 0, 0.0), (100.0, 0, 0.0), (110.0, 5, 110.0), (130.0, 5, 110.0)]


def test_run_folders_are_numbered_unless_named(tmp_path: Path) -> None:
    assert choose_directory(tmp_path, None, "digits") == tmp_path / "digits"
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits-2").mkdir()
    assert choose_directory(tmp_path, None, "digits") == tmp_path / "digits-3"
    assert choose_directory(tmp_path, "digits", "x") == tmp_path / "digits"
    (tmp_path / "digits" / "summary.json").write_text("")
    with pytest.raises(ConfigError, match="already contains a run; choose another --name"):
        choose_directory(tmp_path, "digits", "x")


@pytest.mark.parametrize(("runs", "more"), [("runs", ""), ("other", " --runs-dir other")])
def test_a_run_that_can_go_on_is_not_begun_anew(runs: str, more: str) -> None:
    peer = Path(runs) / "digits/peers/peer-0"
    peer.mkdir(parents=True)
    (peer / "log.txt").touch()
    with pytest.raises(ConfigError) as caught:
        choose_directory(Path(runs), "digits", "x")
    resumes = command("up", "--resume", "digits") + more
    assert f"already contains a run; go on with it by `{resumes}`, choose another --name" in str(caught.value)
    (Path(runs) / "digits/model.safetensors").touch()
    with pytest.raises(ConfigError, match="already contains a run; choose another --name"):
        choose_directory(Path(runs), "digits", "x")


def test_the_command_of_the_live_page_is_printed_once_the_run_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    show = with_live_page(lambda progress: shown.append(progress.phase), tmp_path / "a run")
    for phase in ("preparing", "simulating", "simulating"):
        assert capsys.readouterr().err == ""
        show(Progress(phase=phase, rounds=1, elapsed_s=0.0))
        if len(shown) == 2:
            assert capsys.readouterr().err == f"live page: sotto watch '{tmp_path}/a run'\n"
    assert shown == ["preparing", "simulating", "simulating"]


def test_the_command_of_the_live_page_does_not_break_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prompt(live.Live):
        def update(self, renderable: RenderableType, *, refresh: bool = False) -> None:
            super().update(renderable, refresh=True)

    read, write = os.openpty()
    with open(write, "w", encoding="utf-8", buffering=1) as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setattr(live, "Live", Prompt)
        with live.open_view(live=True, console=Console(file=terminal, force_terminal=True, width=80)) as view:
            show = with_live_page(view, Path("runs/tty"))
            for phase in ("preparing", "training"):
                show(Progress(phase=phase, rounds=600, elapsed_s=0.0))
    parts = []
    with contextlib.suppress(OSError):  # That is the end, once nobody writes any more.
        while part := os.read(read, 1 << 16):
            parts.append(part)
    os.close(read)
    shown = b"".join(parts).decode()
    # What stands in a line of the screen in the end: a line may be erased and written again.
    lines = [line.rpartition("\x1b[2K")[2] for line in shown.splitlines()]
    assert "live page: sotto watch runs/tty" in [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) for line in lines]
