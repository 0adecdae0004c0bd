"""What the tests of adapters share: kits, samples, and a bare loop to compare with."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.library.scripts import write_kits

PEERS = 2
ROUNDS = 3
EVERY = 4
AVERAGED = ("algorithm.name=allreduce", "graph.kind=complete")


def kit(folder: Path, *settings: str, peers: int = PEERS) -> Path:
    """Return the configuration of the first of some peers, of a run that averages models."""
    return write_kits(folder, peers, f"run.rounds={ROUNDS}", *AVERAGED, *settings)[0]


def digits(seed: int, count: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of a peer's own: which of six numbers is the largest."""
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.argmax(1)
