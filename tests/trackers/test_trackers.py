"""Each tracker, through the command: what it wrote is read back with its own package, and nothing left the machine."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from peer.cli.track import track
from peer.cli.training_run import trackers_beside
from peer.cli.up import up
from peer.errors import ConfigError
from peer.links import network as links
from peer.links.profiles import find
from peer.state.metrics import Summary
from peer.trackers import kinds
from peer.trackers.kinds import KINDS, require
from tests.links.namespaces import needs_links
from tests.report.sample_run import evaluation, round_record, write_sample_run

pytestmark = pytest.mark.usefixtures("warm_python")

ROUNDS = 40

Curve = list[tuple[int, float]]


def needs(kind: str) -> None:
    for package in KINDS[kind].packages:
        pytest.importorskip(package, reason=f"needs {package}: the extra trackers installs it")


def run_track(run: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what `sotto lab track` printed. In a process of its own: some packages look at the environment once."""
    command = [*launcher, sys.executable, "-m", "peer", "lab", "track", str(run), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def read_tensorboard(folder: Path) -> Mapping[str, Curve]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for peer in folder.iterdir():
        events = EventAccumulator(str(peer), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            found[f"{name}/{peer.name}"] = [(event.step, event.value) for event in events.Scalars(name)]
    return found


def read_wandb(folder: Path) -> Mapping[str, Curve]:
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, Curve] = {}
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in row.items():
            found.setdefault(name, []).append((row["round"], value))
    return found


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: a header of 7 bytes, then blocks of 32 kB as in LevelDB's log."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        # 1 is a whole record; 2, 3 and 4 are its first, a middle and its last part.
        if kind in (1, 4):
            yield parts
            parts = b""


def read_mlflow(folder: Path) -> Mapping[str, Curve]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("sottovoce")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("digits", "FINISHED")
    assert run.data.params["algorithm.name"] == "quant-sgp"
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(each.step, each.value) for each in metrics] for name, metrics in history.items()}


def read_trackio(folder: Path) -> Mapping[str, Curve]:
    script = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s; (run,) = s.get_runs('sottovoce');"
        "print(json.dumps(s.get_logs('sottovoce', run)))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Curve] = {}
    for row in json.loads(done.stdout.splitlines()[-1]):
        for name, value in row.items():
            if isinstance(value, float | int):
                found.setdefault(name, []).append((row["step"], value))
    return found


READERS: Mapping[str, Callable[[Path], Mapping[str, Curve]]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


def assert_whole(found: Mapping[str, Curve]) -> None:
    """A run of formulas came over: every loss, every accuracy, and those over all models."""
    for peer in range(4):
        losses = [value for _, value in sorted(found[f"loss/peer-{peer}"])]
        assert losses == pytest.approx([round_record(peer, t, ROUNDS).loss or 0.0 for t in range(ROUNDS)])
        assert [done for done, _ in sorted(found[f"loss/peer-{peer}"])] == list(range(1, ROUNDS + 1))
        expected = [(done, evaluation(peer, done, "test", offset=peer).accuracy) for done in (20, 40)]
        assert sorted(found[f"accuracy/peer-{peer}"]) == [(done, pytest.approx(value)) for done, value in expected]
    assert dict(found["consensus_distance/all"]) == pytest.approx({20: 0.25, 40: 0.125})
    assert [done for done, _ in found["accuracy/average"]] == [20, 40]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read_back_with_the_package_itself(kind: str, tmp_path: Path) -> None:
    needs(kind)
    run = write_sample_run(tmp_path / "digits", rounds=ROUNDS)
    answer = run_track(run, "--to", kind)
    assert answer["points"] == 4 * (ROUNDS + 2) + 2 + 2
    assert str(run / "trackers" / kind) in answer["trackers"][kind]
    assert_whole(READERS[kind](run / "trackers" / kind))


@pytest.mark.slow
@pytest.mark.root
@needs_links
@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_sends_nothing_anywhere(kind: str, tmp_path: Path) -> None:
    needs(kind)
    run = write_sample_run(tmp_path / "digits", rounds=3)
    with links.LinkNetwork([find("unshaped")] * 2) as network:
        # Whatever it looked up or connected to would leave by this route.
        route = ["route", "add", "default", "via", network.address(1)]
        subprocess.run(["ip", "-n", network.namespace(0), *route], check=True)
        before = network.sent_bytes(0)
        run_track(run, "--to", kind, launcher=tuple(network.command(0)))
        assert network.sent_bytes(0) == before
        # And it would have been seen.
        dial = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))"
        subprocess.run([*network.command(0), sys.executable, "-c", dial], check=True)
        assert network.sent_bytes(0) > before


@pytest.mark.slow
def test_a_run_is_tracked_while_it_goes_on(tmp_path: Path) -> None:
    needs("tensorboard")
    small = ("--peers", "2", "--rounds", "30", "--set", "evaluation.every_rounds=10", "--no-baseline", "--no-live")
    command = [sys.executable, "-m", "peer", "simulate", *small, "--track", "tensorboard", "--name", "small"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "small"
    assert "not everything was handed to" not in done.stderr, (run / "trackers.log").read_text()
    found = read_tensorboard(run / "trackers" / "tensorboard")
    assert [step for step, _ in found["loss/peer-1"]] == list(range(1, 31))
    summary = Summary.load(run / "summary.json")
    assert found["accuracy/peer-1"][-1] == (30, pytest.approx(summary.peer_accuracy[1]))


@pytest.mark.slow
def test_a_run_that_ends_before_its_trackers_have_started_is_handed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("tensorboard")
    run = write_sample_run(tmp_path / "digits", rounds=ROUNDS)
    with trackers_beside(["tensorboard"], run):
        pass
    assert capsys.readouterr().err == ""
    assert_whole(read_tensorboard(run / "trackers" / "tensorboard"))


@pytest.mark.slow
def test_a_second_call_shows_no_curve_twice(tmp_path: Path) -> None:
    needs("tensorboard")
    run = write_sample_run(tmp_path / "digits", rounds=ROUNDS)
    for _ in range(2):
        run_track(run, "--to", "tensorboard")
    assert_whole(read_tensorboard(run / "trackers" / "tensorboard"))


def test_the_commands_offer_every_tracker() -> None:
    for command, name in ((track, "kinds"), (up, "trackers")):
        option = next(parameter for parameter in command.params if parameter.name == name)
        assert list(option.type.choices) == list(KINDS)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "find_spec", lambda package: None if package == "sqlalchemy" else object())
    require("tensorboard")
    with pytest.raises(ConfigError, match=r"needs sqlalchemy: pip install sqlalchemy, or 'sottovoce\[trackers\]'"):
        require("mlflow")


def test_a_folder_without_figures_is_refused(tmp_path: Path) -> None:
    needs("tensorboard")
    command = [sys.executable, "-m", "peer", "lab", "track", "--to", "tensorboard"]
    for folder, says in ((tmp_path, "there are no figures"), (tmp_path / "nothing", "no such folder")):
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 5
        assert says in done.stderr
