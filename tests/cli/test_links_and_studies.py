"""`sotto lab shape` and `sotto lab study`: what they list, print and refuse; links are tested in tests/links."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peer.lab.study.row import Cell
from peer.links import tc
from peer.links.profiles import PROFILES
from tests.cli.runner import sotto
from tests.lab.study.small_study import SMALL, result
from tests.links.namespaces import namespaces, needs_links


def test_profiles_are_listed_with_their_figures() -> None:
    lines = sotto("lab", "shape", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PROFILES)
    assert "dsl" + " " * 23 + "1000/16000 kbit/s up/down, 15 ms one way (typical of its kind)" in lines
    rows = json.loads(sotto("lab", "shape", "list", "--json").stdout)
    assert {row["name"]: row["loss"] for row in rows}["lossy-wifi"] == 0.01


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("lab", "shape", "measure", "carrier-pigeon"), "unknown link profile (got 'carrier-pigeon')"),
        (("lab", "shape", "up", "carrier-pigeon", "--devices", "2"), "unknown link profile"),
        (("lab", "shape", "up", "dsl"), "Give either containers or --devices N"),
        (("lab", "shape", "up", "dsl", "--devices", "2", "web"), "Give either containers or --devices N"),
        (
            ("lab", "study", "run", "moniqa"),
            "unknown study (got 'moniqa'); valid: moniqua, quick, race, race-proxy, race-skews, or the path",
        ),
        (("lab", "study", "show", "moniqa"), "unknown study"),
    ],
)
def test_wrong_words_are_one_sentence_and_exit_code_2(words: tuple[str, ...], complaint: str) -> None:
    done = sotto(*words)
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("lab", "shape", "measure", "dsl"),
        ("lab", "shape", "up", "dsl", "--devices", "2"),
        ("lab", "shape", "down"),
        ("lab", "study", "run", "quick"),
    ],
)
def test_without_root_the_reason_is_given(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = sotto(*words)
    assert done.exit_code == 1
    assert "shaping links needs root" in done.stderr


def test_without_docker_containers_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tc, "missing", lambda: None)
    done = sotto("lab", "shape", "up", "dsl", "web", PATH="/nowhere")
    assert done.exit_code == 1
    assert "docker is not installed" in done.stderr


@pytest.mark.root
@needs_links
def test_devices_are_lent_until_the_command_is_told_to_end() -> None:
    command = [sys.executable, "-m", "peer", "lab", "shape", "up", "10mbit", "--devices", "2", "--json"]
    lender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert lender.stdout is not None
    text = ""
    while not text.endswith("\n]\n"):
        text += lender.stdout.readline()
    one, other = json.loads(text)
    assert (one["device"], other["device"]) == (0, 1)
    shown = subprocess.run([*other["command"], "ip", "address"], capture_output=True, text=True, check=True)
    assert other["address"] in shown.stdout
    ping = "import socket; socket.create_connection(('{}', 9), 3)".format(other["address"])
    refused = subprocess.run([*one["command"], sys.executable, "-c", ping], capture_output=True, text=True, check=False)
    assert "ConnectionRefusedError" in refused.stderr
    # Another command takes only what was left behind, which a run of these tests that was killed may have added to.
    lent = {one["command"][-1], other["command"][-1]}
    assert not lent & set(json.loads(sotto("lab", "shape", "down", "--json").stdout)["removed"])
    assert lent <= namespaces()
    lender.send_signal(signal.SIGTERM)
    assert lender.wait(30) == 0
    lender.stdout.close()
    assert not lent & namespaces()


@pytest.mark.root
@needs_links
def test_a_measurement_is_printed_for_scripts() -> None:
    done = sotto("lab", "shape", "measure", "10mbit", "--seconds", "0.2", "--json")
    (row,) = json.loads(done.stdout)
    assert (row["profile"], row["asked_kbit"], row["asked_round_trip_ms"]) == ("10mbit", 10_000, pytest.approx(2.08))
    assert done.exit_code == (0 if row["is_right"] else 1)


def test_studies_are_listed_and_shown() -> None:
    names = [row["name"] for row in json.loads(sotto("lab", "study", "list", "--json").stdout)]
    assert names == ["moniqua", "quick", "race", "race-proxy", "race-skews"]
    assert [line.split()[0] for line in sotto("lab", "study", "list").stdout.splitlines()] == names
    assert 'name = "quick"' in sotto("lab", "study", "show", "quick").stdout


def test_the_report_of_a_study_is_written_from_its_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(SMALL)
    done = sotto("lab", "study", "report", "mine.toml")
    assert done.exit_code == 1
    assert "runs/small contains no cells of a study; `sotto lab study run mine.toml` measures them" in done.stderr
    Path("runs/small/cells").mkdir(parents=True)
    cell = Cell(
        contender="full", profile="10mbit", seed=0, step_s=0.5, peers=4, commit="c", load=1.0, others_cpus=0.01,
        result=result(round_s=2.0),
    )  # fmt: skip
    cell.write(Path("runs/small/cells/full--10mbit--0.json"))
    done = sotto("lab", "study", "report", "mine.toml")
    assert done.exit_code == 0, done.stderr
    assert "full      2.000" in done.stdout
    assert done.stdout.endswith("report: runs/small/report.html\n")
    answer = json.loads(sotto("lab", "study", "report", "mine.toml", "--json").stdout)
    assert answer["report"] == "runs/small/report.html"
    assert answer["cells"][0]["seconds_for_100_rounds"] == 200.0
