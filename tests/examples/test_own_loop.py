"""The page for users with a training script of their own, followed to the letter but for the number of rounds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from peer.cli import cli
from peer.ops.local_cluster import free_ports
from tests.own_loop.processes import start_file

PAGE = Path(__file__).parents[2] / "docs" / "own-loop.md"
ROUNDS = 4


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(900)  # Nine processes, on machines that may be busy.
def test_the_page_leads_from_a_script_to_eight_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,), (init, simulate, processes) = blocks("python"), blocks("sh")
    Path("train.py").write_text(script)
    assert "python ../../train.py" in processes
    # Ports that are free on this machine, in place of the usual ones.
    hosts = [part for port in free_ports(8) for part in ("--host", f"127.0.0.1:{port}")]
    words = shlex.split(init.replace("run.rounds=40", f"run.rounds={ROUNDS}"))[1:]
    at = words.index("--peers")
    written = CliRunner().invoke(cli, words[:at] + hosts + words[at + 2 :])
    assert written.exit_code == 0, written.output

    python, *arguments = shlex.split(simulate)
    assert python == "python"
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    printed = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
    accuracies = [float(text) for text in re.findall(r"0\.\d+", printed.stdout)]
    assert len(accuracies) == 8
    assert min(accuracies) > 0.7
    simulated = [load_file(f"peer-{index}.safetensors") for index in range(8)]

    files = [tmp_path / "kits" / f"peer-{index}" / "peer.toml" for index in range(8)]
    started = [start_file(tmp_path / "train.py", file) for file in files]
    for index, (file, process) in enumerate(zip(files, started, strict=True)):
        process.join(600)
        log = (file.parent / "log.txt").read_text()
        assert process.exitcode == 0, log
        assert float(log.split()[-1]) == accuracies[index]
        model = load_file(file.parent / f"peer-{index}.safetensors")
        assert all(torch.equal(value, simulated[index][name]) for name, value in model.items())
