"""A notebook runs its cells inside an event loop, and functions of a cell belong to no module that can be imported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import sottovoce
import torch

from peer.config.options import load
from peer.ops.cluster_files import Host, write_cluster


def test_peers_are_simulated_in_a_cell(tmp_path: Path) -> None:
    config = load(environment={}, overrides=["training.task=loop", "run.rounds=30", "compressor.fraction=0.5"])
    file, *_ = write_cluster(tmp_path, config, [Host("127.0.0.1", 7700 + index) for index in range(3)])

    def train(place: sottovoce.Place) -> float:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sottovoce.join(model, place, every=2, keep=[optimizer]) as peer:
            while not peer.done:
                inputs = torch.randn(16, 4)
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                peer.step(loss)
        return loss.item()

    async def cell() -> tuple[float, ...]:
        return tuple(sottovoce.simulate(train, file).results)

    results = asyncio.run(cell())
    assert len(results) == 3
    assert max(results) < 0.1
