"""The page for users with a training script of their own, followed to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.runner import sotto
from tests.docs.walk import ROOT, blocks, patched, walk

pytestmark = pytest.mark.usefixtures("warm_python")

PAGE = ROOT / "docs" / "own-loop.md"


@pytest.mark.slow
@pytest.mark.timeout(900)  # Eleven processes, on machines that may be busy.
def test_the_page_leads_from_a_script_to_eight_processes(tmp_path: Path) -> None:
    printed = walk(PAGE, tmp_path, timeout_s=800)
    for index in range(3):
        peer, name = tmp_path / "runs" / "first" / "peers" / f"peer-{index}", f"peer-{index}"
        said = (peer / "log.txt").read_text().splitlines()[-1]
        assert (tmp_path / "runs" / "second" / "logs" / f"{name}.txt").read_text().splitlines()[-1] == said
        assert _accuracy(said) > 90
        # The simulation wrote it last.
        expected, model = (
            load_file(file) for file in (tmp_path / f"{name}.safetensors", peer / "state/model.safetensors")
        )
        assert all(torch.equal(value, expected[key]) for key, value in model.items())
    devices = [line for line in printed.splitlines() if "of the test samples are right" in line]
    assert len(devices) == 8
    assert min(map(_accuracy, devices)) > 90


def _accuracy(line: str) -> float:
    """Return the percentage that a script prints."""
    return float(line.rpartition(": ")[2].partition("%")[0])


def test_the_page_changes_two_lines_of_the_script_for_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = (block.text for block in blocks(PAGE) if block.file == "train.py")
    (lines,) = (block.text.splitlines() for block in blocks(PAGE) if "eight_bit" in block.text)
    imported, changed = lines
    former = next(line for line in script.splitlines() if line.startswith("model = "))
    script = f"{imported}\n{script}".replace(former, changed)
    assert "convert(nn.Sequential(" in script
    (tmp_path / "train.py").write_text(script)
    found = sotto("simulate", "train.py", "--peers", "2", "--name", "small")
    assert found.exit_code == 0, found.output
    for log in (tmp_path / "runs" / "small" / "logs").iterdir():
        assert _accuracy(log.read_text().splitlines()[-1]) > 70


def test_the_page_changes_three_lines_of_the_script_to_average_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = (block.text for block in blocks(PAGE) if block.file == "train.py")
    (diff,) = (block.text for block in blocks(PAGE) if block.language == "diff" and "average_gradients" in block.text)
    plain = "".join(f"{line.removesuffix('  # new')}\n" for line in script.splitlines())
    (tmp_path / "train.py").write_text(patched(plain, diff))
    command = (
        "simulate",
        "train.py",
        "--peers",
        "2",
        "--name",
        "mean",
        "--algorithm",
        "low-rank",
        "--graph",
        "complete",
    )
    found = sotto(*command)
    assert found.exit_code == 0, found.output
    logs = [(tmp_path / "runs" / "mean" / "logs" / f"peer-{index}.txt").read_text() for index in range(2)]
    # They have one model.
    one, other = map(_accuracy, (log.splitlines()[-1] for log in logs))
    assert one == other > 90
