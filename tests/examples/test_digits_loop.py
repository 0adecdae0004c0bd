"""The example of a training script: as good as one process with all data, and killed as often as one likes."""

from __future__ import annotations

import re
import runpy
import shlex
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from peer.cli import cli
from peer.ops.local_cluster import free_ports
from tests.library.processes import start_file

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "digits_loop.py"


def write_kits(folder: Path) -> list[Path]:
    """Do what the example says of its kits, and keep all journals."""
    command = re.search(r"sotto (init .*\n.*)\n", EXAMPLE.read_text())
    assert command is not None
    words = shlex.split(command[1].replace("\\\\\n", ""))
    words = [str(folder) if word == "kits" else word for word in words]
    hosts = [part for port in free_ports(4) for part in ("--host", f"127.0.0.1:{port}")]
    written = CliRunner().invoke(cli, [*words, *hosts, "--set", "state.keep_checkpoints=100"])
    assert written.exit_code == 0, written.output
    return [folder / f"peer-{index}" / "peer.toml" for index in range(4)]


def rounds_done(file: Path) -> int:
    names = [path.name for path in (file.parent / "state").glob("journal-*")]
    return max((int(name.removeprefix("journal-").removesuffix(".log")) for name in names), default=0)


@pytest.mark.slow
def test_four_processes_are_as_good_as_one_and_may_be_killed(tmp_path: Path) -> None:
    files = write_kits(tmp_path / "kits")
    processes = [start_file(EXAMPLE, file) for file in files]
    for victim in (0, 1, 2, 3, 0):
        # Once it has done some rounds since it was started.
        before = rounds_done(files[victim])
        while rounds_done(files[victim]) <= before:
            assert processes[victim].is_alive(), (files[victim].parent / "log.txt").read_text()
            time.sleep(0.01)
        processes[victim].kill()
        processes[victim].join()
        processes[victim] = start_file(EXAMPLE, files[victim])
    torch.set_num_threads(1)
    right, total = runpy.run_path(str(EXAMPLE))["train"](None)
    for file, process in zip(files, processes, strict=True):
        process.join(200)
        log = (file.parent / "log.txt").read_text()
        assert process.exitcode == 0, log
        found = re.search(r"right: (\d+) of (\d+)", log)
        assert found is not None, log
        assert 100 * int(found[1]) / int(found[2]) > 100 * right / total - 0.5
