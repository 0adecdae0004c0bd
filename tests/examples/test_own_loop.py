"""The page for users with a training script of their own, followed to the letter but for the number of rounds."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
import sottovoce
import torch
from safetensors.torch import load_file

from peer.config.options import load
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from tests.docs.walk import ROOT, blocks, walk

pytestmark = pytest.mark.usefixtures("warm_python")

PAGE = ROOT / "docs" / "own-loop.md"


@pytest.mark.slow
@pytest.mark.timeout(900)  # Nine processes, on machines that may be busy.
def test_the_page_leads_from_a_script_to_eight_processes(tmp_path: Path) -> None:
    printed = walk(PAGE, tmp_path, replace={"run.rounds=40": "run.rounds=4"}, timeout_s=800)
    # One list from the simulation, then a number from each process, in any order.
    lists = [ast.literal_eval(line) for line in printed.splitlines() if line.startswith(("[0.", "(0."))]
    numbers = [float(line) for line in printed.splitlines() if line.startswith("0.")]
    (simulated,) = lists
    assert len(simulated) == 8
    assert min(simulated) > 0.7
    assert sorted(simulated) == sorted(numbers)
    for index in range(8):
        expected = load_file(tmp_path / f"peer-{index}.safetensors")
        model = load_file(tmp_path / "kits" / f"peer-{index}" / f"peer-{index}.safetensors")
        assert all(torch.equal(value, expected[name]) for name, value in model.items())


def test_the_page_changes_two_lines_of_the_script_for_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = (block.text for block in blocks(PAGE) if block.file == "train.py")
    (lines,) = (block.text.splitlines() for block in blocks(PAGE) if "eight_bit" in block.text)
    imported, changed = lines
    former = next(line for line in script.splitlines() if line.startswith("    model = "))
    script = f"{imported}\n{script}".replace(former, changed)
    assert "convert(nn.Sequential(" in script
    settings = ("training.task=loop", "run.rounds=20", "compressor.fraction=0.1")
    file = write_cluster(
        tmp_path, load(environment={}, overrides=settings), [Host("127.0.0.1", port) for port in free_ports(2)]
    )[0]
    (tmp_path / "train.py").write_text(script)
    found = sottovoce.simulate(runpy.run_path(str(tmp_path / "train.py"))["train"], file).results
    assert min(found) > 0.7
