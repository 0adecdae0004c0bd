"""The page for users with a training script of their own, followed to the letter but for the number of rounds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.docs.walk import ROOT, walk


@pytest.mark.slow
@pytest.mark.timeout(900)  # Nine processes, on machines that may be busy.
def test_the_page_leads_from_a_script_to_eight_processes(tmp_path: Path) -> None:
    page = ROOT / "docs" / "own-loop.md"
    printed = walk(page, tmp_path, replace={"run.rounds=40": "run.rounds=4"}, timeout_s=800)
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
