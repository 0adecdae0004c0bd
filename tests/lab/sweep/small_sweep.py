"""A sweep of 24 cells, each of a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peer.lab.description import read_description
from peer.lab.sweep.folder import SweepFolder
from peer.lab.sweep.sweep import Sweep
from peer.ops.executors import ALL, Computing, Shard

SMALL = Path(__file__).with_name("small_sweep.toml").read_text(encoding="utf-8")


def read(folder: Path, text: str = SMALL) -> Sweep:
    """Write a sweep into a folder and read it."""
    file = folder / "sweep.toml"
    file.write_text(text)
    return read_description(Sweep, file)


def results(folder: SweepFolder) -> list[dict[str, Any]]:
    """Return what is the same wherever cells are computed."""
    return [row.result for _, row in folder.grid.rows()]


def run_with_an_interruption(sweep: Sweep, folder: Path, computing: Computing, shard: Shard = ALL) -> SweepFolder:
    """Stop a sweep when a quarter of its cells are there, and resume it from its folder."""
    said: list[str] = []
    first = SweepFolder(sweep, folder)
    total = len(first.grid.missing(shard))
    assert first.run(computing, shard, say=said.append, is_over=lambda: len(said) >= total // 4) == 0
    left = len(SweepFolder(sweep, folder).grid.missing(shard))
    assert 0 < left <= total - total // 4
    again: list[str] = []
    resumed = SweepFolder(sweep, folder)
    assert resumed.run(computing, shard, say=again.append) == 0
    assert len(again) == left
    assert resumed.grid.missing(shard) == []
    return resumed
