"""Peers that train in the precision that their device chose: it is measured once, kept through kills, and need not be
that of the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from peer.config.options import load
from peer.config.precision_choice import Precision, PrecisionChoice
from peer.daemon.device.kept import settle_chosen
from peer.daemon.process import open_peer
from peer.errors import ConfigError, StateError
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.export import export_model
from peer.ops.local_cluster import Cluster, free_ports, up
from peer.simulate.run import run
from peer.state.disk import Disk
from peer.state.kept_file import CHOSEN_PRECISION
from peer.state.metrics import Summary
from tests.daemon.running_cluster import trained
from tests.state.folders import begin

pytestmark = pytest.mark.usefixtures("warm_python")

JOB = (
    "run.rounds=14",
    "training.precision=fastest",
    "training.warmup_rounds=2",
    "evaluation.every_rounds=7",
    "state.checkpoint_every_rounds=5",
    "transport.backoff_max_s=0.5",
    "transport.linger_s=10",
)


@dataclass
class Measured:
    """In the place of a measurement: says what the test wants, and counts."""

    precision: Precision
    times: int = field(default=0)

    def __call__(self) -> PrecisionChoice:
        self.times += 1
        return PrecisionChoice(self.precision, {self.precision: 0.001, "float32": 0.002})


def test_a_device_measures_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, later = Measured("int8"), Measured("bfloat16")
    with caplog.at_level(logging.INFO, logger="sotto"):
        assert settle_chosen(first, Disk(tmp_path)).precision == "int8"
    assert "trains in int8: 1 ms a step, float32 2.00×" in caplog.text
    begin(Disk(tmp_path))
    assert settle_chosen(later, Disk(tmp_path)).precision == "int8"
    assert (first.times, later.times) == (1, 0)


@pytest.mark.parametrize("round_", [0, 20])
def test_a_run_that_began_in_another_precision_does_not_choose_one_later(tmp_path: Path, round_: int) -> None:
    begin(Disk(tmp_path), round_)
    measured = Measured("int8")
    with pytest.raises(ConfigError, match=r"training\.precision.*set the precision that it began with"):
        settle_chosen(measured, Disk(tmp_path))
    assert measured.times == 0


def test_a_damaged_choice_is_not_measured_anew(tmp_path: Path) -> None:
    (tmp_path / CHOSEN_PRECISION.name).write_text("{")
    with pytest.raises(StateError, match="restore it"):
        settle_chosen(Measured("int8"), Disk(tmp_path))


def cluster_of(folder: Path, choices: Sequence[Precision], *overrides: str) -> Cluster:
    """Return peers that made these choices when they first started."""
    folder.mkdir()
    cluster = Cluster(
        load(environment={}, overrides=[*JOB, *overrides]), folder, num_peers=len(choices), directory=folder
    )
    for state, precision in zip(cluster.state_folders, choices, strict=True):
        state.mkdir(parents=True)
        CHOSEN_PRECISION.keep(Disk(state), PrecisionChoice(precision))
    return cluster


@pytest.mark.slow
def test_a_killed_peer_goes_on_in_its_precision_with_the_bits_of_a_run_that_has_it_fixed(tmp_path: Path) -> None:
    # So that the kill comes in the middle of the run.
    cluster = cluster_of(tmp_path / "run", ["int8", "int8"], "peer.min_step_s=0.3")
    fixed = run(
        load(environment={}, overrides=[*JOB, "training.precision=int8"]), tmp_path, num_peers=2, baseline=False
    )
    assert trained(cluster, rounds=14, kill=1) == [z.tobytes() for z in fixed.models]
    in_float32 = load(environment={}, overrides=[*JOB, "training.precision=float32"])
    others = run(in_float32, tmp_path, num_peers=2, baseline=False)
    assert [z.tobytes() for z in others.models] != [z.tobytes() for z in fixed.models]


@pytest.mark.slow
def test_peers_in_different_precisions_train_one_model_and_a_kill_changes_no_bit(tmp_path: Path) -> None:
    whole = trained(cluster_of(tmp_path / "whole", ["float32", "int8", "bfloat16"]), rounds=14)
    killed = cluster_of(tmp_path / "killed", ["float32", "int8", "bfloat16"], "peer.min_step_s=0.3")
    assert trained(killed, rounds=14, kill=1) == whole
    # The 8-bit peer's checkpoint has ranges, which the model of the whole run does not need.
    exported = export_model(tmp_path / "killed", tmp_path / "model.safetensors")
    assert exported.peers == (0, 1, 2)
    alone = export_model(tmp_path / "killed", tmp_path / "one.safetensors", peer_index=1)
    assert alone.peers == (1,)


def test_real_peers_measure_at_their_first_start_and_all_say_what_they_chose(tmp_path: Path) -> None:
    config = load(environment={}, overrides=[*JOB, "peer.min_step_s=0"])
    summary = up(Cluster(config, tmp_path, num_peers=2, directory=tmp_path), baseline=False)
    assert summary.ended == "completed"
    kept = {
        folder.name: CHOSEN_PRECISION.read(Disk(folder / "state"))
        for folder in sorted((tmp_path / "peers").iterdir())
        if (folder / "state").is_dir()
    }
    assert list(kept) == ["peer-0", "peer-1"]
    for name, choice in kept.items():
        assert choice is not None
        assert choice.step_s.keys() == {"float32", "bfloat16", "int8"}
        assert min(choice.step_s, key=lambda precision: choice.step_s[precision]) == choice.precision
        assert f"trains in {choice.sentence}" in (tmp_path / "peers" / name / "log.txt").read_text()
        assert Summary.load(tmp_path / "summary.json").chosen_precisions[name] == choice.document()
    chosen = {choice.precision for choice in kept.values() if choice is not None}
    assert summary.precision == (chosen.pop() if len(chosen) == 1 else "fastest")


def test_a_private_peer_takes_float32_without_measuring(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    config = load(environment={}, overrides=[*JOB, "training.momentum=heavy-ball", "privacy.noise_multiplier=1.5"])
    (file, _) = write_cluster(tmp_path, config, [Host("127.0.0.1", port) for port in free_ports(2)])
    peer = open_peer(load(file, environment={}), file.parent)
    try:
        assert peer.local.chosen == PrecisionChoice("float32")
    finally:
        peer.close()


def test_a_simulation_measures_once_for_all_and_its_folder_reproduces_it(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    config = load(environment={}, overrides=JOB)
    first = run(config, tmp_path, num_peers=2, directory=tmp_path / "first", baseline=False)
    written = load(tmp_path / "first" / "config.toml", environment={})
    assert written.training.precision == first.summary.precision
    assert written.training.precision in ("float32", "bfloat16", "int8")
    assert first.summary.chosen_precisions["all peers"]["precision"] == first.summary.precision
    again = run(written, tmp_path, num_peers=2, baseline=False)
    assert [z.tobytes() for z in again.models] == [z.tobytes() for z in first.models]
    assert again.summary.chosen_precisions == {}
