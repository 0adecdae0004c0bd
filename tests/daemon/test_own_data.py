"""Devices that train on data of their own: all of it, whatever the others have, and told to nobody."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from peer.config.options import load
from peer.daemon import neighbors
from peer.daemon.process import Daemon, open_peer
from peer.errors import ConfigError, HandshakeRefused, StateError
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.export import export_model
from peer.ops.local_cluster import free_ports
from peer.state.checkpoints import find_checkpoints, load_checkpoint

pytestmark = pytest.mark.usefixtures("warm_python")

ROOT = Path(__file__).parents[2]
CENTRES = np.array([[1, 1, 0, 0], [-1, 1, 1, 0], [0, -1, 0, 1]])
JOB = (
    "run.rounds=60",
    "evaluation.every_rounds=30",
    "training.task=tests.examples.own_task:make_task",
    "training.batch_size=16",
    "training.warmup_rounds=2",
    "data.partition=own",
    "data.directory=/samples",
    "transport.backoff_max_s=0.2",
    "transport.linger_s=5",
)


def write_samples(folder: Path, classes: Sequence[int], num_test: int, seed: int) -> None:
    """Write as many samples of each class as asked for to train.csv, and some of all classes to test.csv."""
    folder.mkdir(exist_ok=True)
    numbers = np.random.default_rng(seed)
    labels = {"train.csv": np.repeat([0, 1, 2], classes), "test.csv": np.arange(num_test) % 3}
    for name, rows in labels.items():
        values = CENTRES[rows] + 0.4 * numbers.normal(size=(len(rows), 4))
        lines = [*map(",".join, np.column_stack([np.round(values, 4).astype(str), rows.astype(str)]))]
        (folder / name).write_text("\n".join(["a,b,c,d,class", *lines]) + "\n")


def write_kits(directory: Path, *settings: str) -> list[Path]:
    """Return the folders of two devices: one has 100 samples, the other 700 with other shares of the classes."""
    hosts = [Host("127.0.0.1", port) for port in free_ports(2)]
    config = load(environment={}, overrides=(*JOB, *settings))
    folders = [file.parent for file in write_cluster(directory, config, hosts)]
    for folder in folders:
        file = folder / "peer.toml"
        file.write_text(file.read_text().replace('"/samples"', '"samples"'))
    write_samples(folders[0] / "samples", (70, 20, 10), 30, seed=1)
    write_samples(folders[1] / "samples", (100, 200, 400), 90, seed=2)
    return folders


def opened(folder: Path, *settings: str) -> Daemon:
    return open_peer(load(folder / "peer.toml", environment={}, overrides=settings), folder)


def run_both(folders: list[Path]) -> list[Daemon]:
    """Run both peers to the end, over real connections; return them, closed."""

    async def together(peers: list[Daemon]) -> list[int]:
        return await asyncio.gather(*(peer.main() for peer in peers))

    peers = [opened(folder) for folder in folders]
    try:
        assert asyncio.run(together(peers)) == [0, 0]
    finally:
        for peer in peers:
            peer.close()
    return peers


def final_model(folder: Path) -> bytes:
    newest = load_checkpoint(max(find_checkpoints(folder / "state")))
    return newest.arrays["algorithm/x"].tobytes() + newest.arrays["algorithm/u"].tobytes()


def test_every_device_trains_on_all_of_its_own(tmp_path: Path) -> None:
    folders = write_kits(tmp_path)
    peers = run_both(folders)
    for index, (peer, count) in enumerate(zip(peers, (100, 700), strict=True)):
        trainer = peer.local.trainer
        drawn = np.concatenate([trainer._schedule.batch(t).indices for t in range(60)])
        assert np.array_equal(np.unique(drawn), np.arange(count))
        assert trainer._adjustment is not None
        own, other = (peer.parts.common.evaluations.newest[each, "test"] for each in (index, 1 - index))
        # Each on its own test set, and known to the other.
        assert (sum(own.total), sum(other.total)) == ((30, 90), (90, 30))[index]
        assert own.round == other.round == 60
        assert min(own.accuracy, other.accuracy) > 0.8
    exported = export_model(tmp_path, tmp_path / "average.safetensors")
    assert exported.peers == (0, 1)
    with pytest.raises(ConfigError, match=r"data\.partition: statistics and ranges of the average .*--peer"):
        export_model(tmp_path, tmp_path / "average.int8.safetensors", int8=True)


@pytest.mark.parametrize(
    ("partition", "samples", "warned"),
    [("iid", "other", True), ("iid", "same", False), ("own", "other", False)],
)
def test_devices_that_read_other_data_than_each_other_are_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, partition: str, samples: str, warned: bool
) -> None:
    folders = write_kits(tmp_path, f"data.partition={partition}", "run.rounds=4", "evaluation.every_rounds=0")
    for folder in folders:
        write_samples(folder / "samples", (40, 40, 40), 30, seed=1 if samples == "same" else folders.index(folder))
    with caplog.at_level(logging.WARNING):
        run_both(folders)
    told = [record.getMessage() for record in caplog.records if "reads other" in record.getMessage()]
    assert len(told) == (2 if warned else 0), "each is told once, however often they connect"
    for name, sentence in zip(("peer-0", "peer-1"), sorted(told), strict=False):
        assert sentence.startswith(f"{name} reads other training and test data than this device")


def run_folders(folders: Sequence[Path], *settings: str) -> list[int | BaseException]:
    """Run two devices whose images are in `samples` of their folders; return how each ends."""
    images = (
        "run.rounds=4",
        "training.batch_size=4",
        "training.task=image-folder",
        "training.task_options={size=32, model='resnet20'}",
        "data.directory=samples",
    )
    peers = [opened(folder, *images, *settings) for folder in folders]

    async def together() -> list[int | BaseException]:
        return await asyncio.gather(*(peer.main() for peer in peers), return_exceptions=True)

    try:
        return asyncio.run(together())
    finally:
        for peer in peers:
            peer.close()


def write_images(folder: Path, classes: Sequence[str]) -> None:
    shutil.rmtree(folder / "samples")
    for number, name in enumerate(classes):
        for split, count in (("train", 4), ("val", 1)):
            (directory := folder / "samples" / split / name).mkdir(parents=True)
            for image in range(count):
                Image.new("RGB", (32, 32), (80 * number, 20 * image, 0)).save(directory / f"{image}.png")


def test_devices_whose_class_folders_differ_refuse_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dog of one would be the fox of the other."""
    monkeypatch.setattr(neighbors, "_REFUSED_S", 0.3)
    folders = write_kits(tmp_path)
    for folder, classes in zip(folders, (("cat", "dog"), ("dog", "fox")), strict=True):
        write_images(folder, classes)
    for folder, refusal in zip(folders, run_folders(folders), strict=True):
        assert isinstance(refusal, HandshakeRefused)
        assert refusal.exit_code == 6
        found = re.search(r"number 0 is '(cat|dog)' at '(peer-[01])', and another one at 'peer-[01]'", str(refusal))
        assert found is not None, refusal
        assert found.groups() in (("cat", "peer-0"), ("dog", "peer-1"))
        assert "the same classes, in the same order, on all devices; for folders, data.classes lists them" in str(
            refusal
        )
        shutil.rmtree(folder / "state")
    # As that says.
    assert run_folders(folders, 'data.classes=["cat", "dog", "fox"]') == [0, 0]


def test_devices_whose_class_folders_are_spelled_apart_train_together(tmp_path: Path) -> None:
    """As one system writes "Ä" in one piece, and another in two: of the bytes, one comes before "Z"."""
    folders = write_kits(tmp_path)
    for folder, form in zip(folders, ("NFC", "NFD"), strict=True):
        write_images(folder, [unicodedata.normalize(form, "Ähre"), "Zebra"])
    assert run_folders(folders) == [0, 0]


def test_a_killed_peer_resumes_on_its_own_data_to_the_bit(tmp_path: Path) -> None:
    settings = ("run.rounds=80", "data.holdout_fraction=0.1", "data.weight_by_samples=true", "data.total_samples=800")
    (tmp_path / "undisturbed").mkdir()
    undisturbed = write_kits(tmp_path / "undisturbed", *settings)
    run_both(undisturbed)
    folders = write_kits(tmp_path, *settings, "peer.min_step_s=0.03", "state.checkpoint_every_rounds=30")

    def start(folder: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "peer", "run", "--config", str(folder / "peer.toml")]
        log = (folder / "log.txt").open("ab")
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    processes = [start(folder) for folder in folders]
    try:
        deadline = time.monotonic() + 90
        while not find_checkpoints(folders[0] / "state"):
            assert time.monotonic() < deadline, (folders[0] / "log.txt").read_text()
            time.sleep(0.05)
        time.sleep(0.5)  # Some rounds into the journal.
        processes[0].kill()
        processes[0].wait()
        processes[0] = start(folders[0])
        assert [process.wait(90) for process in processes] == [0, 0], (folders[0] / "log.txt").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert list(map(final_model, folders)) == list(map(final_model, undisturbed))


def test_a_state_is_not_gone_on_with_on_other_samples(tmp_path: Path) -> None:
    folders = write_kits(tmp_path, "run.rounds=4", "evaluation.every_rounds=0")
    run_both(folders)
    opened(folders[0]).close()
    with (folders[0] / "samples" / "train.csv").open("a") as file:
        file.write("0.1,0.2,0.3,0.4,1\n")
    with pytest.raises(
        StateError, match=r"belongs to data '100 samples, \w{8}', but this peer has '101 samples, \w{8}'"
    ):
        opened(folders[0])


def test_a_device_with_most_of_the_samples_is_told_of_its_long_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = write_kits(tmp_path, "data.weight_by_samples=true", "data.total_samples=1400")
    with caplog.at_level(logging.WARNING, "sotto"):
        opened(folders[1]).close()
        assert "times as long" not in caplog.text
        # As if seven more devices were listed.
        peers = "".join(f'\n[[peers]]\nname = "more-{number}"\n' for number in range(7))
        file = folders[1] / "peer.toml"
        file.write_text(re.sub(r"(?m)^mode = .*", 'mode = "insecure"', file.read_text()) + peers)
        opened(folders[1], "state.directory=another").close()
    assert "this device has 700 of 1400 samples, so its steps are 4.5 times as long" in caplog.text


@pytest.mark.parametrize(
    ("algorithm", "graph"),
    [("allreduce", "complete"), ("low-rank", "complete"), ("compressed-allreduce", "complete"), ("sgp", "ring")],
)
def test_devices_with_thirty_and_three_thousand_samples_refuse_nothing(
    algorithm: str, graph: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = write_kits(
        tmp_path, f"algorithm.name={algorithm}", f"graph.kind={graph}", "compressor.kind=none", "run.rounds=4",
        "data.weight_by_samples=true", "data.total_samples=3150", "evaluation.every_rounds=0",
        "training.learning_rate=0.001",
    )  # fmt: skip
    write_samples(folders[0] / "samples", (10, 10, 10), 30, seed=1)
    write_samples(folders[1] / "samples", (1000, 1000, 1000), 90, seed=2)
    run_both(folders)
    assert "no honest peer" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ("data.weight_by_samples=true", "data.total_samples=99"),
            r"data\.total_samples: this device alone has 100 samples \(got 99\)",
        ),
        (("data.class_shares=[1, 1]",), r"data\.class_shares: task sensor has 3 classes \(got \[1\.0, 1\.0\]\)"),
        (("data.class_shares=[0, 0, 0]",), r"data\.class_shares: .* not all 0"),
        (("data.class_shares=[1, 0, 1]",), r"data\.class_shares: is 0 for class 1, .* has 20 samples of it"),
        (("graph.period_unit=epochs",), r"graph\.period_unit: an epoch is a pass .* no device knows"),
    ],
)
def test_what_does_not_fit_the_own_data_is_refused(settings: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    folders = write_kits(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        opened(folders[0], *settings)
