"""`sotto up` as a user runs it: the run folder it leaves, and that Ctrl-C leaves nothing running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from safetensors.torch import load_file

from peer.config.options import load
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.net.services import OWN_SOCKET
from peer.ops import control
from peer.ops.local_cluster import Cluster
from peer.simulate.run import run
from peer.state.checkpoints import Checkpoint, StateFolder, find_checkpoints, load_checkpoint
from peer.train.tasks import resolve_task
from tests.ops.running_peers import peers_below

pytestmark = pytest.mark.usefixtures("warm_python")

PYTHON = sys.executable
"""The interpreter, which begins anew each time, as a user's does."""

SHORT = ("--set", "run.rounds=40", "--set", "evaluation.every_rounds=20", "--set", "training.warmup_rounds=5")


def sotto_up(
    folder: Path, *arguments: str, launcher: Sequence[str] = (), python: str | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*launcher, python or sys.executable, "-m", "peer", "up", "--no-live", "--runs-dir", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )


def test_a_peer_that_was_told_to_leave_has_no_part_in_the_model(tmp_path: Path) -> None:
    cluster = Cluster(load(environment={}), tmp_path, num_peers=2, directory=tmp_path)
    x = np.ones(3, dtype=np.float32)
    for peer, done in enumerate((40, 20)):
        folder = StateFolder(cluster.state_folders[peer])
        changes = Membership((0, 1), [Change(ChangeKind.LEAVE, 1, 1, 20)]).state()
        arrays = {"algorithm/x": (1 + peer) * x, "algorithm/u": np.array([1.0])}
        folder.checkpoints.save(Checkpoint(done, {"members": changes}, arrays))
        folder.close()
    ((left_behind, weight),) = cluster.final_states()
    assert (left_behind[:].tolist(), weight) == ([1.0, 1.0, 1.0], 1.0)
    cluster.close()


def test_a_peer_that_is_yet_to_begin_has_logged_nothing(tmp_path: Path) -> None:
    cluster = Cluster(load(environment={}), tmp_path, num_peers=2, directory=tmp_path)
    assert cluster.last_words(1) == "it logged nothing"
    assert cluster.last_traceback(1) is None
    cluster.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    # Sparse enough for the bound, which takes positions to lie anywhere: of 10 %, those that cluster take fewer bits.
    settings = ("--set", "data.holdout_fraction=0.1", "--set", "compressor.fraction=0.02")
    process = sotto_up(tmp_path, "--peers", "3", "--name", "first", "--json", *SHORT, *settings, python=PYTHON)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    summary = json.loads(out)
    folder = tmp_path / "first"
    assert {"config.toml", "metrics.sqlite", "model.safetensors", "report.html", "summary.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert load(folder / "config.toml", environment={}).run.rounds == 40
    model = safetensors.numpy.load_file(folder / "model.safetensors")
    assert sum(array.size for array in model.values()) == summary["parameters"]
    # Digits train in 8 bits; the ranges of activations are not for whoever loads the model elsewhere.
    resolve_task("digits").make_model().load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    assert len(summary["peer_accuracy"]) == len(summary["holdout_accuracy"]) == 3
    # Every kind of byte count holds the one inside it.
    sizes = [summary[f"{kind}_bytes"] for kind in ("payload", "frame", "protobuf", "socket", "packet")]
    assert sizes == sorted(sizes)
    assert 0 < summary["entropy_bits_per_parameter"] <= summary["bits_per_parameter"]
    assert not peers_below(tmp_path)
    peers = folder / "peers"
    readable = [path for path in (peers, *peers.rglob("*")) if path.stat().st_mode & 0o077]
    assert not readable, "what the peers leave is for their owner alone"


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_ctrl_c_leaves_nothing_running(tmp_path: Path, moment: str) -> None:
    process = sotto_up(
        tmp_path, "--peers", "3", "--set", "run.rounds=100000", "--set", "state.checkpoint_every_rounds=5"
    )
    wait_until(lambda: len(peers_below(tmp_path)) == 3)
    if moment == "training":
        wait_until(lambda: len(list(tmp_path.glob("*/peers/*/state/checkpoint-*"))) > 0)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert f"resume with: sotto up --resume digits --runs-dir {tmp_path}" in err
    wait_until(lambda: not peers_below(tmp_path), timeout_s=5.0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by its operator", "with all peers", "without its own process"])
def test_a_run_whose_peers_were_stopped_is_no_completed_one(tmp_path: Path, how: str) -> None:
    process = sotto_up(tmp_path, "--peers", "2", "--name", "a", "--set", "run.rounds=100000", "--no-baseline")
    files = [tmp_path / "a" / "peers" / f"peer-{peer}" / "peer.toml" for peer in range(2)]
    wait_until(lambda: sum(file.with_name("state").joinpath(OWN_SOCKET).exists() for file in files) == 2)
    for file in files:
        if how == "by its operator":
            assert control.call(load(file, environment={}), file.parent, None, "stop")["stopping"]
    for pid in () if how == "by its operator" else peers_below(tmp_path):
        os.kill(pid, signal.SIGTERM)
    if how == "with all peers":
        os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == {"by its operator": 0, "with all peers": 130}.get(how, 1), err
    ended = json.loads((tmp_path / "a" / "summary.json").read_text())["ended"]
    assert ended.startswith("failed: peer-" if how == "without its own process" else "stopped"), ended
    assert not (tmp_path / "a" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    slowly = ("--set", "peer.slow_down=8", "--set", "state.checkpoint_every_rounds=5")
    process = sotto_up(tmp_path, "--peers", "2", "--name", "first", *SHORT, *slowly)
    wait_until(lambda: len(list(tmp_path.glob("first/peers/*/state/checkpoint-*"))) > 0)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    other = sotto_up(tmp_path, "--resume", "first", "--set", "run.rounds=50")
    assert "keeps the configuration of the run" in other.communicate(timeout=60)[1]
    process = sotto_up(tmp_path, "--resume", "first", "--json")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["rounds"] == 40
    assert ["--resume" in command for command in summary["commands"]] == [False, True]
    assert summary["training_seconds"] < 200
    config = load(tmp_path / "first" / "config.toml", environment={})
    undisturbed = run(config, tmp_path, num_peers=2, baseline=False)
    found = [
        load_checkpoint(find_checkpoints(folder)[-1]).arrays for folder in sorted(tmp_path.glob("first/peers/*/state"))
    ]
    models = [(arrays["algorithm/x"] / np.float32(arrays["algorithm/u"][0])).tobytes() for arrays in found]
    assert models == [z.tobytes() for z in undisturbed.models]
    again = sotto_up(tmp_path, "--resume", "first")
    assert "complete" in again.communicate(timeout=60)[1]


def test_a_peer_that_dies_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    process = sotto_up(tmp_path, "--peers", "3", "--set", "training.learning_rate=1000", *SHORT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 4, err
    assert "training.learning_rate" in err
    assert "Traceback" not in err
    assert not peers_below(tmp_path)


def test_a_run_ends_when_the_process_that_peers_are_forked_from_is_killed(tmp_path: Path) -> None:
    process = sotto_up(tmp_path, "--peers", "2", "--set", "run.rounds=100000")
    wait_until(lambda: len(peers_below(tmp_path)) == 2)
    parent = int(Path(f"/proc/{peers_below(tmp_path)[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != process.pid
    os.kill(parent, signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1, err
    assert "the process that peers are forked from was killed by SIGKILL" in err
    assert not peers_below(tmp_path)


OWN_TASK = """
import torch
from peer.train.data import Classification, TensorData


class Sensor(Classification):
    losses = 0

    def loss(self, model, batch):
        self.losses += 1
        if self.losses == 5:
            raise ValueError("the sensor was unplugged")
        return super().loss(model, batch)


def make_task():
    data = TensorData(torch.arange(128.0).view(64, 2) / 128, torch.arange(64) % 2)
    return Sensor(name="sensor", num_classes=2, model=lambda: torch.nn.Linear(2, 2), train=data, test=data)
"""


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_in_a_users_task_is_told_with_its_line(tmp_path: Path, debug: bool) -> None:
    (tmp_path / "sensor.py").write_text(OWN_TASK)
    task = ("--set", "training.task=sensor:make_task", "--set", "training.label_adjustment=false")
    process = sotto_up(tmp_path, "--peers", "2", "--name", "first", *SHORT, *task, *["--debug"] * debug)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 2, err
    told = err.splitlines()[-1]
    sentence = f"in your task: ValueError: the sensor was unplugged ({tmp_path}/sensor.py:12, in Sensor.loss)"
    log = re.fullmatch(rf"sotto: error: peer-. ended with code 2: {re.escape(sentence)} \(see (.*)\)", told)
    assert log, told
    logged = Path(log[1]).read_text()
    assert 'raise ValueError("the sensor was unplugged")' in logged, "the log has the whole traceback"
    assert logged.splitlines()[-1].endswith(f" sotto: error: {sentence}")
    assert ('raise ValueError("the sensor was unplugged")' in err) == debug
    assert not peers_below(tmp_path)


def test_a_numerical_overflow_is_no_bug(tmp_path: Path) -> None:
    """The compressor meets it before any loss is judged."""
    process = sotto_up(tmp_path, "--peers", "3", "--set", "training.learning_rate=1e38", *SHORT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 4, err
    # A peer that is a round behind may end of itself, before it tells others what they would have to refuse.
    assert "not finite" in err or "guard.max_loss 10000 leaves room for" in err
    assert "lower the learning rate (training.learning_rate, or" in err
    assert "bug" not in err
    assert not peers_below(tmp_path)


def test_a_run_that_diverges_can_put_all_its_peers_back(tmp_path: Path) -> None:
    rollback = ("--set", "guard.action=rollback", "--set", "state.checkpoint_every_rounds=2")
    wild = ("--set", "training.learning_rate=30", "--set", "guard.max_loss=100")
    process = sotto_up(tmp_path, "--peers", "3", "--name", "wild", *SHORT, *rollback, *wild)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 4, err
    put_back = re.search(r"; all peers are put back to round (\d+)$", err.splitlines()[-1])
    assert put_back is not None, err
    for state in tmp_path.glob("wild/peers/peer-*/state"):
        rounds = [load_checkpoint(path).round for path in find_checkpoints(state)]
        assert max(rounds, default=0) == int(put_back[1])
        assert list(state.glob("set-aside-1-*"))
        assert not list(state.glob("journal-*"))
    assert "diverged" in json.loads((tmp_path / "wild" / "summary.json").read_text())["ended"]


def test_a_full_disk_ends_the_run_with_a_sentence_and_it_can_be_resumed(tmp_path: Path) -> None:
    # No file of these processes may grow beyond that: what a full disk is for whoever writes, without one.
    process = sotto_up(
        tmp_path,
        *("--peers", "2", "--name", "full", *SHORT, "--set", "state.checkpoint_every_rounds=5"),
        launcher=("prlimit", "--fsize=90000"),
    )
    _, err = process.communicate(timeout=200)
    assert process.returncode == 5, err
    assert "cannot be written: " in err
    assert "raise the limit on the size of files" in err
    assert "bug" not in err
    assert not peers_below(tmp_path)
    # What the peers had is still there.
    assert list(tmp_path.glob("full/peers/peer-0/state/journal-*"))
    process = sotto_up(tmp_path, "--resume", "full", "--json")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert json.loads(out)["ended"] == "completed"
